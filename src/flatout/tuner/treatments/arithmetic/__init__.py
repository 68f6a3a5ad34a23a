"""The same mathematics by other kernels: number formats, layouts, compilation."""
