"""The data path of a job.

loaders          DataLoaders as the training process sees them: waits, epochs, batches served again
loader_records   the notes on one DataLoader, and the evidence they become
workers          instruments in the process that fetches batches
fetch_stacks     the lines that make batches
call_profile     the lines that build a batch by concatenating arrays
lengths          how ragged the samples of a batch are, and what padding them costs
"""
