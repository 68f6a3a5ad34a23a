"""Noise from memory is the noise that is drawn, and buffers keep their addresses."""

from __future__ import annotations

import torch

from flatout.engines.evolution.population.perturbations import NoiseSource, Perturbations

WEIGHTS = {"a": torch.zeros(6, 4), "b": torch.zeros(3, 6), "c": torch.zeros(6, 4)}
STACKS = (("a", "c"), ("b",))


def made(**changes: object) -> Perturbations:
    source = NoiseSource(**{"seed": 1, "rank": 2, "sigma": 0.5, "kind": "int8", **changes})  # type: ignore[arg-type]
    return Perturbations(source, targets=WEIGHTS, stacks=STACKS, others={"d": torch.zeros(5)})


def test_resident_factors_are_those_that_are_drawn() -> None:
    noise, fresh = made(), made()
    kept = noise.resident(variants=range(4, 10), epoch=3, capacity=8)
    for name in WEIGHTS:
        drawn = fresh.factors(name, variants=range(4, 10), epoch=3)
        assert kept[name].shrink[:6].equal(drawn.shrink) and kept[name].expand[:6].equal(drawn.expand)
        assert kept[name].scale == drawn.scale
    for names in STACKS:
        part = noise.stack(names, variants=range(5, 7), epoch=3)
        assert part.shrink.data_ptr() == kept[names[0]].shrink[1].data_ptr()
        redrawn = fresh.stack(names, variants=range(5, 7), epoch=3)
        assert part.shrink.equal(redrawn.shrink) and part.expand.equal(redrawn.expand)
        assert part.scales == redrawn.scales


def test_other_variants_and_epochs_are_not_taken_from_memory() -> None:
    noise, fresh = made(), made()
    noise.resident(variants=range(4), epoch=0, capacity=4)
    for variants, epoch in ((range(2, 6), 0), (range(4), 1)):
        assert noise.stack(("b",), variants=variants, epoch=epoch).expand.equal(
            fresh.stack(("b",), variants=variants, epoch=epoch).expand
        )


def test_buffers_are_refilled_in_place() -> None:
    noise = made()
    first = noise.resident(variants=range(4), epoch=0, capacity=4)
    address, before = first["a"].shrink.data_ptr(), first["a"].shrink.clone()
    second = noise.resident(variants=range(4), epoch=1, capacity=4)
    assert second["a"].shrink.data_ptr() == address
    assert not second["a"].shrink.equal(before)
    noise.release()
    assert noise.resident(variants=range(4), epoch=0, capacity=4)["a"].shrink.equal(before)


def test_the_kind_of_noise_follows_the_weights() -> None:
    assert made().factors("a", variants=range(1), epoch=0).shrink.dtype == torch.int8
    assert made(kind="normal").factors("a", variants=range(1), epoch=0).shrink.dtype == torch.float32
    source = NoiseSource(seed=1, rank=1, sigma=0.5, kind="normal")
    half = Perturbations(
        source, targets={"a": torch.zeros(2, 2, dtype=torch.bfloat16)}, stacks=[("a",)], others={}
    )
    assert half.factors("a", variants=range(1), epoch=0).shrink.dtype == torch.bfloat16


def test_noise_deviates_by_sigma() -> None:
    source = NoiseSource(seed=1, rank=4, sigma=0.5, kind="int8")
    noise = Perturbations(
        source, targets={"w": torch.zeros(200, 200)}, stacks=[("w",)], others={"v": torch.zeros(20000)}
    )
    factors = noise.factors("w", variants=range(8), epoch=0)
    deviation = torch.stack([factors.delta(v) for v in range(8)]).std()
    assert 0.45 < deviation < 0.55
    full = noise.full("v", variants=range(1), epoch=0)
    assert 0.49 < (full.values * full.scale).std() < 0.51
