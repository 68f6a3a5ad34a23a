from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flatout.tuner import verdict
from flatout.tuner.trial.meter import StepHashes, TrialResult
from flatout.tuner.trial.switched import ArmResult


def trial(
    step_s: float = 0.01, *, losses: tuple[float, ...] = (1.0, 0.9, 0.8), **changes: object
) -> TrialResult:
    made = TrialResult(
        ended="measured",
        blocks_s=(step_s, step_s * 1.01, step_s * 0.99),
        losses=losses,
        checked={"1": StepHashes(gradients=("a",), parameters=("b",))},
        start="s",
        num_steps=3,
        trained=1,
        formats=("float32",),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def pairs(*ratios: float) -> list[tuple[TrialResult, TrialResult]]:
    return [(trial(0.01 * ratio), trial(0.01)) for ratio in ratios]


def test_a_gain_is_kept_after_three_pairs_or_two_if_it_is_large() -> None:
    assert not verdict.gain_of(pairs(4.0)).is_settled
    assert (
        not verdict.gain_of(pairs(1.25, 1.251)).is_kept and verdict.gain_of(pairs(1.25, 1.25, 1.26)).is_kept
    )
    assert verdict.gain_of(pairs(2.0, 2.01)).is_kept and not verdict.gain_of(pairs(2.0, 2.3)).is_kept
    gain = verdict.gain_of(pairs(2.0, 2.02, 1.98))
    assert gain.is_kept and gain.low < 2.0 < gain.high and gain.ratio == pytest.approx(2.0, rel=0.01)


def test_what_gains_nothing_is_dropped_early_and_what_varies_is_not_settled() -> None:
    assert verdict.gain_of(pairs(0.99, 1.01)).is_none
    assert verdict.gain_of(pairs(0.9, 1.02)).why_none("pairs") == "none of 2 pairs gains 3 %"
    assert verdict.gain_of(pairs(1.0, 1.0, 1.0)).why_none("pairs") == "it gains less than 3 %"
    blocks = verdict.Gain(ratio=0.93, low=0.61, high=1.44, num_pairs=12, best=0.93)
    assert blocks.why_none("blocks") == "12 blocks gain less than 3 % on average"
    varies = verdict.gain_of(pairs(1.3, 0.9, 1.2))
    assert not varies.is_kept and not varies.is_settled


@pytest.mark.parametrize("noise", [0.02, 0.08, 0.3])
def test_noise_is_hardly_ever_kept(noise: float) -> None:
    """A thousand treatments that do nothing, with up to six pairs each, on calm and on busy machines."""
    drawn, kept = random.Random(0), 0

    def some(number: int) -> list[tuple[TrialResult, TrialResult]]:
        return pairs(*(math.exp(drawn.gauss(0, noise) - drawn.gauss(0, noise)) for _ in range(number)))

    for _ in range(1000):
        found, least_spread = some(0), verdict.spread_of(some(verdict.FEWEST_PAIRS))
        while len(found) < verdict.MOST_PAIRS:
            found += some(1)
            gain = verdict.gain_of(found, least_spread=least_spread)
            if gain.is_settled:
                kept += gain.is_kept
                break
    assert kept <= 20


def test_the_smallest_gain_follows_from_the_noise() -> None:
    calm, restless = verdict.gain_of(pairs(1.001, 0.999, 1.0)), verdict.gain_of(pairs(1.1, 0.9, 1.0))
    assert 1.03 < verdict.smallest_gain(calm) < 1.04 < verdict.smallest_gain(restless)


def test_blocks_of_one_run_are_judged_by_the_same_bound() -> None:
    arm = ArmResult(label="x", ratio=1.2, low=1.1, high=1.3, num_blocks=5)
    same = ArmResult(label="same", ratio=1.0, low=0.99, high=1.02, num_blocks=6)

    def judged(one: ArmResult, nothing: ArmResult = same) -> verdict.Gain:
        gains, noise = verdict.gains_of_arms([nothing, one])
        assert noise is not None and noise.high == nothing.high
        return gains["x"]

    assert judged(arm).is_kept and judged(arm).low == 1.1
    assert not judged(replace(arm, low=1.02)).is_settled
    assert judged(replace(arm, ratio=1.02, low=0.9)).is_none
    # what nothing shows by chance is no gain
    assert not judged(arm, replace(same, high=1.18)).is_kept
    assert verdict.gains_of_arms([arm])[0]["x"].is_kept and verdict.gains_of_arms([])[1] is None


def test_a_start_that_takes_longer_pays_after_some_steps() -> None:
    plain = trial(0.1, blocks_s=(0.1,), before_s=3.0, num_steps_before=10)  # 2 s before the steps
    treated = trial(0.05, blocks_s=(0.05,), before_s=32.5, num_steps_before=10)
    gain = verdict.job_gain_of([(plain, treated)], num_steps=1000)
    assert gain is not None and gain.extra_s == pytest.approx(30) and gain.pays_after == 600
    assert gain.ratio == pytest.approx((2 + 100) / (32 + 50))
    late = trial(0.05, blocks_s=(0.05,), before_s=6.5, num_steps_before=10)  # on a busy machine
    early = trial(0.05, blocks_s=(0.05,), before_s=2.0, num_steps_before=10)
    by_chance = verdict.job_gain_of([(plain, late), (plain, early), (plain, late)], num_steps=1000)
    assert by_chance is not None and by_chance.extra_s == by_chance.pays_after == 0
    again = verdict.job_gain_of([(plain, treated)] * 3, num_steps=1000)
    assert again == gain
    slower = verdict.job_gain_of([(treated, plain)])
    assert slower is not None and slower.pays_after is None and slower.ratio is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ended": "crashed", "error": "ValueError: x"}, "raised ValueError: x"),
        ({"ended": "killed", "error": "did not end within 60 s"}, "did not end"),
        ({"ended": "finished"}, "ended after 3 steps"),
        ({"blocks_s": ()}, "no step was timed"),
        ({"blocks_s": (0.1, 0.0)}, "no step was timed"),
        ({"losses": ()}, "no loss was seen"),
        ({"losses": (1.0, math.nan, 0.8)}, "not finite"),
        ({"num_skipped": 2}, "2 steps were skipped"),
        ({"trained": 0}, "0 parameters have a gradient instead of 1"),
        ({"formats": ("bfloat16",)}, "bfloat16 instead of float32"),
        ({"still": 2}, "2 parameters are no longer changed by a step"),
        ({"still_at_end": 1}, "no longer changed by all steps"),
        ({"losses": (1.0, 0.9)}, "number of losses"),
        ({"num_steps": 6}, "3 in 6 steps instead of 3 in 3"),
        ({"losses": (1.0, 0.9) * 3, "num_steps": 6}, "6 in 6 steps instead of 3 in 3"),
    ],
)
def test_not_verified_is_not_passed(changes: dict[str, object], words: str) -> None:
    assert verdict.failure(trial(), like=trial()) is None
    assert words in str(verdict.failure(trial(**changes), like=trial()))


