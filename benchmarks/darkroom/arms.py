"""The arms: one training job, written as it was, as its author mended it, and in Flatout's forms.

An arm makes whole steps, from data to optimizer.  All start from the same weights.  The two slow ones keep
the batches they used and the losses they got, so that the fast ones can be put on the same batches.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "darkroom"))
from dataset import Batch, RegionDataset, Sample, collate
from fast_data import MOST_ROWS, batches_on, endless
from fast_model import FastDarkroom, imitation_loss_without_waiting, transition_rows
from fast_step import FastStep, Levers
from histories import GRID, NUM_ACTIONS, Histories
from model import DarkroomTransformer, imitation_loss
from train import action_accuracy, to_device
from train import endless as endless_slow

from flatout.data import RaggedArrays

LEARNING_RATE = 1e-3
MOST_KEPT = 400  # batches for the loss curves
CACHED = 16  # batches that a cached step goes round


@dataclass(kw_only=True, slots=True)
class Job:
    """What all arms share."""

    histories: Histories
    samples: RaggedArrays  # of the histories, for the arms that gather
    weights: dict[str, Tensor]
    batch_size: int
    device: str
    seed: int
    workers: int  # of the loader as written
    fixed_workers: int  # of the author's fix


@dataclass(kw_only=True, slots=True)
class Arm:
    """`step` makes one step; `cached_step` the same on batches that lie on the device."""

    name: str
    step: Callable[[], None]
    cached_step: Callable[[], None]
    batches: list[Batch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_gradient: Tensor | None = None


def as_written(job: Job) -> Arm:
    """`train.py`, its loader and its loop."""
    loader = DataLoader(
        RegionDataset(job.histories),
        batch_size=job.batch_size,
        shuffle=True,
        collate_fn=collate,
        num_workers=job.workers,
        persistent_workers=job.workers > 0,
        generator=torch.Generator().manual_seed(job.seed),
    )
    send: Callable[[Batch], Batch] = lambda batch: to_device(batch, job.device)  # noqa: E731
    return _slow_arm("as_written", DarkroomTransformer(), endless_slow(loader), send, job)


def seeds_fix(job: Job) -> Arm:
    """The author's own fix: three token types made once, slices per sample, a preallocated collate, pinned
    memory, more workers that fetch two batches ahead.
    """
    pinned = job.device.startswith("cuda")
    loader = DataLoader(
        RegionDataset(job.histories),
        batch_size=job.batch_size,
        shuffle=True,
        collate_fn=preallocated_collate,
        num_workers=job.fixed_workers,
        persistent_workers=job.fixed_workers > 0,
        pin_memory=pinned,
        prefetch_factor=2 if job.fixed_workers else None,
        generator=torch.Generator().manual_seed(job.seed),
    )

    def send(batch: Batch) -> Batch:
        return {
            name: value.to(job.device, non_blocking=pinned) if torch.is_tensor(value) else value
            for name, value in batch.items()
        }

    return _slow_arm("seeds_fix", SlicedDarkroom(), endless_slow(loader), send, job)


class SlicedDarkroom(DarkroomTransformer):
    """The author's forward: the loop over steps is gone, the one over samples stays."""

    def build_sequence(
        self, context: Tensor, query: Tensor, previous_length: list[int], current_length: list[int]
    ) -> Tensor:
        device = context.device
        kinds = [self.token_type(torch.tensor([kind], device=device)) for kind in range(3)]
        sequences = []
        for b in range(context.size(0)):
            previous, current = previous_length[b], current_length[b]
            parts = []
            if previous > 0:
                parts += [self.region_start + kinds[1], context[b, :previous] + kinds[0]]
                parts.append(self.region_end + kinds[2])
            parts.append(self.region_start + kinds[1])
            if current > 0:
                parts.append(context[b, previous : previous + current] + kinds[0])
            parts.append(query[b] + kinds[0])
            sequences.append(torch.cat(parts, dim=0))
        longest = max(sequence.size(0) for sequence in sequences)
        padded = []
        for sequence in sequences:
            if sequence.size(0) < longest:
                padding = torch.zeros(longest - sequence.size(0), sequence.size(1), device=device)
                sequence = torch.cat([sequence, padding], dim=0)
            padded.append(sequence)
        return torch.stack(padded)


def preallocated_collate(samples: list[Sample]) -> Batch:
    """One array per field, filled sample by sample."""
    num_samples, longest = len(samples), max(len(sample["states"]) for sample in samples)
    states, next_states = (np.zeros((num_samples, longest, 2), dtype=np.float32) for _ in range(2))
    actions = np.zeros((num_samples, longest), dtype=np.int64)
    rewards = np.zeros((num_samples, longest), dtype=np.float32)
    for i, sample in enumerate(samples):
        length = len(sample["states"])
        states[i, :length], next_states[i, :length] = sample["states"], sample["next_states"]
        actions[i, :length], rewards[i, :length] = sample["actions"], sample["rewards"]
    return {
        "states": torch.from_numpy(states),
        "actions": F.one_hot(torch.from_numpy(actions), NUM_ACTIONS).float(),
        "rewards": torch.from_numpy(rewards),
        "next_states": torch.from_numpy(next_states),
        "query": torch.from_numpy(np.stack([sample["query"] for sample in samples])),
        "previous_length": [sample["previous_length"] for sample in samples],
        "current_length": [sample["current_length"] for sample in samples],
        "target_type": torch.tensor([sample["target_type"] for sample in samples]),
        "target_action": torch.tensor([sample["target_action"] for sample in samples]),
    }


