"""A fused step against each adapter trained alone with plain code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.engines.adapters.lora import shape_plan
from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.fused_step import AdapterOptimizer, FusedStep, StepSettings
from flatout.engines.adapters.lora.token_blocks import shapes_of
from flatout.engines.run.ranks import fold
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.multiplex.products.ranges import Path
from tests.support.adapters_packed import (
    Batch,
    alone,
    batches,
    bert,
    blocks,
    class_loss,
    filled,
    heads,
    plain_states,
    roberta,
    specs,
)

SETTINGS = {
    "a": StepSettings(lr=1e-3, num_steps=4, warmup_share=0.25),
    "b": StepSettings(lr=2e-3, num_steps=8, warmup_share=0.0, clip=0.1),
    "c": StepSettings(lr=3e-3, num_steps=6, clip=math.inf, weight_decay=0.0),
}


class Setup:
    """An encoder, its bank, heads and a step."""

    def __init__(
        self, *, make: Any = bert, accumulation: int = 1, ranks: tuple[int, ...] = (4, 8, 16)
    ) -> None:
        self.model = make(num_layers=1)
        self.bank = filled(AdapterBank(self.model, specs(ranks)))
        self.heads = heads(self.bank.names)
        self.encoder = PackedEncoder(self.model, self.bank)
        self.optimizer = AdapterOptimizer(self.bank, settings=SETTINGS, heads=self.heads)
        self.step = FusedStep(
            self.encoder, optimizer=self.optimizer, loss=self.loss, accumulation=accumulation
        )

    def loss(self, adapter: int, states: Tensor, batch: Any) -> Tensor:
        return class_loss(self.heads[self.bank.names[adapter]], states, batch)


def trained_alone(setup: Setup, number: int, given: list[Batch], *, accumulation: int) -> tuple[Any, Any]:
    """One adapter with its head by a plain loop; the names and rates of the bank."""
    name = setup.bank.names[number]
    settings = SETTINGS[name]
    own, (head,) = alone(setup.model, setup.bank, name), (heads(setup.bank.names)[name],)
    parameters = [*(p for p in own.parameters() if p.requires_grad), *head.parameters()]
    adamw = torch.optim.AdamW(parameters, lr=1.0, weight_decay=settings.weight_decay)
    for place, batch in enumerate(given):
        loss = class_loss(head, plain_states(own, batch.block), batch)
        (loss / accumulation).backward()
        if (place + 1) % accumulation == 0:
            nn.utils.clip_grad_norm_(parameters, settings.clip)
            adamw.param_groups[0]["lr"] = settings.rate_at(place // accumulation)
            adamw.step()
            adamw.zero_grad()
    return own, head


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("make", [bert, roberta])
def test_together_is_alone(make: Any, accumulation: int) -> None:
    """Rates, schedules, clipping and decay of each; four batches of other shapes."""
    setup = Setup(make=make, accumulation=accumulation)
    given = [batches(blocks(seed=seed), seed=seed) for seed in range(4)]
    expected = [
        trained_alone(setup, number, [step[number] for step in given], accumulation=accumulation)
        for number in range(3)
    ]
    for step in given:
        losses = setup.step(step)
        assert losses.shape == (3,) and losses.isfinite().all()
    for (own, head), name in zip(expected, setup.bank.names, strict=True):
        state = setup.bank.state_dict(name)
        for key, module in own.named_modules():
            if f"{key}.lora_A.weight" in state:
                torch.testing.assert_close(state[f"{key}.lora_A.weight"], module.a.data, rtol=1e-3, atol=1e-5)
                torch.testing.assert_close(state[f"{key}.lora_B.weight"], module.b.data, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(setup.heads[name].weight, head.weight, rtol=1e-3, atol=1e-5)
    assert [setup.optimizer.num_steps(name) for name in setup.bank.names] == [4 // accumulation] * 3


def test_losses_fall_and_a_run_repeats_bit_for_bit() -> None:
    found = []
    for _ in range(2):
        setup = Setup()
        given = batches(blocks())
        found.append(torch.stack([setup.step(given) for _ in range(4)]))
    assert found[0].equal(found[1])
    assert (found[0][-1] < found[0][0]).all()


def test_a_pass_is_split_where_it_would_leave_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, split = Setup(), Setup()
    given = batches(blocks())
    expected = whole.step(given)
    monkeypatch.setattr("flatout.engines.adapters.lora.fused_step.CPU_STATES", 45 * 32)
    assert [len(part) for part in split.step._parts(given)] == [2, 1]
    torch.testing.assert_close(split.step(given), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(split.bank.factors, whole.bank.factors, rtol=1e-4, atol=1e-6)


def test_a_finished_adapter_leaves_the_batch() -> None:
    setup = Setup()
    setup.optimizer.finish("b")
    given = [batch for batch in batches(blocks()) if batch.block.adapter != 1]
    before = setup.bank.factors.clone()
    losses = setup.step(given)
    assert losses.isnan().tolist() == [False, True, False]
    assert setup.bank.factors[1].equal(before[1]) and not setup.bank.factors[2].equal(before[2])


def test_rows_of_one_task_do_not_enter_the_loss_of_another() -> None:
    setup, other = Setup(), Setup()
    given = batches(blocks())
    foreign = [given[0], *batches(blocks(seed=7))[1:]]
    assert setup.step(given)[0] == other.step(foreign)[0]
    assert setup.bank.factors[0].allclose(other.bank.factors[0], atol=1e-6)
    assert not setup.bank.factors[1].allclose(other.bank.factors[1], atol=1e-6)


def test_processes_may_sum_gradients_before_an_update() -> None:
    seen: list[tuple[int, ...]] = []
    setup = Setup()

    def total(parts: Tensor) -> Tensor:
        seen.append(tuple(parts.shape))
        return torch.zeros_like(parts[0])

    step = FusedStep(setup.encoder, optimizer=setup.optimizer, loss=setup.loss, accumulation=2, total=total)
    before = setup.bank.factors[0].clone()
    step(batches(blocks()))
    assert not seen
    step(batches(blocks()))
    sizes = sum(one.numel() for one in setup.optimizer.gradients(setup.bank.names))
    assert seen == [(2, sizes)]
    decayed = before * (1 - SETTINGS["a"].rate_at(0) * 0.01)
    torch.testing.assert_close(setup.bank.factors[0], decayed)


def test_batches_on_two_processes_give_the_bits_of_one() -> None:
    alone = Setup(accumulation=4)
    given = [batches(blocks(seed=number)) for number in range(4)]
    for each in given:
        alone.step(each)
    parts: dict[int, Tensor] = {}

    def trained(rank: int) -> Setup:
        """A rank of two; the first time it only leaves its parts, as what the other has is not known yet."""
        setup = Setup()

        def total(own: Tensor) -> Tensor:
            parts[rank] = own
            other = parts.get(1 - rank, torch.zeros_like(own))
            return fold(torch.stack([own, other] if rank == 0 else [other, own], dim=1).flatten(0, 1))

        step = FusedStep(
            setup.encoder,
            optimizer=setup.optimizer,
            loss=setup.loss,
            accumulation=2,
            num_batches=4,
            total=total,
        )
        for each in given[rank::2]:
            step(each)
        return setup

    trained(1)
    for rank in (0, 1):
        assert trained(rank).bank.factors.equal(alone.bank.factors)


def test_loss_scales_come_out_of_the_gradients_again() -> None:
    plain, scaled = Setup(), Setup()
    scaled.optimizer = AdapterOptimizer(scaled.bank, settings=SETTINGS, heads=scaled.heads, loss_scaling=True)
    step = FusedStep(scaled.encoder, optimizer=scaled.optimizer, loss=scaled.loss)
    given = batches(blocks())
    torch.testing.assert_close(step(given), plain.step(given))
    torch.testing.assert_close(scaled.bank.factors, plain.bank.factors, rtol=1e-4, atol=1e-6)
    assert step.decision.value == "eager"


def test_half_precision_runs_heads_under_autocast() -> None:
    model = bert(num_layers=1)
    bank = filled(AdapterBank(model, specs((4, 8, 16)), dtype=torch.bfloat16))
    own = heads(bank.names)
    seen: list[torch.dtype] = []

    def loss(adapter: int, states: Tensor, batch: Any) -> Tensor:
        seen.append(own[bank.names[adapter]](states).dtype)
        return class_loss(own[bank.names[adapter]], states, batch)

    with PackedEncoder(model, bank, dtype=torch.bfloat16) as encoder:
        optimizer = AdapterOptimizer(bank, settings=SETTINGS, heads=own)
        step = FusedStep(encoder, optimizer=optimizer, loss=loss)
        losses = [step(batches(blocks())) for _ in range(4)]
    assert set(seen) == {torch.bfloat16} and losses[0].dtype == torch.float32
    assert (losses[-1] < losses[0]).all()


def test_without_a_gpu_a_step_is_eager_and_says_so() -> None:
    assert str(Setup().step.decision) == "eager (computed: CUDA graphs need a GPU)"


def test_batches_out_of_order_and_foreign_banks_are_refused() -> None:
    setup = Setup()
    with pytest.raises(BadInput, match="one batch per adapter, in their order"):
        setup.step(batches(blocks())[::-1])
    with pytest.raises(BadInput, match="different banks"):
        FusedStep(setup.encoder, optimizer=Setup().optimizer, loss=setup.loss)


class Spoilt(Setup):
    """The loss of adapter b is not a number while `spoils` is on."""

    spoils = True

    def __init__(self, *, path: Path | None = None) -> None:
        super().__init__()
        self.encoder._path = path

    def loss(self, adapter: int, states: Tensor, batch: Any) -> Tensor:
        loss = super().loss(adapter, states, batch)
        return loss * float("nan") if adapter == 1 and self.spoils else loss


@pytest.mark.parametrize("path", ["loop", "dense"])
def test_a_loss_that_is_no_number_takes_nothing_from_the_others(path: Path) -> None:
    """Dense products meet foreign rows with a zero, and zero times NaN is NaN."""
    plain, spoilt = Setup(), Spoilt(path=path)
    given = batches(blocks())
    before = spoilt.bank.factors[1].clone()
    for _ in range(2):
        expected, losses = plain.step(given), spoilt.step(given)
        assert losses.isnan().tolist() == [False, True, False]
        torch.testing.assert_close(losses[[0, 2]], expected[[0, 2]], rtol=1e-5, atol=1e-6)
    assert spoilt.bank.factors[1].equal(before)
    for number in (0, 2):
        torch.testing.assert_close(
            spoilt.bank.factors[number], plain.bank.factors[number], rtol=1e-4, atol=1e-6
        )


def test_losses_that_are_no_numbers_are_counted_in_a_row_and_across_a_resume() -> None:
    setup, given = Spoilt(), batches(blocks())
    for _ in range(3):
        setup.step(given)
    assert setup.step.num_not_finite() == {"a": 0, "b": 3, "c": 0}
    other = Spoilt()
    other.step.load_state(*setup.step.state())
    other.step([batch for batch in given if batch.block.adapter != 0])
    assert other.step.num_not_finite() == {"a": 0, "b": 4, "c": 0}
    other.spoils = False
    other.step(given)
    assert other.step.num_not_finite() == {"a": 0, "b": 0, "c": 0}


def test_the_products_that_a_gpu_takes_for_equal_blocks_give_the_gradients_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batched ones, and dense ones for query, key and value; here on a CPU."""
    given = blocks(((3, 8), (2, 12), (6, 4)))
    found = []
    for as_on_gpu in (False, True):
        if as_on_gpu:
            monkeypatch.setattr(
                shape_plan,
                "choose_path",
                lambda *given, **options: Decision(value="batched", reason="as on a GPU", source="assumed"),
            )
        setup = Setup()
        states = setup.encoder(given)
        kinds = setup.encoder.prepare(shapes_of(given))
        assert (kinds.siblings is not None) == as_on_gpu
        torch.stack([state.pow(3).mean() for state in states]).sum().backward()
        found.append((torch.cat([state.flatten() for state in states]).detach(), setup.bank.gradients))
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert found[0][1].any()
