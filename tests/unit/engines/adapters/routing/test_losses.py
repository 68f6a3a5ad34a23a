"""Each loss against the same thing written as plain loops over numbers."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.engines.adapters.routing.losses import (
    RouterLosses,
    confidence_margin,
    inconsistency,
    load_imbalance,
    lost_mass,
    mean_entropy,
    right_task,
)
from flatout.engines.adapters.routing.router import Router, Routing
from flatout.ground.errors import BadInput


class Batch:
    """A batch of random routings in double precision."""

    def __init__(self, rows: int, num_tasks: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(rows, num_tasks, generator=drawn, dtype=torch.float64)
        self.tasks = torch.randint(num_tasks, (rows,), generator=drawn)
        # Rows in twos, so that some are similar and most are not.
        centres = torch.randn(rows // 2 + 1, 6, generator=drawn, dtype=torch.float64)
        noise = 0.05 * torch.randn(rows, 6, generator=drawn, dtype=torch.float64)
        self.features = centres[torch.arange(rows) // 2] + noise
        self.routing = Routing(
            log_probabilities=logits.log_softmax(dim=-1),
            weights=logits.softmax(dim=-1),
            confidence=torch.rand(rows, generator=drawn, dtype=torch.float64),
            temperature=torch.tensor(1.3, dtype=torch.float64),
        )
        self.probabilities: list[list[float]] = self.routing.probabilities.tolist()


batches = st.builds(Batch, rows=st.integers(1, 12), num_tasks=st.integers(1, 6), seed=st.integers(0, 10**6))


def close(found: Tensor, expected: float) -> bool:
    return math.isclose(found.item(), expected, rel_tol=1e-6, abs_tol=1e-7)


@given(batches)
def test_right_task(batch: Batch) -> None:
    total = 0.0
    for row, task in zip(batch.probabilities, batch.tasks.tolist(), strict=True):
        total -= math.log(row[task])
    assert close(right_task(batch.routing.log_probabilities, batch.tasks), total / len(batch.probabilities))


@given(batches, st.floats(0, 0.5))
def test_confidence_margin(batch: Batch, margin: float) -> None:
    total = 0.0
    for row, task, sure in zip(
        batch.probabilities, batch.tasks.tolist(), batch.routing.confidence.tolist(), strict=True
    ):
        if row.index(max(row)) == task:
            total += max(0.0, 0.5 + margin - sure)
        else:
            total += max(0.0, sure - (0.5 - margin))
    assert close(confidence_margin(batch.routing, batch.tasks, margin=margin), total / len(batch.tasks))


@given(batches)
def test_load_imbalance(batch: Batch) -> None:
    num_rows, num_tasks = len(batch.probabilities), len(batch.probabilities[0])
    excess = []
    for task in range(num_tasks):
        used = sum(row[task] for row in batch.probabilities) / num_rows
        excess.append(used - batch.tasks.tolist().count(task) / num_rows)
    mean = sum(excess) / num_tasks
    expected = sum((each - mean) ** 2 for each in excess) / num_tasks
    assert close(load_imbalance(batch.routing.weights, batch.tasks), expected)


def test_with_equal_tasks_the_imbalance_is_the_variance_of_use() -> None:
    weights = torch.rand(12, 3, dtype=torch.float64).softmax(dim=-1)
    tasks = torch.arange(12) % 3
    assert torch.allclose(load_imbalance(weights, tasks), weights.mean(dim=0).var(unbiased=False))


@given(batches, st.floats(0, 1))
def test_lost_mass(batch: Batch, negligible: float) -> None:
    total = 0.0
    for row in batch.probabilities:
        for probability in row:
            if probability < negligible:
                total += probability
    found = lost_mass(batch.routing.probabilities, negligible=negligible)
    assert close(found, total / len(batch.probabilities))


@given(batches)
def test_inconsistency(batch: Batch) -> None:
    rows = batch.features.tolist()
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    around = [[value - mean for value, mean in zip(row, means, strict=True)] for row in rows]
    total, pairs = 0.0, 0
    for i, first in enumerate(around):
        for j, second in enumerate(around):
            sizes = math.hypot(*first) * math.hypot(*second)
            if i == j or sizes < 1e-12:
                continue
            if sum(a * b for a, b in zip(first, second, strict=True)) / sizes >= 0.9:
                pairs += 1
                for p, q in zip(batch.probabilities[i], batch.probabilities[j], strict=True):
                    total += p * math.log(p / q)
    found = inconsistency(batch.routing.log_probabilities, batch.features, similar=0.9)
    assert close(found, total / max(pairs, 1))


def test_the_planted_pairs_are_found() -> None:
    batch = Batch(12, 4, seed=0)
    assert inconsistency(batch.routing.log_probabilities, batch.features, similar=0.9) > 0.1


@given(batches)
def test_mean_entropy(batch: Batch) -> None:
    total = 0.0
    for row in batch.probabilities:
        for probability in row:
            total -= probability * math.log(probability)
    assert close(mean_entropy(batch.routing.log_probabilities), total / len(batch.probabilities))


def test_the_total_is_the_weighted_sum_and_entropy_a_bonus() -> None:
    batch = Batch(8, 3, seed=1)
    weights = RouterLosses()
    terms = weights.terms(batch.routing, tasks_B=batch.tasks, features_BH=batch.features)
    expected = (
        2.0 * terms["router"]
        + 0.5 * terms["confidence"]
        + 0.1 * terms["balance"]
        + 0.05 * terms["efficiency"]
        + 0.1 * terms["consistency"]
        - 0.01 * terms["entropy"]
        + 0.01 * (1.3 - 1) ** 2
        + 1.0 * 7.0
    )
    total = weights.total(terms, task_loss=torch.tensor(7.0, dtype=torch.float64))
    assert torch.allclose(total, expected)
    assert terms["entropy"] > 0
    assert len(terms) == 7


def test_a_loss_without_weight_is_not_computed() -> None:
    batch = Batch(8, 3, seed=1)
    weights = RouterLosses(consistency=0, balance=0)
    terms = weights.terms(batch.routing, tasks_B=batch.tasks, features_BH=batch.features)
    assert "consistency" not in terms and "balance" not in terms
    with pytest.raises(BadInput, match="weight 0"):
        weights.total({})


def test_sure_and_hard_routings_keep_finite_gradients() -> None:
    torch.manual_seed(0)
    router = Router(6, num_tasks=3, hidden=(8,))
    router.gumbel = True
    with torch.no_grad():
        router.tasks.weight.mul_(1e4)  # probabilities round to zero and one
    features = torch.randn(16, 6)
    weights = RouterLosses()
    terms = weights.terms(router(features), tasks_B=torch.arange(16) % 3, features_BH=features)
    weights.total(terms).backward()
    for name, parameter in router.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_training_on_the_losses_finds_the_tasks() -> None:
    torch.manual_seed(0)
    router = Router(6, num_tasks=3, hidden=(32,))
    weights = RouterLosses()
    search = torch.optim.AdamW(router.parameters(), lr=1e-2)
    centres = 2 * torch.randn(3, 6)
    for _ in range(80):
        tasks = torch.randint(3, (64,))
        features = centres[tasks] + 0.3 * torch.randn(64, 6)
        loss = weights.total(weights.terms(router(features), tasks_B=tasks, features_BH=features))
        search.zero_grad()
        loss.backward()
        search.step()
    tasks = torch.randint(3, (300,))
    found = router.route(centres[tasks] + 0.3 * torch.randn(300, 6))
    assert (found.chosen[:, 0] == tasks).float().mean() > 0.97


def test_bad_weights_are_named_all_at_once() -> None:
    with pytest.raises(BadInput, match=r"router=-1.*task=nan.*margin=0\.7 is above 0\.5"):
        RouterLosses(router=-1, task=math.nan, margin=0.7)
    assert {field.name for field in fields(RouterLosses)} >= {"router", "task", "entropy"}
