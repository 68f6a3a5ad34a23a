"""Three engines for work that runs many variants of one model, and the floor they stand on.

run/        what every engine's run needs: settings, run folder, checkpoints, ranks, log, models
evolution/  train a language model by evolution strategies, the whole population in one forward
adapters/   train LoRA adapters for several tasks in one batch, and the router that picks among them
steering/   search the vector that steers a language model, hundreds of trials in one batch

Engines never import each other; "one forward, many models" itself is `flatout.multiplex`.
"""
