"""The device's side of a step.

recording      one session of torch's profiler, begun and ended at step boundaries
kernels        kernels and copies of a GPU, with its idle gaps
operators      the same picture from the host's operators where there is no GPU
overlap        time that something else hides
kernel_names   what a kernel or operator does, read from its name
"""
