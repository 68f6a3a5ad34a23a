"""A run of `flatout evolve`.

trainer    epochs, evaluations, checkpoints, and how it ends
schedule   which members run together, and how many rows at once
answers    prompts in, rewards out: of members, of the weights alone, and the rate of plain inference
models     a model folder in, a model folder out, and texts as token numbers between them
records    a line of log per epoch, and the state of a checkpoint
"""
