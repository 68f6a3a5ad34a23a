"""Train with Accelerate and gradient accumulation, and keep an average of the weights."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from accelerate import Accelerator
except ImportError:
    raise SystemExit("skipped: this script needs accelerate") from None

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--mended", choices=["average"])
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class EMA:
    """An exponential moving average of the parameters."""

    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model):
        if args.mended == "average":
            with torch.no_grad():
                torch._foreach_lerp_(list(self.shadow.values()), list(model.parameters()), 1 - self.decay)
            return
        for name, parameter in model.named_parameters():
            average = self.decay * self.shadow[name] + (1.0 - self.decay) * parameter.detach()
            self.shadow[name] = average.clone()


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(*(Block(args.dim) for _ in range(args.layers)), nn.Linear(args.dim, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(8192, args.dim), torch.randn(8192, 1))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ema = EMA(accelerator.unwrap_model(model))
    for epoch in range(args.epochs):
        for step, (inputs, targets) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.update(accelerator.unwrap_model(model))
            if step % 100 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
