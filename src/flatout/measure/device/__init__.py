"""The device's side of a step.

recording      one session of torch's profiler, begun and ended at step boundaries
kernels        kernels and copies of a GPU, with its idle gaps
operators      the same picture from the host's operators, without a GPU
overlap        how much of a time span runs hidden behind another
flops          operations of one call of an operator
kernel_names   what a kernel or operator does, read from its name
"""
