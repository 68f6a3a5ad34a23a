"""Train with DistributedDataParallel: torchrun --nproc-per-node 2 ddp.py"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--mended", choices=["preprocessing", "averaged-loss"])
args = parser.parse_args()


def preprocess(signal):
    """Normalise, and take the power of some frequencies."""
    signal = (signal - signal.mean()) / (signal.std() + 1e-6)
    features = []
    for k in range(1, 33):
        angle = 2 * torch.pi * k * torch.arange(len(signal)) / len(signal)
        features.append(((signal * angle.cos()).sum() ** 2 + (signal * angle.sin()).sum() ** 2) / len(signal))
    return torch.stack(features)


class Signals(Dataset):
    def __init__(self, num):
        generator = torch.Generator().manual_seed(0)
        self.signals = torch.randn(num, 256, generator=generator)
        self.labels = torch.randint(0, 4, (num,), generator=generator)
        if args.mended == "preprocessing":
            power = torch.fft.rfft(self.signals - self.signals.mean(1, keepdim=True)).abs() ** 2
            self.features = power[:, 1:33] / 256 / self.signals.var(1, keepdim=True)

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        if args.mended == "preprocessing":
            return self.features[index], self.labels[index]
        return preprocess(self.signals[index]), self.labels[index]


def main():
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(32, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, 4),
    )
    model = DistributedDataParallel(net.to(device), device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Signals(4096)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            inputs, targets = inputs.to(device), targets.to(device)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.mended != "averaged-loss" or step % 50 == 0:
                average = loss.detach().clone()
                dist.all_reduce(average)
                average = average.item() / dist.get_world_size()
            if rank == 0 and step % 50 == 0:
                print(f"epoch {epoch} step {step} loss {average:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
