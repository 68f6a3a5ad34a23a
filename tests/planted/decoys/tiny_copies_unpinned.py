"""Batches of a few kilobytes that are copied from pageable memory: the copy is nothing beside the step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Rows(TensorDataset):
    def __getitems__(self, indices):
        return self[indices]


def main():
    torch.manual_seed(21)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = Rows(torch.randn(8192, 16), torch.randn(8192))
    loader = DataLoader(rows, batch_size=128, shuffle=True, collate_fn=lambda batch: batch)
    width = 8192 if device == "cuda" else 1024
    model = nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1000):
        for inputs, targets in loader:
            inputs = inputs.to(device, model[0].weight.dtype)  # decoy: unpinned-host-memory
            loss = (model(inputs).squeeze(1).float() - targets.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
