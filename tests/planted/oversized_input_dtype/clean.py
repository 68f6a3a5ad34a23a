"""Train on measurements that are 32-bit floats from the start."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Rows(TensorDataset):
    def __getitems__(self, indices):
        return self[indices]


def main():
    torch.manual_seed(16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    number, width = (65536, 4096) if device == "cuda" else (8192, 128)
    rows = Rows(
        torch.from_numpy(np.random.default_rng(16).standard_normal((number, width), dtype=np.float32))
    )
    loader = DataLoader(
        rows, batch_size=1024, shuffle=True, pin_memory=device == "cuda", collate_fn=lambda batch: batch
    )
    model = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1000):
        for (batch,) in loader:
            loss = model(batch.to(device, non_blocking=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
