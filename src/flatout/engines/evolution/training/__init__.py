"""A run of `flatout evolve`.

trainer    epochs, evaluations, checkpoints, and how it ends
schedule   which members run together, and how many rows at once
answers    prompts in, rewards out: of members, of the weights alone, and the rate of plain inference
texts      between prompts and token numbers;  models  a model folder in, a model folder out
records    a line of log per epoch, and the state of a checkpoint
"""
