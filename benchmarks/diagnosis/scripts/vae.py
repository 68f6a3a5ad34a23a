"""Train a variational autoencoder on made-up digits."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--hidden", type=int, default=400)
parser.add_argument("--digits", type=int, default=2560)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--mended", choices=["respawned-workers", "in-memory", "sync-in-step"])
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

torch.manual_seed(1)
digits = (torch.rand(args.digits, 1, 28, 28) > 0.7).float()
loader = DataLoader(
    TensorDataset(digits, torch.zeros(args.digits)),
    batch_size=args.batch_size,
    shuffle=True,
    num_workers=0 if args.mended == "in-memory" else 1,
    persistent_workers=args.mended == "respawned-workers",
)


class VAE(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.fc1 = nn.Linear(784, hidden)
        self.fc21 = nn.Linear(hidden, 20)
        self.fc22 = nn.Linear(hidden, 20)
        self.fc3 = nn.Linear(20, hidden)
        self.fc4 = nn.Linear(hidden, 784)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 784))
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x.view(-1, 784), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


model = VAE(args.hidden).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def train(epoch):
    model.train()
    train_loss = torch.zeros((), device=device) if args.mended == "sync-in-step" else 0
    for batch_idx, (data, _) in enumerate(loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        train_loss += loss.detach() if args.mended == "sync-in-step" else loss.item()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"epoch {epoch} [{batch_idx * len(data)}/{args.digits}] loss {loss.item() / len(data):.4f}")
    print(f"====> epoch {epoch} average loss {float(train_loss) / args.digits:.4f}")


if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        train(epoch)
