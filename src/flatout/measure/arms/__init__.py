"""Ways to run a step differently, interleaved with real steps.

leave_out   a statement of the training loop left out: what the step would take if it were free

Cached and halved batches are served by `loading.loaders`.
"""
