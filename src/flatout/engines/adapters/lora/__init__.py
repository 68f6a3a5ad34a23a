"""Low-rank adapters on a frozen encoder, several trained in one pass by the products of `multiplex`.

bank          factors and gradients of all adapters in two buffers
token_blocks  batches of several tasks laid end to end as one sequence of tokens
shape_plan    what the shapes of a batch decide
encoder       the packed encoder; encoder_layers and attention are its parts,
              and add_norm_kernel fuses a residual add and its norm on a GPU
optimizer     an AdamW, a schedule and a norm to clip to for each adapter
fused_step    a training step of all adapters
gradient_sum  sums over the batches of a step whose order does not depend on who computed them
recorder      a step recorded as a CUDA graph, and when that pays
chunked_loss  cross-entropy over a vocabulary without whole logits
"""
