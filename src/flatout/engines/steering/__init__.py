"""Steering: from pairs of texts to a direction in the residual stream that changes what a model says.

    verbs         what `flatout steer` does: extract, fit, search, apply, report, status
    settings      the settings of a search
    questions     A/B questions and pairs, read and split into train, search and fresh; neutral texts
    load_model    a model folder on a CPU, a GPU or several
    model_blocks  where a transformers model keeps its layers
    extract/      the residual stream of every wanted layer, from one early-exit pass over the texts
    vectors/      a direction per layer from the activations of both sides, in units of the layer's own norm
    trials/       rows of many trials in one batch: steered, scored or continued
    search/       which layer, method, strength and place: hundreds of trials, halved inside the batch
    workers/      one replica of the model per GPU, all drawing trials from one study
    report/       what a search found, as a record, a page and a picture

The steps up to the vectors depend on the texts and the model only, never on a trial: they run once, and
`extract.store` keeps what they give by its content.
"""
