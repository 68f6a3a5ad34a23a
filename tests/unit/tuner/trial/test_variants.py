from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flatout.measure.patches import Patches
from flatout.tuner.trial import variants


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    yield made
    made.undo()


def test_dropout_is_off_where_gradients_are_compared(patches: Patches) -> None:
    variants.switch_dropout_off(torch, patches)
    x = torch.ones(64)
    assert torch.equal(nn.Dropout(0.5)(x), x)
    q = torch.randn(1, 1, 4, 8)
    plain = nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch.equal(nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.9), plain)


def test_a_sample_draws_the_same_in_any_process(patches: Patches) -> None:
    class Drawn(Dataset[float]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return index + float(torch.rand(1)) + np.random.rand() + random.random()

    def batches() -> list[float]:
        return [float(each) for batch in DataLoader(Drawn(), batch_size=2) for each in batch]

    assert batches() != batches()
    variants.fix_samples(torch, patches)
    found = batches()
    np.random.seed(1), random.seed(1)
    expected = np.random.rand(), random.random()
    np.random.seed(1), random.seed(1)
    assert batches() == found and len(set(found)) == 4
    assert (np.random.rand(), random.random()) == expected  # the job's own numbers stay


def test_seeds_are_shifted_by_as_much_as_is_asked_for(patches: Patches) -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(1), np.random.rand(), random.random()
    variants.seed_all(torch, patches, 2)
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_a_script_that_sets_no_seed_begins_alike_all_the_same(patches: Patches) -> None:
    drawn = set()
    for by in (0, 0, 1):
        variants.seed_all(torch, patches, by)
        generators = {np.random.default_rng().random() for _ in range(3)}
        assert len(generators) == 3
        drawn.add((float(torch.rand(1)), np.random.rand(), random.random(), min(generators)))
        patches.undo()
    assert len(drawn) == 2


def test_a_nudge_under_autocast_is_as_large_as_its_rounding() -> None:
    weights = torch.randn(4096)
    moved = weights.clone()
    with torch.autocast("cpu", torch.bfloat16):
        variants.nudge(torch, moved)
    share = (moved.bfloat16() != weights.bfloat16()).float().mean()
    assert 0.2 < share < 0.6 and ((moved - weights).abs() <= 2**-8 * weights.abs()).all()


def test_a_nudge_is_the_last_bit() -> None:
    weights = nn.Parameter(torch.tensor([[1.0, 1.0], [-2.0, 0.5]]))
    before = weights.detach().clone()
    with torch.no_grad():
        variants.nudge(torch, weights)
    moved = (weights - before).detach().abs()
    assert (moved > 0).tolist() == [[True, False], [True, False]] and moved.max() < 1e-6


def test_inputs_are_widened_and_whole_numbers_are_not() -> None:
    args, kwargs = variants.widen(((torch.ones(1), torch.ones(1, dtype=torch.int64)), {"x": [torch.ones(1)]}))
    assert [each.dtype for each in args] == [torch.float64, torch.int64]
    assert kwargs["x"][0].dtype == torch.float64


@pytest.mark.parametrize("loss", ["mse_loss", "huber_loss", "binary_cross_entropy_with_logits"])
def test_what_meets_64_bits_is_computed_in_them(patches: Patches, loss: str) -> None:
    variants.compute_in_64_bits(torch, patches)
    model, x, target = nn.Linear(3, 2).double(), torch.randn(4, 3), torch.rand(4, 2)
    found = getattr(nn.functional, loss)(model(x.float()), target)
    found.backward()
    expected = getattr(nn.functional, loss)(model(x.double()), target.double())
    assert torch.equal(found, expected) and found.dtype == torch.float64
    basis = torch.randn(2, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad((model(x) @ basis).sum(), [basis])
    assert gradient.dtype == torch.float32  # that of the script's own tensor
    average = torch.zeros(4, 2)
    average.add_(model(x).detach())
    assert average.dtype == torch.float32 and torch.stack([average, model(x)]).dtype == torch.float64
    patches.undo()
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
