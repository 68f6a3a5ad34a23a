"""Ways to run a step differently, interleaved with real steps.

arm               what an arm is, and what those who propose one may look at
proposers         who proposes arms
kept_batches      batches served again, whole or halved
batch_statements  the same for batches that the training loop makes itself, without a DataLoader
knock_out/        a block of the user's code taken away
reads_free        values read back from the GPU answered from memory
precision         autocast and TF32 products
staged            batches in page-locked memory, or on the GPU already
trimmed           batches without needless padding
workers           the training loader with another number of workers
batched_call      a module that is called with single rows, called once
recurrence        a loop over a recurrent cell as one layer

served_batches    the batches of a cached block, changed for one block
call_results      what is computed from the results of a call, and results that stand in
"""
