"""A step on tensors without data, as the births and deaths of its storages.

make_trace     a trace in this process: by our rules of CUDA, or on the GPU that is here
tracer         runs the step and logs every storage
record         `Trace`, `Storage`, `Guess`
two_steps      from the raw log to a first step and a next one
eager          compiled models run eagerly
device_thread  graphs of gradients are made in a thread of their own
fake_mode      PyTorch's fake tensors with a cheaper cache
known_values   real values of integers and masks beside fake tensors
dynamic_sizes  results whose size depends on values
"""
