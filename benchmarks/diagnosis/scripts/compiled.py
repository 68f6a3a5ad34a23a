"""Train a compiled residual network on made-up vectors, with a guard against exploding activations."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--dim", type=int, default=128)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--max-iters", type=int, default=100_000)
parser.add_argument("--backend", default="inductor")
parser.add_argument("--mended", choices=["graph-break", "costly-block"])
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        if args.mended != "graph-break" and x.abs().max().item() > 1e4:
            raise ValueError("activations explode")
        return x


class Net(nn.Module):
    def __init__(self, dim, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def histogram(model):
    """How large the gradients are, for the log."""
    counts = [0] * 8
    for parameter in model.parameters():
        sizes = parameter.grad.abs().flatten()
        for i in range(8):
            counts[i] += int((sizes > 10.0**-i).sum())
    return counts


def main():
    torch.manual_seed(0)
    net = Net(args.dim, args.layers).to(device)
    model = torch.compile(net, backend=args.backend)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = torch.randn(16_384, args.dim, device=device)
    for step in range(args.max_iters):
        index = torch.randint(0, len(data), (args.batch_size,), device=device)
        x = data[index]
        loss = (model(x) - x.mean(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        if args.mended != "costly-block" or step % 100 == 0:
            sizes = histogram(net)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f} gradients {sizes}")


if __name__ == "__main__":
    main()
