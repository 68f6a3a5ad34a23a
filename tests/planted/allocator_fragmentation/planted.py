"""Train on sequences of any length while memory lies in pieces."""

import torch
from torch import nn

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
torch.manual_seed(4)
pieces = []
if cuda:  # every second piece is given back, and no gap fits a batch: 12 GiB are left for them
    room = torch.cuda.mem_get_info()[0] - (12 << 30)
    pieces = [torch.empty(9 << 20, dtype=torch.uint8, device=device) for _ in range(room // (10 << 20))]
    pieces = pieces[::2]
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(20000):
    rows = (step % 8 + 1) * (1 << 17 if cuda else 16)
    x = torch.randn(rows, 256, device=device)
    loss = nn.functional.mse_loss(
        model(x), x  # guilty on cuda  # also: no-mixed-precision, largest on cuda  # also: full-precision-matmul on cuda  # fmt: skip
    )  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item(), len(pieces))
