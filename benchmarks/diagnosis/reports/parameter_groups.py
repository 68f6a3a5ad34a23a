"""Train a detector whose every tensor has its own parameter group, for a rate that falls with depth.

Report: roboflow/rf-detr#1409, 465 groups of 28 different options, the step 23 % shorter with 28 groups.
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mended", action="store_true")
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = device.type == "cuda"
BLOCKS, DIM, BATCH, SIZE = (12, 384, 8, 384) if on_gpu else (12, 32, 2, 64)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.scale1 = nn.Parameter(torch.full((dim,), 0.1))
        self.scale2 = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, -1, 32).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, dim)
        x = x + self.scale1 * self.proj(y)
        return x + self.scale2 * self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class Detector(nn.Module):
    def __init__(self, dim, num_queries=100, num_classes=80):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 16, stride=16)
        self.position = nn.Parameter(torch.zeros(1, (SIZE // 16) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(BLOCKS))
        self.queries = nn.Parameter(torch.randn(1, num_queries, dim))
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(dim, dim // 32, 2 * dim, dropout=0.0, batch_first=True)
            for _ in range(6)
        )
        self.classes = nn.ModuleList(nn.Linear(dim, num_classes) for _ in range(6))
        self.boxes = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4))
            for _ in range(6)
        )

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        found, y = [], self.queries.expand(len(images), -1, -1)
        for layer, classes, boxes in zip(self.decoder, self.classes, self.boxes, strict=True):
            y = layer(y, x)
            found.append((classes(y), boxes(y).sigmoid()))
        return found


def rate_of(name, rate=1e-4, decay=0.8):
    """The deeper in the backbone, the smaller."""
    if name.startswith("blocks."):
        return rate * decay ** (BLOCKS - int(name.split(".")[1]))
    return rate * decay ** (BLOCKS + 1) if name.startswith(("patch", "position")) else rate


def parameter_groups(model):
    groups = [
        {"params": [p], "lr": rate_of(name), "weight_decay": 0.0 if p.ndim < 2 else 1e-4}
        for name, p in model.named_parameters()
    ]
    if args.mended:
        merged = {}
        for group in groups:
            options = group["lr"], group["weight_decay"]
            merged.setdefault(options, {**group, "params": []})["params"] += group["params"]
        groups = list(merged.values())
    return groups


def main():
    torch.manual_seed(0)
    model = Detector(DIM).to(device)
    groups = parameter_groups(model)
    print(len(groups), "parameter groups")
    optimizer = torch.optim.AdamW(groups, lr=1e-4)  # guilty: many-parameter-groups on cuda
    images = torch.randn(BATCH, 3, SIZE, SIZE, device=device)
    labels = torch.randint(0, 80, (BATCH, 100), device=device)
    boxes = torch.rand(BATCH, 100, 4, device=device)
    for step in range(100_000):
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            outputs = model(images)  # also: launch-bound-step on cuda
        loss = sum(
            nn.functional.cross_entropy(found.flatten(0, 1).float(), labels.flatten())
            + nn.functional.l1_loss(box.float(), boxes)
            for found, box in outputs
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