def _slow_arm(
    name: str,
    model: DarkroomTransformer,
    batches: Iterator[Batch],
    send: Callable[[Batch], Batch],
    job: Job,
) -> Arm:
    """The loop of `train.py`: a device copy, a step, and two waits for figures to print."""
    model.load_state_dict(job.weights)
    model.to(job.device)
    step_on = _slow_step(model)
    cached: list[Callable[[], object]] = []

    def step() -> None:
        batch = next(batches)
        loss, gradient = step_on(send(batch), keep_gradient=arm.first_gradient is None)
        if gradient is not None:
            arm.first_gradient = gradient
        if len(arm.batches) < MOST_KEPT:
            arm.batches.append(batch)
            arm.losses.append(loss)

    def cached_step() -> None:
        if not cached:  # with weights of its own: those of the loss curve see each batch once
            resident = send(arm.batches[0])
            twin = _slow_step(copy.deepcopy(model))
            cached.append(lambda: twin(resident, keep_gradient=False))
        cached[0]()

    arm = Arm(name=name, step=step, cached_step=cached_step)
    return arm


def _slow_step(model: DarkroomTransformer) -> Callable[..., tuple[float, Tensor | None]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step_on(batch: Batch, *, keep_gradient: bool) -> tuple[float, Tensor | None]:
        action_logits, type_logits = model(batch)
        loss = imitation_loss(action_logits, type_logits, batch)
        optimizer.zero_grad()
        loss.backward()
        gradient = flat_gradient(model) if keep_gradient else None
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        action_accuracy(action_logits, batch).item()
        return loss.item(), gradient

    return step_on


def levers_of(name: str) -> Levers:
    """The levers of an arm by its name: gather+causal+fused."""
    return Levers(**dict.fromkeys(name.split("+")[1:], True))


def ours(job: Job, *, name: str) -> Arm:
    """`train_fast.py` with the levers of the name."""
    levers = levers_of(name)
    batches = endless(
        batches_on(
            job.samples,
            device=job.device,
            batch_size=job.batch_size,
            seed=job.seed,
            one_shape=levers.one_shape,
        )
    )
    step_on = _fast_step(job, levers)
    # Several, because lengths differ from batch to batch and one could be a short one.
    cached = itertools.cycle([next(batches) for _ in range(CACHED)])

    def step() -> None:
        step_on(next(batches))

    def cached_step() -> None:
        step_on(next(cached))

    return Arm(name=name, step=step, cached_step=cached_step)


def _fast_step(job: Job, levers: Levers) -> FastStep:
    model = FastDarkroom(causal=levers.causal, answer_row=levers.answer_row)
    model.load_state_dict(job.weights)
    return FastStep(model.to(job.device), levers=levers, lr=LEARNING_RATE)


def fast_batch(batch: Batch, *, device: str) -> Batch:
    """A batch of `collate` with the fields, and the fixed shape, of `fast_data`."""
    rows = transition_rows(batch)
    fields = {
        "transitions": F.pad(rows, (0, 0, 0, MOST_ROWS - rows.size(1))),
        "cell": (batch["query"] * torch.tensor([GRID, 1])).sum(-1),
        "previous_length": torch.tensor(batch["previous_length"]),
        "current_length": torch.tensor(batch["current_length"]),
        "target_type": batch["target_type"],
        "target_action": batch["target_action"],
    }
    return {name: value.to(device) for name, value in fields.items()}


def replayed_losses(job: Job, name: str, batches: list[Batch]) -> list[float]:
    """The losses of `train_fast.py` from the same weights on the same batches."""
    step_on = _fast_step(job, levers_of(name))
    losses = []
    for batch in batches:
        step_on(fast_batch(batch, device=job.device))
        losses.append(step_on.metrics()[0])
    return losses


def gradient_of_ours(job: Job, name: str, batch: Batch) -> Tensor:
    """The gradient at the common weights, before clipping."""
    levers = levers_of(name)
    model = FastDarkroom(causal=levers.causal, answer_row=levers.answer_row)
    model.load_state_dict(job.weights)
    model.to(job.device)
    sent = fast_batch(batch, device=job.device)
    action_logits, type_logits = model(sent)
    imitation_loss_without_waiting(action_logits, type_logits, sent).backward()
    return flat_gradient(model)


def flat_gradient(model: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in model.parameters()]
    return torch.cat([gradient.detach().flatten() for gradient in gradients if gradient is not None]).cpu()
