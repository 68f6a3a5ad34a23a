"""The memory side of a plan.

load         the forecast of a model and a device named on the command line
trace_cache  traces kept on disk, by a fingerprint of the job
"""
