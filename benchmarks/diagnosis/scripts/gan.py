"""Train a small convolutional GAN on made-up images."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--features", type=int, default=16)
parser.add_argument("--latent", type=int, default=64)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--mended", choices=["sync-in-step"])
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Generator(nn.Module):
    def __init__(self, latent, features):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(latent, features * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(features * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(features * 4, features * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(features * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(features * 2, features, 4, 2, 1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(True),
            nn.ConvTranspose2d(features, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, features, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(features, features * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(features * 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(features * 2, features * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(features * 4),
            nn.LeakyReLU(0.2),
            nn.Conv2d(features * 4, 1, 4, 1, 0, bias=False),
        )

    def forward(self, x):
        return self.main(x).view(-1)


def main():
    torch.manual_seed(0)
    images = torch.rand(2048, 3, 32, 32) * 2 - 1
    loader = DataLoader(TensorDataset(images), batch_size=args.batch_size, shuffle=True, drop_last=True)
    netG = Generator(args.latent, args.features).to(device)
    netD = Discriminator(args.features).to(device)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()

    G_losses, D_losses = [], []
    iters = 0
    for epoch in range(args.epochs):
        for i, (real,) in enumerate(loader):
            real = real.to(device)
            b_size = real.size(0)

            # discriminator: real, then fake
            netD.zero_grad()
            label = torch.full((b_size,), 1.0, device=device)
            output = netD(real)
            errD_real = criterion(output, label)
            errD_real.backward()
            D_x = output.sigmoid().mean()

            noise = torch.randn(b_size, args.latent, 1, 1, device=device)
            fake = netG(noise)
            label.fill_(0.0)
            output = netD(fake.detach())
            errD_fake = criterion(output, label)
            errD_fake.backward()
            D_G_z1 = output.sigmoid().mean()
            errD = errD_real + errD_fake
            optimizerD.step()

            # generator
            netG.zero_grad()
            label.fill_(1.0)
            output = netD(fake)
            errG = criterion(output, label)
            errG.backward()
            D_G_z2 = output.sigmoid().mean()
            optimizerG.step()

            if args.mended != "sync-in-step" or iters % 50 == 0:
                print(
                    f"[{epoch}][{i}/{len(loader)}] D {errD.item():.3f} G {errG.item():.3f} "
                    f"D(x) {D_x.item():.3f} D(G(z)) {D_G_z1.item():.3f} / {D_G_z2.item():.3f}"
                )
                G_losses.append(errG.item())
                D_losses.append(errD.item())
            iters += 1


if __name__ == "__main__":
    main()
