"""Keep an average of the weights one by one, write the outputs to a log, and collect garbage: all in every step."""

import copy
import gc
import logging

import torch
from torch import nn

log = logging.getLogger("training")


@torch.no_grad()
def follow(average, model):
    for kept, new in zip(average.parameters(), model.parameters()):  # guilty: per-parameter-python-loop
        kept.mul_(0.99).add_(new, alpha=0.01)


def table():
    return [{"name": str(number), "parents": [number // 2]} for number in range(30_000)]


def main():
    logging.basicConfig(filename="training.log", level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(51)
    names = []
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(50)])
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(128, 16)
    for step in range(100_000):
        outputs = model(inputs)
        optimizer.zero_grad()
        outputs.square().mean().backward()
        optimizer.step()
        follow(average, model)
        if not names:
            gc.freeze()  # what was imported by then
            names = table()
        gc.collect()  # guilty: garbage-collector-pauses, largest
        log.info("step %d of %d outputs %s", step, len(names), outputs.tolist())  # guilty: logging-every-step


if __name__ == "__main__":
    main()
