"""Recognise gestures from a sequence of joint positions."""

import torch
from torch import nn


class Recogniser(nn.Module):
    def __init__(self, joints=24, hidden=96, gestures=8):
        super().__init__()
        self.hidden = hidden
        self.cell = nn.LSTMCell(joints, hidden)
        self.head = nn.Linear(hidden, gestures)

    def forward(self, frames):
        h = frames.new_zeros(len(frames), self.hidden)
        c = torch.zeros_like(h)
        for frame in frames.unbind(1):
            h, c = self.cell(frame, (h, c))  # guilty
        return self.head(h)


def gestures(batch, device):
    labels = torch.randint(0, 8, (batch,), device=device)
    time = torch.linspace(0, 1, 48, device=device).view(1, -1, 1)
    frames = torch.sin(time * (labels.view(-1, 1, 1) + 1) * torch.arange(1, 25, device=device))
    return frames, labels


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(7)
    model = Recogniser().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(5000):
        frames, labels = gestures(32, device)
        loss = nn.functional.cross_entropy(model(frames), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"{step:5d} {loss.item():.3f}")


main()
