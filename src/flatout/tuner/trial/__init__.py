"""What a trial sees of its job, and where that is written down.

meter      times of steps, losses, what is computed at a few steps, and what ends the script
switched   treatments turned on and off between blocks of one run
hashes     tensors as one number: equal tensors have equal ones
reads      batches, numbers that the script reads, steps that a scaler skips
variants   the job with one thing changed on purpose: seeds, the last bit, 64 bits, no dropout
counts     launches, waits, copies, memory of a few steps: what is the same on every machine
journal    finished trials, for a tuning that was interrupted
on_cluster trials as tasks on the nodes of a Ray cluster
"""
