"""Steps with one setting or one call of the script changed.

optimizer_step   parameter groups merged, lists of tensors, one fused kernel
ignored_calls    no anomaly detection; `empty_cache` and `synchronize` do nothing
checkpointing    activations kept instead of recomputed
uncompiled       compiled functions run as they are written
no_grad          no gradients for a model call that needs none
convolutions     weights in channels-last layout
attention        handwritten attention as one fused call
alignment        weights of odd sizes, padded
"""
