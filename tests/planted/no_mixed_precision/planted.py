"""Distil a wide teacher into a student of its own size."""

import torch
from torch import nn


def network(width, depth):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, width))


def main():
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    width, batch = (4096, 4096) if cuda else (192, 256)
    torch.manual_seed(9)
    inputs = torch.randn(4 * batch, width, device=device)
    with torch.no_grad():
        targets = network(width, 1).to(device)(inputs)
    student = network(width, 3).to(device)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-2)
    for step in range(4000):
        chosen = torch.randint(0, len(inputs), (batch,), device=device)
        loss = nn.functional.mse_loss(student(inputs[chosen]), targets[chosen])  # guilty on cuda
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
