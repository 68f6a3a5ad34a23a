"""Triton kernels of the decoding step, for GPUs.

step                 one token of every row by a handful of kernels; `obstacles` says where it cannot
linear, split, gate  products of rows whose variants differ, and what stands around them
attend, norm         attention over the cache; norms
noise, choose        members' noise made where it is used; the next token of each row
"""
