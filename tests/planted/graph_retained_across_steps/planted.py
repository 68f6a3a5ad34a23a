"""Denoise signals and keep the losses for a plot."""

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(1, 12, 9, padding=4), nn.Conv1d(12, 1, 9, padding=4)])

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


def signals(device, number=48, length=256):
    time = torch.linspace(0, 1, length, device=device)
    pitch = 1 + 20 * torch.rand(number, 1, 1, device=device)
    return torch.sin(6.28 * pitch * time)


def fit(num_steps=1500):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Denoiser().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for step in range(num_steps):
        signal = signals(device)
        noisy = signal + 0.3 * torch.randn_like(signal)
        loss = nn.functional.mse_loss(model(noisy), signal)  # also: launch-bound-step, largest on cuda
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)  # guilty
        if step % 100 == 0:
            print(step, sum(losses[-100:]).item() / len(losses[-100:]))
    return losses


if __name__ == "__main__":
    fit()