def test_runs_of_another_length_are_compared_by_time_alone() -> None:
    longer = trial(losses=(1.0, 0.9, 0.8) * 2, num_steps=6)
    assert verdict.failure(longer, like=trial(), any_length=True) is None
    rarer = trial(losses=(1.0, 0.9, 0.8), num_steps=6)
    assert "number of losses" in str(verdict.failure(rarer, like=trial(), any_length=True))


def test_what_drops_less_moves_its_losses_less() -> None:
    drawn = random.Random(0)

    def run(noise: float) -> TrialResult:
        """Losses of weights that drift, moved by masks."""
        return trial(losses=tuple(1 + number / 50 + noise * drawn.gauss(0, 1) for number in range(200)))

    without = [(run(0.0), trial(losses=tuple(1 + number / 40 for number in range(200)))) for _ in range(3)]

    def judged(noise: float) -> str | None:
        return verdict.drops_less([(run(1.0), run(noise)) for _ in range(3)], without)

    assert sum(judged(1.0) is not None for _ in range(200)) <= 4 and judged(2.0) is None
    assert "times as far" in str(judged(0.5)) and "times as far" in str(judged(0.0))
    assert verdict.drops_less([], []) is None


def test_exact_means_every_bit() -> None:
    plain = trial()
    assert verdict.differs_exactly(plain, trial()) is None
    late = trial(losses=(1.0, 0.9, math.nextafter(0.8, 1)))
    assert "loss 3" in str(verdict.differs_exactly(plain, late))
    other = trial(checked={"1": StepHashes(gradients=("c",), parameters=("b",))})
    assert "gradients of step 1" in str(verdict.differs_exactly(plain, other))
    updated = trial(checked={"1": StepHashes(gradients=("a",), parameters=("c",))})
    assert "parameters after step 1" in str(verdict.differs_exactly(plain, updated))
    assert "weights before" in str(verdict.differs_exactly(plain, trial(start="t")))
    unseen = trial(checked={})
    assert "nothing was verified" in str(verdict.differs_exactly(unseen, unseen))
    assert verdict.differs_at_first(plain, late) is None
    assert "starts differently" in str(verdict.differs_at_first(plain, other))


