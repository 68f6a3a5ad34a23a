from __future__ import annotations

import pytest

from flatout.doctor.rules.loading.unbucketed_padding import detect
from flatout.measure.evidence import Lengths


def padded(made, *, padded_share=0.5, bucketed_share=0.0, dense_s=0.16, device="cpu", half=1.9, **changes):
    lengths = Lengths(
        num_samples=320, mean=64.0, max=128, padded_share=padded_share, bucketed_share=bucketed_share
    )
    kernels = made.kernels(
        busy_share=0.8 if device == "cuda" else None,
        by_category_s={"matmul": dense_s / 2, "attention": dense_s / 2, "elementwise": 0.1, "copy": 0.04},
    )
    fields = {
        "loaders": (made.loader(lengths=lengths),),
        "kernels": kernels,
        "counterfactuals": (made.counterfactual("half", half),),
        **changes,
    }
    return made.evidence(device=device, **fields)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fires_at_the_loader(made, device):
    arms = (made.counterfactual("half", 1.9), made.counterfactual("trimmed", 1.3))
    (finding,) = detect(padded(made, device=device, counterfactuals=arms))
    assert (finding.code, finding.name) == ("FO104", "unbucketed-padding")
    assert finding.place == made.place(10)
    assert finding.share == pytest.approx(0.8 * 0.5)
    assert finding.ceiling.speedup == pytest.approx(1.3)
    assert finding.safety == "lossy"


@pytest.mark.parametrize(("padded_share", "fires"), [(0.301, True), (0.299, False)])
def test_sorting_must_save_ten_points(made, padded_share, fires):
    assert bool(detect(padded(made, padded_share=padded_share, bucketed_share=0.2))) == fires


@pytest.mark.parametrize(("dense_s", "fires"), [(0.021, True), (0.019, False)])
def test_the_positions_must_matter_to_the_step(made, dense_s, fires):
    assert bool(detect(padded(made, dense_s=dense_s))) == fires


def test_samples_that_are_short_whatever_the_batch_are_left_alone(made):
    assert detect(padded(made, padded_share=0.6, bucketed_share=0.55)) == []


def test_a_job_that_takes_as_long_on_half_its_batch_is_left_alone(made):
    assert detect(padded(made, half=1.0)) == []


def test_without_lengths_or_a_profile_there_is_nothing_to_say(made):
    assert detect(padded(made, loaders=(made.loader(),))) == []
    assert detect(padded(made, kernels=None)) == []


def test_a_loader_that_does_not_train_is_left_alone(made):
    lengths = Lengths(num_samples=320, mean=64.0, max=128, padded_share=0.5, bucketed_share=0.0)
    assert detect(padded(made, loaders=(made.loader(lengths=lengths, trains=False),))) == []


def test_all_padding_is_no_division_by_zero(made):
    assert detect(padded(made, padded_share=1.0, bucketed_share=1.0)) == []


@pytest.mark.parametrize(("speedup", "fires"), [(1.9, True), (1.02, False)])
def test_padding_that_samples_bring_along_is_found_by_steps_without_it(made, speedup, fires):
    evidence = made.evidence(
        loaders=(made.loader(lengths=None),), counterfactuals=(made.counterfactual("trimmed", speedup),)
    )
    findings = detect(evidence)
    assert [finding.ceiling.speedup for finding in findings] == ([pytest.approx(speedup)] if fires else [])
    assert all("longest row" in finding.fix for finding in findings)


def test_samples_padded_to_one_length_that_few_of_them_fill_are_found_by_sorted_steps(made):
    """Every batch holds a row that fills it, so nothing can be cut off before rows of a length meet."""
    sorted_steps = made.counterfactual(
        "trimmed", 1.23, label="trimmed, similar lengths", place=made.place(10)
    )
    evidence = made.evidence(loaders=(made.loader(lengths=None),), counterfactuals=(sorted_steps,))
    (finding,) = detect(evidence)
    assert finding.ceiling.speedup == pytest.approx(1.23)
    assert finding.safety == "lossy"
    assert "batch_sampler" in finding.fix and "longest row" in finding.fix
