"""One treatment per file; its name is the file's with hyphens.

loading/      batches: workers, what they fetch ahead, page-locked memory, copies
arithmetic/   number formats, layouts, kernels and compilation
updates/      the optimizer's step
memory/       where memory lies, and what is kept of the forward
ranks/        what several processes say to each other
waits/        what makes the host wait or work beside the step
"""
