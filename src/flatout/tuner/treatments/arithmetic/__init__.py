"""The same mathematics with other kernels: number formats, layouts, compilation.

_loss_scale   what float16 needs in a script that does not scale its loss; not a treatment by itself
"""
