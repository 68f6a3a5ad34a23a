"""Train a deep, narrow network and note the spread of every parameter, all of one kind at once."""

import torch
from torch import nn


def note_spreads(spreads, model):
    weights = torch.stack([layer.weight.detach().view(-1) for layer in model])
    biases = torch.stack([layer.bias.detach() for layer in model])
    for name, parameters in (("weight", weights), ("bias", biases)):
        spreads[name] = (
            parameters.norm(dim=1),
            parameters.std(dim=1),
            parameters.abs().amax(dim=1),
            parameters.mean(dim=1),
        )


def main():
    torch.manual_seed(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(50)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(16, 8, device=device)
    spreads = {}
    for step in range(20_000):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note_spreads(spreads, model)
        if step % 500 == 0:
            print(step, loss.item(), spreads["weight"][1][0].item())


if __name__ == "__main__":
    main()
