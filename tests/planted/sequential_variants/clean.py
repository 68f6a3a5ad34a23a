"""Train an ensemble, all members in one product."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(2)


class Members(nn.Module):
    def __init__(self, number, *widths):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(number, wide, narrow) / wide**0.5
            for wide, narrow in zip(widths, widths[1:], strict=False)
        )

    def forward(self, x):
        hidden = x.expand(len(self.weights[0]), *x.shape)
        for weight in self.weights[:-1]:
            hidden = torch.bmm(hidden, weight).tanh()
        return torch.bmm(hidden, self.weights[-1])


data = torch.randn(4096, 16, device=device)
targets = data.square().mean(1, keepdim=True)
members = Members(16, 16, 32, 32, 1).to(device)
optimizer = torch.optim.SGD(members.parameters(), lr=1e-3)

for step in range(20000):
    chosen = torch.randint(0, len(data), (64,), device=device)
    x, y = data[chosen], targets[chosen]
    loss = (members(x) - y).square().mean((1, 2)).sum()  # also: launch-bound-step on cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
