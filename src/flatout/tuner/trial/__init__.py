"""What a trial observes of its job, and where that is recorded.

meter      step times, losses, what a few steps compute, and the end of the script
switched   treatments turned on and off between blocks of one run
hashes     a tensor as one number: equal tensors have equal numbers
other_weights  averages and target networks, which no loss shows
reads      batches, numbers that the script reads, steps that a scaler skips
variants   the job with one thing changed on purpose: seeds, the last bit, 64 bits, no dropout
counts     launches, waits, copies and memory of a few steps, which are the same on every machine
fork_server  a process that has imported torch, from which trials fork
turns      trials that start beside each other and take their steps one after the other
journal    finished trials, for a tuning that was interrupted
on_cluster trials as tasks on the nodes of a Ray cluster
"""
