"""From the fitness of members to a step of the weights.

directions   the direction in which fitness grows, as one product per stack of matrices
masters      the fp32 copy that learns, and its optimizer
ascend       both in one Triton kernel
integer      the same without floating point: int8 weights that move by votes
"""
