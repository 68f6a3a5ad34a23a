"""Train a mixture of experts that are called one by one."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(9)
WIDTH, EXPERTS = 16, 16


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = chosen == number
            rows = own.nonzero().squeeze(1)  # also: mask-indexing, sync-in-step, per-sample-lookup
            out = out.index_add(0, rows, expert(x.index_select(0, rows)))  # guilty
        return out * weight.unsqueeze(1)


data = torch.randn(4096, WIDTH, device=device)
model = Mixture().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(20000):
    x = data[torch.randint(0, len(data), (128,), device=device)]
    loss = nn.functional.mse_loss(model(x), x)  # also: launch-bound-step on cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
