"""A plain training loop with every kind of DataLoader and batch, chosen by its arguments."""

import argparse
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

WIDTH = 192


@dataclass
class Record:
    inputs: Tensor
    targets: Tensor


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


def sample(index: int) -> tuple[Tensor, Tensor]:
    inputs = torch.linspace(-1.0, 1.0, WIDTH).roll(index)
    return inputs, inputs[:1] * 0.5


class Samples(Dataset):
    def __len__(self) -> int:
        return 16 * 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return sample(index)


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(16 * 40):
            yield sample(index)


def collate_records(samples: list[tuple[Tensor, Tensor]]) -> Record:
    inputs, targets = zip(*samples, strict=True)
    return Record(torch.stack(inputs), torch.stack(targets))


def collate_pairs(samples: list[tuple[Tensor, Tensor]]) -> Pair:
    return Pair(*(torch.stack(values) for values in zip(*samples, strict=True)))


def build_loader(arguments: argparse.Namespace) -> DataLoader:
    options = {
        "num_workers": arguments.workers,
        "multiprocessing_context": arguments.context,
        "persistent_workers": arguments.persistent,
        "collate_fn": collate_records if arguments.batches == "dataclass" else collate_pairs,
    }
    if arguments.dataset == "iterable":
        return DataLoader(Stream(), batch_size=16, **options)
    if arguments.dataset == "batch_sampler":
        samples = Samples()
        sampler = BatchSampler(RandomSampler(samples), batch_size=16, drop_last=True)
        return DataLoader(samples, batch_sampler=sampler, **options)
    return DataLoader(Samples(), batch_size=16, shuffle=True, **options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context")
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--batches", default="namedtuple")
    parser.add_argument("--dataset", default="map")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--hook", action="store_true")
    parser.add_argument("--exit", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.ReLU(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if arguments.hook:
        register_optimizer_step_post_hook(lambda *_: None)
    loader = build_loader(arguments)
    step = 0
    while step < arguments.steps:
        for batch in loader:
            loss = nn.functional.mse_loss(model(batch.inputs), batch.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print("loss", step, loss.item())
            if step == arguments.steps:
                break
    print("trained", step, "steps")
    sys.exit(arguments.exit)


if __name__ == "__main__":
    main()
