"""Recognise gestures from a sequence of joint positions, and guess the next few frames."""

import torch
from torch import nn


class Recogniser(nn.Module):
    def __init__(self, joints=24, hidden=96, gestures=8):
        super().__init__()
        self.encoder = nn.LSTM(joints, hidden, batch_first=True)
        self.head = nn.Linear(hidden, gestures)
        self.decoder = nn.LSTMCell(joints, hidden)
        self.joints = nn.Linear(hidden, joints)

    def forward(self, frames):
        _outputs, (h, c) = self.encoder(frames)
        h, c = h.squeeze(0), c.squeeze(0)
        logits = self.head(h)
        frame, guesses = frames[:, -1], []
        for _ in range(3):  # each input is the output before it, so these cannot be one call
            h, c = self.decoder(frame, (h, c))
            frame = self.joints(h)
            guesses.append(frame)
        return logits, torch.stack(guesses, dim=1)


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
        frames, labels = gestures(64, device)
        logits, guesses = model(frames)  # also: launch-bound-step on cuda
        loss = nn.functional.cross_entropy(logits, labels) + guesses.diff(dim=1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"{step:5d} {loss.item():.3f}")


main()
