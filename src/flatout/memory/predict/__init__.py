"""From traces to answers.

forecast       how much a step takes, and how large a batch may be
steps          the steps of a job at any size: stored, replayed or traced
estimate       `MemoryEstimate`: by component, by phase, with the operation at the peak
allocator      PyTorch's caching allocator, simulated
largest_batch  the search under a cap
replay         a step at other sizes, from a few small traces
samples        which sizes to trace for a replay
repeat_steps   many steps from a trace of two
parallel       one rank of DDP or FSDP2
fsdp_units     what FSDP2 shards
trace_edit     a trace with storages and events put in
notes          what an estimate leans on
"""