def test_averages_are_those_of_the_job_up_to_rounding() -> None:
    plain, nudged = trial(others=(1.0, 2.0)), trial(others=(1.0001, 2.0))
    assert verdict.changes_other_weights(plain, trial(others=(1.0005, 2.00001)), [nudged]) is None
    for wrong in ((1.002, 2.0), (1.0, 2.001), (1.0, float("nan")), (1.0,), ()):
        reason = verdict.changes_other_weights(plain, trial(others=wrong), [nudged])
        assert reason is not None and "no optimizer changes" in reason
    assert verdict.differs_exactly(plain, plain) is None
    assert verdict.differs_exactly(plain, trial(others=(1.0, 2.0000001))) is not None


def test_losses_are_compared_from_the_first_on_whatever_the_warm_up() -> None:
    """A treatment that takes its first steps for warm-up has the losses of later steps."""
    plain = trial(losses=(1.0, 0.9, 0.8), num_losses_at_start=0)
    shifted = trial(losses=(0.9, 0.8, 0.7), num_losses_at_start=1)
    assert "loss 1 is 0.9 instead of 1" in str(verdict.differs_exactly(plain, shifted))
    assert "loss 1" in str(verdict.leaves_the_envelope(plain, shifted, [plain]))


def test_dropout_that_is_gone_shows_in_the_first_loss() -> None:
    plain, without = trial(losses=(1.01,)), trial(losses=(1.0,))
    assert verdict.drops_nothing((plain, trial(losses=(1.012,))), (without, trial(losses=(1.001,)))) is None
    assert "dropout changes" in str(verdict.drops_nothing((plain, without), (without, without)))
    assert verdict.drops_nothing((without, without), (without, without)) is None  # the job has none


def test_losses_of_a_step_count_as_one() -> None:
    parts = trial(losses=(0.5, 0.25, 0.75, 0.5), num_steps=2, batches={"1.1": "a"}, reads=(1.0,))
    whole = verdict.by_step(parts)
    assert (whole.losses, whole.batches, whole.reads) == ((0.75, 1.25), {}, ())
    odd = trial(losses=(0.5, 0.25, 0.75), num_steps=2)  # nobody knows which belong together
    assert verdict.by_step(odd).losses == odd.losses


def test_another_batch_is_named() -> None:
    plain = trial(batches={"1.1": "a", "1.5": "b"})
    assert verdict.serves_other_batches(plain, trial(batches={"1.1": "a"})) is None
    assert verdict.serves_other_batches(trial(), trial()) is None
    stale = trial(batches={"1.1": "a", "1.5": "a"})
    assert verdict.serves_other_batches(plain, stale) == "batch 5 of loader 1 differs"
    assert "nothing was verified" in str(verdict.serves_other_batches(plain, trial()))


