"""Steering: from pairs of texts to a direction in the residual stream that changes what a model says.

    questions     A/B questions and pairs, read and split into train, search and fresh
    activations   one early-exit pass over the texts gives the residual stream of every wanted layer
    vectors       a direction per layer from the activations of both sides, in units of the layer's own norm
    applying      a direction added (projected out, clamped) at a layer, for any transformers model
    search        which layer, direction and strength: hundreds of trials share one batched generation

The steps up to the vectors depend on the texts and the model only, never on a trial: they run once, and
`store` keeps what they give by its content.
"""
