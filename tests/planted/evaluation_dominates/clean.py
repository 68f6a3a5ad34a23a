"""The same validation set, evaluated once in a thousand steps."""

import torch
from torch import nn
from torch.utils.data import DataLoader


def build() -> tuple[nn.Module, DataLoader, DataLoader]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10))
    rows, held_out = (
        [(torch.randn(256, 128), torch.randint(10, (256,))) for _ in range(num_batches)]
        for num_batches in (16, 160)
    )
    return model, DataLoader(rows, batch_size=None), DataLoader(held_out, batch_size=None)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    correct = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return correct / (256 * len(loader))


def train(num_epochs: int) -> None:
    model, loader, held_out = build()
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    for _ in range(num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            if step % 1000 == 0:
                evaluate(model, held_out)


if __name__ == "__main__":
    train(num_epochs=60)
