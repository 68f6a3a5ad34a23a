"""The bytes of a training step: traced without a GPU, simulated, and answered for any size.

jobs/     from a model, a step function or a name to a `Job`, and one step of it
trace/    that step on tensors without data: births and deaths of every storage
cuda/     what CUDA would choose, and take besides: kernels, workspaces, libraries
predict/  allocator, replay at other sizes, estimate, largest batch, several GPUs
probe/    a short real run, and how it corrects an estimate
process/  traces and probes run in a child process
plot      an estimate as a picture
"""
