"""One rule per file; the first digit of its code and its folder say where the time goes.

1   loading/      the data path
2   waits/        transfers, waits, and the time between the phases
    syncs/        calls that make the host wait, and debugging aids: FO221 and up
3   loops/        Python loops in the model
4   arithmetic/   how the device computes
5   memory/       what is kept alive
6   compilation/  torch.compile
7   ranks/        several processes that train together
8   outside/      what happens between the steps
9   training/     what is wrong with training itself
"""
