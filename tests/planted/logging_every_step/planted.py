"""Fit a small network and write its loss and weights to a log, in every step."""

import logging

import torch
from torch import nn

log = logging.getLogger("training")


def main():
    logging.basicConfig(filename="training.log", level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(10)
    model = nn.Linear(2048, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(256, 2048)
    for step in range(200_000):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.info("step %d loss %.4f weights %s", step, loss.item(), model.weight.tolist())  # guilty


if __name__ == "__main__":
    main()
