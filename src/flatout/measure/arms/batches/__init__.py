"""Steps that run on other batches than the job's own.

kept_batches      batches served again, whole or halved
batch_statements  the same for batches that the training loop makes itself, without a DataLoader
staged            batches in page-locked memory, or on the GPU already
trimmed           batches without needless padding
workers           the training loader with another number of workers, or none
whole_batches     all samples of a batch taken from the dataset at once

served_batches    the batches of a cached block, changed for one block
"""
