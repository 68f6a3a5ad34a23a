"""Train the Darkroom transformer on generated learning histories.

    python examples/darkroom/train.py --size small

Slow on purpose: README.md in this folder lists the faults it keeps and their lines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

import torch
from dataset import REGION, TRANSITION, Batch, RegionDataset, collate
from histories import GRID, learning_histories, split_goals
from model import DarkroomTransformer, imitation_loss
from torch import Tensor, nn
from torch.utils.data import DataLoader

SIZES = {
    "full": {"goals": 73, "histories": 100, "history_steps": 1000, "batch_size": 512, "steps": 100_000},
    "small": {"goals": 16, "histories": 8, "history_steps": 1000, "batch_size": 16, "steps": 200},
}


def main(argv: Sequence[str] | None = None) -> None:
    settings = read_settings(argv)
    torch.manual_seed(settings.seed)
    device = torch.device(settings.device)
    dataset = make_dataset(settings)
    print(f"{len(dataset.histories)} histories, {len(dataset)} samples, training on {device}", flush=True)
    loader = DataLoader(
        dataset,
        batch_size=settings.batch_size,
        shuffle=True,
        collate_fn=collate,
        num_workers=settings.workers,
        persistent_workers=settings.workers > 0,
    )
    train(DarkroomTransformer().to(device), endless(loader), settings)


def train(model: nn.Module, batches: Iterator[Batch], settings: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    loss_sum, accuracy_sum, num_logged = 0.0, 0.0, 0
    last_log_s = time.perf_counter()
    for step in range(1, settings.steps + 1):
        batch = to_device(next(batches), settings.device)
        action_logits, type_logits = model(batch)
        loss = imitation_loss(action_logits, type_logits, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        loss_sum += loss.item()
        accuracy_sum += action_accuracy(action_logits, batch).item()
        num_logged += 1
        if step % settings.log_every == 0 or step == settings.steps:
            now_s = time.perf_counter()
            print(
                f"step {step:6d}  loss {loss_sum / num_logged:.4f}"
                f"  action accuracy {accuracy_sum / num_logged:.3f}"
                f"  {num_logged / (now_s - last_log_s):.2f} it/s",
                flush=True,
            )
            loss_sum, accuracy_sum, num_logged = 0.0, 0.0, 0
            last_log_s = now_s


def make_dataset(settings: argparse.Namespace) -> RegionDataset:
    goals, _held_out = split_goals(settings.goals, seed=settings.seed)
    return RegionDataset(
        learning_histories(
            goals,
            histories_per_goal=settings.histories,
            num_steps=settings.history_steps,
            seed=settings.seed,
        )
    )


def endless(loader: DataLoader[Batch]) -> Iterator[Batch]:
    """Batches for ever, epoch after epoch."""
    while True:
        for batch in loader:  # noqa: UP028
            yield batch


def to_device(batch: Batch, device: str) -> Batch:
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}


def action_accuracy(action_logits: Tensor, batch: Batch) -> Tensor:
    """The share of samples with an action whose likeliest action is the learner's."""
    acts: Tensor = batch["target_type"] == TRANSITION
    hits: Tensor = (action_logits.argmax(-1) == batch["target_action"]) & acts
    return hits.sum() / acts.sum().clamp(min=1)


def read_settings(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags as given, the rest from the size."""
    parser = argparse.ArgumentParser(description="Train an in-context learner of the Darkroom.")
    parser.add_argument("--size", choices=sorted(SIZES), default="full", help="defaults of the next five")
    parser.add_argument("--goals", type=int, help=f"training goals, of {GRID * GRID} cells")
    parser.add_argument("--histories", type=int, help="learning histories per goal")
    parser.add_argument("--history-steps", type=int, help="steps of a history")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--workers", type=int, default=2, help="loader processes (default: 2)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 1e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10, help="steps per line of output (default: 10)")
    settings = parser.parse_args(argv)

    for name, value in SIZES[settings.size].items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    if settings.device == "auto":
        settings.device = "cuda" if torch.cuda.is_available() else "cpu"
    if not 1 <= settings.goals <= GRID * GRID:
        parser.error(f"--goals {settings.goals}: the grid has 1 to {GRID * GRID} goals")
    if settings.history_steps < REGION:
        parser.error(f"--history-steps {settings.history_steps}: a region needs {REGION} steps")
    for name in ("histories", "batch_size", "steps", "log_every"):
        if getattr(settings, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(settings, name)}: at least 1")
    return settings


if __name__ == "__main__":
    main()
