"""An optimizer that loops over three parameters, beside products that take all of the time."""

import torch

torch.manual_seed(31)
inputs = torch.randn(2048, 384)
weights = [torch.nn.Parameter(torch.randn(384, 384) / 384**0.5) for _ in range(3)]
optimizer = torch.optim.Adam(weights, lr=1e-4, foreach=False)  # decoy: looped-optimizer

for step in range(50_000):
    hidden = inputs
    for weight in weights:
        hidden = torch.tanh(hidden @ weight)
    loss = (hidden - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
