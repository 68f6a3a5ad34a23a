"""Keep an average of the weights, one after the other, and write the outputs to a log in every step."""

import copy
import logging

import torch
from torch import nn

log = logging.getLogger("training")


@torch.no_grad()
def follow(mean, model):
    for kept, new in zip(mean.parameters(), model.parameters()):  # guilty: per-parameter-python-loop, largest
        kept.copy_(0.99 * kept + 0.01 * new)


def main():
    logging.basicConfig(filename="training.log", level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(42)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(60)])
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(128, 16)
    for step in range(100_000):
        outputs = model(inputs)
        optimizer.zero_grad()
        outputs.square().mean().backward()
        optimizer.step()
        follow(average, model)
        log.info("step %d outputs %s", step, outputs[:48].tolist())  # guilty: logging-every-step


if __name__ == "__main__":
    main()
