"""Steps with one setting or one call of the script turned.

optimizer_step   parameter groups merged, lists of tensors, one fused kernel
ignored_calls    anomaly detection off; `empty_cache` and `synchronize` that do nothing
checkpointing    activations kept, not computed again
uncompiled       what torch.compile compiled, as it was written
no_grad          a model call of which nobody wants the gradients
convolutions     weights with their channels last
attention        attention that is written out, in one fused call
alignment        weights of odd sizes, padded
"""
