"""The memory side of a plan.

questions    what the planner asks of the memory room
traced       the answers, from traces
load         the forecast of a model and a device named on the command line
trace_cache  traces kept on disk
fingerprint  what the traces of a job depend on, as one checksum
segments     how the job's allocator is set
caveats      what of a forecast may be too low
"""
