"""The choices of CUDA and the memory of its libraries, reproduced in a trace on the CPU.

rules          autocast, dropout, softmax, optimizers: the CPU chooses as CUDA would
attention      which attention kernel runs, and its workspace
encoder_layer  the fused layers of evaluation
recurrent      cuDNN's recurrent layers
recurrent_cells  cells that a model calls step by step
norms          what is copied before it is normalised
workspaces     blocks that a kernel holds besides its results: one rule per operation
convolutions   the rules of cuDNN's convolutions
formulas       block sizes that grow in steps
"""
