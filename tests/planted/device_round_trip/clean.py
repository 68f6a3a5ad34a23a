"""Train a policy that draws its actions where the model is."""

import torch
from torch import nn


def main():
    torch.manual_seed(17)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(512, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=device == "cuda")
    rows = 2048 if device == "cuda" else 64
    states, rewards = torch.randn(rows, 512, device=device), torch.randn(rows, device=device)
    for step in range(20_000):
        chances = model(states).softmax(-1)  # also: launch-bound-step on cuda
        actions = torch.multinomial(chances.detach(), 1)
        loss = -(chances.gather(1, actions).squeeze(1).log() * rewards).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
