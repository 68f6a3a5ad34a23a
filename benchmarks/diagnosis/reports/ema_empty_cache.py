"""Train a denoiser whose moving average empties the allocator's cache after every update.

Report: huggingface/diffusers#2563, training with the average 2 to 2.5 times as fast without the call.
"""

import argparse
import copy

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mended", action="store_true")
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, BATCH, SIZE = (128, 16, 64) if device.type == "cuda" else (8, 2, 16)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(width, width)

    def forward(self, x, time):
        y = self.conv1(nn.functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return x + self.conv2(nn.functional.silu(self.norm2(y)))


class Denoiser(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(8))

    def forward(self, images, time):
        embedded, x = self.time(time[:, None]), self.first(images)
        for block in self.blocks:
            x = block(x, embedded)
        return self.last(x)


class EMAModel:
    """Exponential moving average of a model's weights."""

    def __init__(self, model, decay=0.9999):
        self.averaged_model = copy.deepcopy(model).eval().requires_grad_(False)
        self.max_decay, self.num_steps = decay, 0

    @torch.no_grad()
    def step(self, model):
        self.num_steps += 1
        decay = min(self.max_decay, (1 + self.num_steps) / (10 + self.num_steps))
        pairs = zip(self.averaged_model.parameters(), model.parameters(), strict=True)
        for average, parameter in pairs:  # also: per-parameter-python-loop
            average.mul_(decay).add_(parameter, alpha=1 - decay)
        if not args.mended:
            torch.cuda.empty_cache()  # guilty: empty-cache-in-loop on cuda


def main():
    torch.manual_seed(0)
    model = Denoiser(WIDTH).to(device)
    average = EMAModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.rand(256, 3, SIZE, SIZE, device=device)
    for step in range(100_000):
        clean = data[torch.randint(0, len(data), (BATCH,), device=device)]
        noise, time = torch.randn_like(clean), torch.rand(BATCH, device=device)
        mix = time[:, None, None, None]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            predicted = model(clean * (1 - mix) + noise * mix, time)  # also: launch-bound-step on cuda
        loss = nn.functional.mse_loss(predicted.float(), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.step(model)
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
