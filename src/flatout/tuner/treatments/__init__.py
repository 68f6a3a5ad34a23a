"""One treatment per file; its name is the file's with hyphens.

loading/      batches: workers, what they fetch ahead, page-locked memory, copies
arithmetic/   number formats, layouts, kernels and compilation
updates/      the optimizer's step
waits/        what makes the host wait or work beside the step
"""
