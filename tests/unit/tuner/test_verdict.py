from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flatout.tuner import verdict
from flatout.tuner.trial.meter import TrialResult


def trial(
    step_s: float = 0.01, *, losses: tuple[float, ...] = (1.0, 0.9, 0.8), **changes: object
) -> TrialResult:
    made = TrialResult(
        ended="measured",
        blocks_s=(step_s, step_s * 1.01, step_s * 0.99),
        losses=losses,
        sums={"1": (("0x1p0", "0x1p1", "(2,)"),)},
        num_steps=3,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def pairs(*ratios: float) -> list[tuple[TrialResult, TrialResult]]:
    return [(trial(0.01 * ratio), trial(0.01)) for ratio in ratios]


def test_a_clear_gain_is_kept_after_three_pairs_and_not_before() -> None:
    assert not verdict.gain_of(pairs(2.0)).is_settled
    assert not verdict.gain_of(pairs(2.0, 2.01)).is_kept
    gain = verdict.gain_of(pairs(2.0, 2.02, 1.98))
    assert gain.is_kept and gain.low < 2.0 < gain.high and gain.ratio == pytest.approx(2.0, rel=0.01)


def test_what_gains_nothing_is_dropped_early_and_what_varies_is_not_settled() -> None:
    assert verdict.gain_of(pairs(0.99, 1.01)).is_none
    varies = verdict.gain_of(pairs(1.3, 0.9, 1.2))
    assert not varies.is_kept and not varies.is_settled


def test_noise_is_hardly_ever_kept() -> None:
    """A thousand treatments that do nothing, with up to six pairs each, where runs vary by 2 %."""
    drawn, kept = random.Random(0), 0
    for _ in range(1000):
        found: list[tuple[TrialResult, TrialResult]] = []
        while len(found) < verdict.MOST_PAIRS:
            found += pairs(math.exp(drawn.gauss(0, 0.02) - drawn.gauss(0, 0.02)))
            gain = verdict.gain_of(found)
            if gain.is_settled:
                kept += gain.is_kept
                break
    assert kept <= 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ended": "crashed", "error": "ValueError: x"}, "raised ValueError: x"),
        ({"ended": "killed", "error": "did not end within 60 s"}, "did not end"),
        ({"ended": "finished"}, "ended after 3 steps"),
        ({"losses": ()}, "no loss was seen"),
        ({"losses": (1.0, math.nan, 0.8)}, "not finite"),
        ({"still": 2}, "2 parameters are no longer changed"),
        ({"losses": (1.0, 0.9)}, "number of losses"),
    ],
)
def test_not_verified_is_not_passed(changes: dict[str, object], words: str) -> None:
    assert verdict.failure(trial(), like=trial()) is None
    assert words in str(verdict.failure(trial(**changes), like=trial()))


def test_exact_means_every_bit() -> None:
    plain = trial()
    assert verdict.differs_exactly(plain, trial(), reproducible=True) is None
    late = trial(losses=(1.0, 0.9, math.nextafter(0.8, 1)))
    assert "loss 3" in str(verdict.differs_exactly(plain, late, reproducible=True))
    other = trial(sums={"1": (("0x1p0", "0x1p2", "(2,)"),)})
    assert "gradients of step 1" in str(verdict.differs_exactly(plain, other, reproducible=True))
    assert verdict.differs_exactly(plain, late, reproducible=False) is None
    assert "from run to run" in str(verdict.differs_exactly(plain, other, reproducible=False))


def test_rounding_may_double_the_error_against_64_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    right = torch.randn(100, dtype=torch.float64)
    noise = torch.randn(100, dtype=torch.float64)

    def save(name: str, error: float) -> Path:
        save_file({"gradient.0": right + error * noise, "change.0": right}, tmp_path / name)
        return tmp_path / name

    exact, plain = save("exact", 0), save("plain", 1e-4)
    assert verdict.differs_by_more_than_rounding(plain, save("near", 1.9e-4), exact) is None
    far = verdict.differs_by_more_than_rounding(plain, save("far", 2.5e-4), exact)
    assert "the gradient of parameter 0" in str(far)
    save_file({"gradient.0": right, "change.0": right * 1.05}, tmp_path / "faster learning")
    changed = verdict.differs_by_more_than_rounding(plain, tmp_path / "faster learning", exact)
    assert "the change of parameter 0" in str(changed)
    save_file({"gradient.1": right}, tmp_path / "others")
    assert "nothing was verified" in str(
        verdict.differs_by_more_than_rounding(plain, tmp_path / "others", exact)
    )


def test_losses_stay_where_rounding_takes_them() -> None:
    plain, nudged = trial(), trial(losses=(1.0, 0.9 + 1e-6, 0.8 + 1e-5))
    inside = trial(losses=(1.0, 0.9 + 5e-6, 0.8 - 5e-5))
    assert verdict.leaves_the_envelope(plain, inside, [nudged]) is None
    outside = trial(losses=(1.001, 0.9, 0.8))
    assert "loss 1" in str(verdict.leaves_the_envelope(plain, outside, [nudged]))


def test_a_lossy_treatment_needs_several_seeds_inside_the_margin() -> None:
    near = [(trial(losses=(1.0,)), trial(losses=(1.0 + each,))) for each in (1e-4, -2e-4, 2e-4)]
    assert verdict.loss_change(near).is_inside
    assert not verdict.loss_change(near[:1]).is_inside
    worse = [(trial(losses=(1.0,)), trial(losses=(1.004,))) for _ in range(3)]
    change = verdict.loss_change(worse)
    assert not change.is_inside and "+0.40%" in str(change)