def test_a_loss_that_is_read_a_step_late_is_found_out() -> None:
    plain = trial(reads=(1.0, 17.0, 0.9, 18.0, 0.8))
    rounded = trial(losses=(1.1, 0.91, 0.81), reads=(1.1, 16.0, 0.91, 18.0, 0.81))
    assert verdict.reads_other_losses(plain, rounded) is None
    late = trial(reads=(1.0, 17.0, 1.0, 18.0, 0.9))
    assert "reads 1 where loss 2 is 0.9" in str(verdict.reads_other_losses(plain, late))
    assert "reads 0 numbers instead of 5" in str(verdict.reads_other_losses(plain, trial()))


def test_first_steps_that_begin_otherwise_are_not_compared() -> None:
    plain = trial()
    assert verdict.starts_otherwise(plain, trial(losses=(1.01, 0.9))) is None
    assert "first loss" in str(verdict.starts_otherwise(plain, trial(losses=(1.1, 0.9))))
    assert "weights" in str(verdict.starts_otherwise(plain, trial(start="other")))
    assert "no loss" in str(verdict.starts_otherwise(plain, trial(losses=())))


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
    assert verdict.differs_by_more_than_rounding(plain, tmp_path / "far", exact, is_half=True) is None
    save_file({"gradient.0": right, "change.0": right * 1.05}, tmp_path / "faster learning")
    changed = verdict.differs_by_more_than_rounding(plain, tmp_path / "faster learning", exact)
    assert "the change of parameter 0" in str(changed)
    save_file({"gradient.0": right, "change.0": right * (1 + 5e-6)}, tmp_path / "divided by its size")
    assert verdict.differs_by_more_than_rounding(plain, tmp_path / "divided by its size", exact) is None
    save_file({"gradient.1": right}, tmp_path / "others")
    assert "nothing was verified" in str(
        verdict.differs_by_more_than_rounding(plain, tmp_path / "others", exact)
    )


def test_a_first_step_that_goes_farther_is_found_out(tmp_path: Path) -> None:
    change = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, factor in (("plain", 1.0), ("half", 1.005), ("farther", 1.05)):
        save_file({"change.0": change * factor, "gradient.0": change}, tmp_path / name)
    assert verdict.steps_otherwise(tmp_path / "plain", tmp_path / "half") is None
    farther = verdict.steps_otherwise(tmp_path / "plain", tmp_path / "farther")
    assert farther == "the first step goes 1.05 times as far"
    save_file({"change.1": change}, tmp_path / "other")
    assert "nothing was verified" in str(verdict.steps_otherwise(tmp_path / "plain", tmp_path / "other"))


def test_losses_stay_where_rounding_takes_them() -> None:
    plain, nudged = trial(), trial(losses=(1.0, 0.9 + 1e-6, 0.8 + 1e-5))
    inside = trial(losses=(1.0, 0.9 + 5e-6, 0.8 - 5e-5))
    assert verdict.leaves_the_envelope(plain, inside, [nudged]) is None
    outside = trial(losses=(1.001, 0.9, 0.8))
    assert "loss 1" in str(verdict.leaves_the_envelope(plain, outside, [nudged]))


def test_a_lossy_treatment_needs_several_seeds_inside_the_margin() -> None:
    def change(*changes: float) -> verdict.LossChange:
        return verdict.loss_change([(trial(losses=(1.0,)), trial(losses=(1.0 + each,))) for each in changes])

    assert change(1e-4, -2e-4, 2e-4).is_inside
    assert not change(1e-4).is_inside
    worse = change(0.004, 0.004, 0.0041)
    assert worse.is_outside and not worse.is_inside and "+0.40%" in str(worse)
    better = change(-0.02, -0.021, -0.019)  # a larger step size learns faster for a while
    assert better.is_outside and not better.is_inside
    unclear = change(0.004, -0.004, 0.001)
    assert not unclear.is_outside and not unclear.is_inside
    assert verdict.seeds_matter([trial(losses=(1.0,)), trial(losses=(2.0,))])
    assert not verdict.seeds_matter([trial(), trial()])
