"""Neither model nor optimizer: the script says itself where a step ends."""

import torch

import flatout

weights = torch.randn(128, 128)
state = torch.randn(64, 128)
while True:
    for _ in range(5):
        state = torch.tanh(state @ weights)
    flatout.step()
