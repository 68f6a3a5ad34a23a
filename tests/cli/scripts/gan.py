"""Two optimizers: the critic steps twice, then the generator once."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=16)

for _epoch in range(10_000):
    for number, (real,) in enumerate(loader):
        fake = generator(torch.randn(len(real), 16))
        critic_optimizer.zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        critic_optimizer.step()
        if number % 2 == 1:
            generator_optimizer.zero_grad()
            (-critic(fake).mean()).backward()
            generator_optimizer.step()
