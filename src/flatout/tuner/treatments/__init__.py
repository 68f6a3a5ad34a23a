"""One treatment per file; its name is the file's with hyphens.

loading/      batches: workers, prefetching, page-locked memory, copies
arithmetic/   number formats, layouts, kernels and compilation
updates/      the optimizer's step
memory/       how memory is placed, and what the forward keeps
ranks/        what several processes exchange
waits/        what makes the host wait or work beside the step
"""
