"""The data path of a job.

loaders          DataLoaders as the training process sees them: waits, epochs, batches served again
loader_records   what is noted of one DataLoader, and the evidence it becomes
workers          the instruments that run where batches are fetched
fetch_stacks     the lines that batches are made in
call_profile     the lines that build a batch by gluing arrays together
lengths          how ragged the samples of a batch are, and what padding them costs
"""
