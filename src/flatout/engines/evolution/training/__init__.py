"""A run of `flatout evolve`.

trainer              epochs, evaluations, checkpoints, and how it ends
population_schedule  which members run together, and how many rows at once
answers              completions and rewards of members and of the weights alone; the rate of plain inference
models               loads and saves the model, encodes prompts and decodes completions
records              a line of log per epoch, and the state of a checkpoint
"""
