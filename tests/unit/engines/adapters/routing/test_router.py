"""The router: weights that sum to one, thresholds that mean something, gradients where they belong."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from flatout.engines.adapters.routing.router import COLDEST, Fallback, Router
from flatout.ground.errors import BadInput


def clouds(number: int, *, num_tasks: int = 3, width: int = 8, seed: int) -> tuple[Tensor, Tensor]:
    """Features around one centre per task, near enough to each other that some rows cannot be told apart."""
    centres = torch.randn(num_tasks, width, generator=torch.Generator().manual_seed(99))
    drawn = torch.Generator().manual_seed(seed)
    tasks = torch.randint(num_tasks, (number,), generator=drawn)
    return centres[tasks] + 1.6 * torch.randn(number, width, generator=drawn), tasks


def trained(*, steps: int = 150, num_tasks: int = 3) -> Router:
    """A router that has learned its few rows by heart, and is therefore too sure."""
    torch.manual_seed(0)
    router = Router(8, num_tasks=num_tasks, hidden=(32, 16), dropout=0.0)
    fit_to(router, clouds(120, num_tasks=num_tasks, seed=1), steps=steps)
    return router


def fit_to(router: Router, rows: tuple[Tensor, Tensor], *, steps: int) -> None:
    features, tasks = rows
    search = torch.optim.AdamW(router.parameters(), lr=1e-2)
    for _ in range(steps):
        routing = router(features)
        right = (routing.log_probabilities.argmax(-1) == tasks).float()
        loss = F.nll_loss(routing.log_probabilities, tasks) + F.binary_cross_entropy(
            routing.confidence, right
        )
        search.zero_grad()
        loss.backward()
        search.step()


def calibration_error(confidence: Tensor, is_right: Tensor, *, bins: int = 10) -> float:
    """Mean distance of confidence from the share that is right, over equally wide bins."""
    which = (confidence * bins).long().clamp(max=bins - 1)
    error = 0.0
    for bin_number in range(bins):
        inside = which == bin_number
        if inside.any():
            gap = confidence[inside].mean() - is_right[inside].float().mean()
            error += float(gap.abs() * inside.float().mean())
    return error


@given(
    num_tasks=st.integers(1, 6),
    rows=st.integers(0, 9),
    threshold=st.floats(0, 1),
    fallback=st.sampled_from(get_args(Fallback)),
    data=st.data(),
)
def test_weights_of_every_row_sum_to_one(
    num_tasks: int, rows: int, threshold: float, fallback: Fallback, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, num_tasks))
    torch.manual_seed(rows)
    router = Router(5, num_tasks=num_tasks, hidden=(7,))
    found = router.route(torch.randn(rows, 5) * 9, threshold=threshold, top_k=top_k, fallback=fallback)
    assert found.weights.shape == (rows, num_tasks)
    assert torch.allclose(found.weights.sum(dim=-1), torch.ones(rows))
    used = (found.weights > 0).sum(dim=-1)
    assert (used[found.is_sure] <= top_k).all()
    unsure = 1 if fallback == "best" else num_tasks
    assert (used[~found.is_sure] == unsure).all()
    assert (found.confidence[found.is_sure] >= threshold).all()
    assert (found.confidence[~found.is_sure] < threshold).all()


def test_top_k_weights_are_the_probabilities_brought_back_to_one() -> None:
    router = Router(8, num_tasks=4, hidden=(16,))
    found = router.route(torch.randn(6, 8), top_k=2)
    for row in range(6):
        first, second = found.chosen[row].tolist()
        ranked = found.probabilities[row].argsort(descending=True).tolist()
        assert [first, second] == ranked[:2]
        both = found.probabilities[row, [first, second]]
        assert torch.allclose(found.weights[row, [first, second]], both / both.sum())
        assert found.weights[row].count_nonzero() == 2


def test_calibrated_confidence_is_the_share_that_is_right_on_fresh_rows() -> None:
    router = trained()
    fresh, tasks = clouds(4000, seed=3)
    before = router.route(fresh)
    router.calibrate(*clouds(1500, seed=2))
    after = router.route(fresh)
    is_right = before.chosen[:, 0] == tasks
    assert 0.5 < is_right.float().mean() < 0.95  # a hard problem, or the test says nothing
    assert torch.equal(before.chosen, after.chosen)  # calibration moves certainty, never the choice
    assert calibration_error(before.confidence, is_right) > 0.1
    assert calibration_error(after.confidence, is_right) < 0.04
    too_sure = calibration_error(before.probabilities.amax(dim=-1), is_right)
    assert calibration_error(after.probabilities.amax(dim=-1), is_right) < too_sure / 3


def unequal_clouds(counts: tuple[int, ...], *, seed: int) -> tuple[Tensor, Tensor]:
    """As many rows of each task as `counts` says."""
    features, tasks = clouds(20 * max(counts), num_tasks=len(counts), seed=seed)
    chosen = [(tasks == task).nonzero()[:count, 0] for task, count in enumerate(counts)]
    return features[torch.cat(chosen)], tasks[torch.cat(chosen)]


def right_by_task(router: Router, rows: tuple[Tensor, Tensor]) -> list[float]:
    is_right = router.route(rows[0]).chosen[:, 0] == rows[1]
    return [float(is_right[rows[1] == task].float().mean()) for task in rows[1].unique()]


@pytest.mark.parametrize("seed", range(3))
def test_the_rarest_task_no_longer_pays_where_every_task_counts_alike(seed: int) -> None:
    """What is taken from tasks with many rows is less than what the smallest gets."""
    counts = (600, 300, 30)
    torch.manual_seed(seed)
    router = Router(8, num_tasks=3, hidden=(16,), dropout=0.0)
    fit_to(router, unequal_clouds(counts, seed=10 + seed), steps=60)
    fresh = unequal_clouds((2000, 2000, 2000), seed=20 + seed)
    before = right_by_task(router, fresh)
    shares = torch.tensor(counts) / sum(counts)
    router.calibrate(*unequal_clouds((300, 150, 15), seed=30 + seed), log_shares_T=shares.log())
    after = right_by_task(router, fresh)
    assert before[2] == min(before)
    assert after[2] > before[2] + 0.1 and min(after) > min(before) + 0.05
    assert sum(after) > sum(before)


def test_the_shares_leave_the_logits_for_good() -> None:
    """Route and forward both choose as tasks of equal weight would have it, whatever the temperature."""
    router = trained()
    router.temperature.data.fill_(0.5)
    features, tasks = unequal_clouds((80, 40, 10), seed=2)
    log_shares = torch.tensor([0.7, 0.2, 0.1]).log()
    with torch.no_grad():
        logits = router(features).log_probabilities
        fit = router.judge(features, tasks, log_shares_T=log_shares)
        router.calibrate(features, tasks, log_shares_T=log_shares)
        wanted = F.softmax(logits * float(fit.factor) - log_shares, dim=-1)
        assert torch.allclose(router.route(features).probabilities, wanted, atol=1e-5)
        assert torch.allclose(fit.log_probabilities.exp().float(), wanted, atol=1e-5)
        assert torch.equal(router(features).log_probabilities.argmax(-1), wanted.argmax(-1))


def test_held_out_rows_of_a_large_task_do_not_outvote_the_others() -> None:
    """With every row of one task twice, tasks of equal weight find the same; rows of equal weight do not."""
    router = trained()
    features, tasks = unequal_clouds((400, 400, 400), seed=2)
    twice = torch.cat((torch.arange(1200), (tasks == 0).nonzero()[:, 0]))
    alike = torch.full((3,), 1 / 3).log()

    def difference(log_shares: Tensor | None) -> float:
        once = router.judge(features, tasks, log_shares_T=log_shares).loss
        return abs(router.judge(features[twice], tasks[twice], log_shares_T=log_shares).loss - once)

    assert difference(alike) < 1e-3 < difference(None)


def test_a_higher_threshold_keeps_rows_that_are_right_more_often() -> None:
    router = trained()
    router.calibrate(*clouds(1500, seed=2))
    fresh, tasks = clouds(4000, seed=3)
    found = router.route(fresh, threshold=0.8)
    is_right = found.chosen[:, 0] == tasks
    assert found.is_sure.any() and not found.is_sure.all()
    assert is_right[found.is_sure].float().mean() > 0.85
    assert is_right[~found.is_sure].float().mean() < 0.8


def test_calibration_stays_finite_and_modest_where_every_row_is_right() -> None:
    router = trained()
    features, _ = clouds(50, seed=4)
    router.calibrate(features, router.route(features).chosen[:, 0])
    assert router.calibration.isfinite().all()
    assert router.route(features).confidence.max() < 1.0


def test_calibration_travels_with_the_weights() -> None:
    router = trained(steps=20)
    router.calibrate(*clouds(100, seed=2))
    again = Router(8, num_tasks=3, hidden=(32, 16))
    again.load_state_dict(router.state_dict())
    features, _ = clouds(10, seed=5)
    assert torch.equal(again.route(features).confidence, router.route(features).confidence)


def test_one_task_needs_no_choice() -> None:
    router = Router(8, num_tasks=1, hidden=(4,))
    features = torch.randn(5, 8)
    router.calibrate(features, torch.zeros(5, dtype=torch.long))
    assert torch.equal(router.route(features).weights, torch.ones(5, 1))


def test_a_hard_draw_is_one_adapter_with_the_gradient_of_all() -> None:
    torch.manual_seed(0)
    router = Router(8, num_tasks=4, hidden=(16,))
    router.gumbel = True
    routing = router(torch.randn(20, 8))
    weights = routing.weights.detach()
    assert torch.equal(weights.amax(dim=-1), torch.ones(20)) and (weights.count_nonzero(dim=-1) == 1).all()
    (routing.weights * torch.randn(20, 4)).sum().backward()
    assert router.tasks.weight.grad is not None and (router.tasks.weight.grad != 0).any(dim=1).all()
    router.eval()
    soft = router(torch.randn(20, 8)).weights
    assert (soft.count_nonzero(dim=-1) == 4).all()


def test_every_parameter_learns() -> None:
    router = Router(8, num_tasks=3, hidden=(16, 8))
    routing = router(torch.randn(12, 8))
    (routing.log_probabilities[:, 0].sum() + routing.confidence.sum()).backward()
    for name, parameter in router.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_the_temperature_is_clamped_where_it_acts_and_not_where_it_is_read() -> None:
    router = Router(8, num_tasks=3, hidden=(16,), dropout=0.0)
    features = torch.randn(4, 8)
    with torch.no_grad():
        router.temperature.fill_(COLDEST)
    coldest = router(features)
    with torch.no_grad():
        router.temperature.fill_(-3.0)
    below = router(features)
    assert torch.equal(below.log_probabilities, coldest.log_probabilities)
    assert below.temperature.item() == -3.0


def test_a_router_can_begin_hot() -> None:
    torch.manual_seed(0)
    cold = Router(8, num_tasks=3, hidden=(16,), dropout=0.0)
    torch.manual_seed(0)
    hot = Router(8, num_tasks=3, hidden=(16,), dropout=0.0, temperature=5)
    features = torch.randn(4, 8)
    assert (hot.route(features).probabilities.amax(-1) < cold.route(features).probabilities.amax(-1)).all()


def test_routing_leaves_the_mode_alone_and_draws_nothing() -> None:
    router = Router(8, num_tasks=3, dropout=0.5)
    features = torch.randn(4, 8)
    state = torch.get_rng_state()
    first, second = router.route(features), router.route(features)
    assert torch.equal(first.weights, second.weights)
    assert torch.equal(torch.get_rng_state(), state)
    assert router.training


def test_bad_values_are_named_all_at_once() -> None:
    router = Router(8, num_tasks=3)
    with pytest.raises(BadInput, match=r"hidden=\(0,\).*num_tasks=0.*dropout=1.*temperature=20 is not"):
        Router(8, num_tasks=0, hidden=(0,), dropout=1, temperature=20)
    with pytest.raises(BadInput, match="at least one row"):
        router.calibrate(torch.randn(0, 8), torch.zeros(0, dtype=torch.long))
