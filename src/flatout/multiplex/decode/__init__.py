"""Batched generation by slots that run different variants.

requests       requests and their completions
sampling       the next token of every row
cache          keys and values at fixed addresses
forward        one forward for every family, each row with its own variant
steppers       ways to run one step of all slots: eager, compiled, recorded as a CUDA graph
fused          the step by hand-written kernels
slot_schedule  which request takes which slot, and when the host looks
generator      the public class and function
"""
