"""Train a deep network of small blocks and keep an average of its weights, computed tensor by tensor.

Report: ecmwf/WeatherGenerator#2551, one update of the average in 10 ms instead of 100 ms.
"""

import argparse
import copy

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mended", action="store_true")
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIM, LAYERS, BATCH = (256, 48, 512) if device.type == "cuda" else (32, 48, 16)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class EMAModel:
    """The average of a model, whose half-life grows with the number of samples seen."""

    def __init__(self, model, halflife_in_thousands=10.0, rampup_ratio=0.09):
        self.ema_model = copy.deepcopy(model).requires_grad_(False)
        self.halflife, self.rampup_ratio = halflife_in_thousands, rampup_ratio

    @torch.no_grad()
    def update(self, model, num_samples, batch_size):
        halflife = min(self.halflife, num_samples / 1000 * self.rampup_ratio)
        beta = 0.5 ** (batch_size / max(halflife * 1000, 1e-6))
        if args.mended:
            torch._foreach_lerp_(list(self.ema_model.parameters()), list(model.parameters()), 1 - beta)
            return
        source = dict(model.named_parameters())
        for name, average in self.ema_model.named_parameters():  # guilty: per-parameter-python-loop
            if name not in source:
                raise KeyError(f"{name} is not in the model")
            average.copy_(beta * average + (1.0 - beta) * source[name])


def main():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(DIM) for _ in range(LAYERS)), nn.Linear(DIM, DIM)).to(device)
    ema = EMAModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    fields = torch.randn(8192, DIM, device=device)
    for step in range(100_000):
        now = torch.randint(0, len(fields) - 1, (BATCH,), device=device)
        predicted = model(fields[now])  # also: launch-bound-step on cuda
        loss = nn.functional.mse_loss(predicted, fields[now + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model, (step + 1) * BATCH, BATCH)
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
