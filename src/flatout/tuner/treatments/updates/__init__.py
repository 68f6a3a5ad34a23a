"""The optimizer step in fewer kernels."""
