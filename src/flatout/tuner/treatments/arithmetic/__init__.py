"""The same mathematics by other kernels: number formats, layouts, compilation.

_loss_scale   what float16 needs of a script that knows nothing of it; not a treatment by itself
"""
