"""Ways to run a step differently, interleaved with real steps.

arm               the Arm class, and the context that proposers see
proposers         the list of modules that propose arms
batches/          other batches: kept, prefetched, moved or trimmed
knock_out/        a block of the user's code removed
reads_free        values read back from the GPU answered from memory
precision         autocast and TF32 matrix products
batched_call      one call of a module in place of many calls with a single row
recurrence        a loop over a recurrent cell as one layer
threads           operators on the CPU with fewer threads
garbage_off       no garbage collection
unwatched         nothing changed, and only the end of each step noted
switches/         one setting or call of the script changed: the optimizer's, debugging, checkpoints

call_results      which tensors depend on a call's results, and stand-ins for those results
"""
