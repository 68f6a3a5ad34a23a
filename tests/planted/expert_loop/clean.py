"""Train a mixture of experts whose rows each go through one batched product."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(9)
WIDTH, EXPERTS, CAPACITY = 16, 16, 24


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        places = (
            nn.functional.one_hot(chosen, EXPERTS).cumsum(0).gather(1, chosen.unsqueeze(1)).squeeze(1) - 1
        )
        slots = chosen * CAPACITY + places.clamp(max=CAPACITY - 1)
        table = torch.zeros(EXPERTS * CAPACITY, WIDTH, device=x.device).index_copy(0, slots, x)
        hidden = torch.relu(torch.bmm(table.view(EXPERTS, CAPACITY, WIDTH), self.up))
        out = torch.bmm(hidden, self.down).view(-1, WIDTH)
        return out[slots] * weight.unsqueeze(1)


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
