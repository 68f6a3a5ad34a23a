"""A run of `flatout evolve`.

trainer      epochs, evaluations, checkpoints, and how it ends
schedule     which members run together;  step_sizes  sigma and lr where nobody gave them
texts        between prompts and token numbers;  evaluate  scores and the rate of plain inference
log          a line per epoch;  checkpoint  what it takes to go on;  models  a folder in, a folder out
"""
