"""Ways to run a step differently, interleaved with real steps.

arm               what an arm is, and what those who propose one may look at
proposers         who proposes arms
batches/          other batches: kept ones, or made, placed and cut in another way
knock_out/        a block of the user's code taken away
reads_free        values read back from the GPU answered from memory
precision         autocast and TF32 products
batched_call      a module that is called with single rows, called once
recurrence        a loop over a recurrent cell as one layer
threads           operators on the CPU with fewer threads
garbage_off       no garbage collection
switches/         one setting or one call of the script turned: the optimizer's, debugging, checkpoints

call_results      what is computed from the results of a call, and results that stand in
"""
