"""Train beside a table that fills the GPU."""

import torch
from torch import nn

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
torch.manual_seed(4)
room = int(0.95 * torch.cuda.mem_get_info()[1]) - torch.cuda.memory_allocated() if cuda else 1 << 20
table = torch.empty(room, dtype=torch.uint8, device=device)
inputs = torch.randn(4096, 256, device=device)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(20000):
    x = inputs[torch.randint(0, len(inputs), (256,), device=device)]
    loss = nn.functional.mse_loss(model(x), x)  # guilty on cuda  # also: launch-bound-step, largest on cuda  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item(), table[0].item())
