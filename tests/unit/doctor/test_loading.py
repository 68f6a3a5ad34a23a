from __future__ import annotations

from typing import Any

import pytest

from flatout.doctor import loading
from flatout.doctor.rules.loading import loader_bound, single_process_loading
from flatout.measure.evidence import Evidence, FetchLine, Host, Loader

TRAINER = "transformers/trainer.py:812"


def slow(made: Any, *, blocked_s: float | None = None, **changes: Any) -> Loader:
    """A loader whose batches take 100 ms each, of which 80 ms in one line."""
    lines = (
        FetchLine(place=made.place(41), in_collate=False, samples=60),
        FetchLine(place=made.place(41), in_collate=True, samples=20),
        FetchLine(place=None, in_collate=True, samples=20),
    )
    fields = {"fetch_s": made.spread(0.09), "collate_s": made.spread(0.01), "lines": lines, **changes}
    return made.loader(blocked_s=blocked_s, **fields)


def job(made: Any, loader: Loader, *arms: Any, cores: float = 2.0, wait_share: float = 0.9) -> Evidence:
    return made.evidence(
        host=Host(cores=cores, memory_bytes=None),
        steps=made.steps(wait_share=wait_share),
        loaders=(loader,),
        counterfactuals=arms or (made.counterfactual("cached", 8.0),),
    )


def test_the_lines_that_hold_a_batchs_time_are_summed_and_named(made: Any) -> None:
    assert loading.slow_lines(slow(made)) == [(made.place(41), pytest.approx(0.8))]
    thin = slow(made, lines=(FetchLine(place=made.place(41), in_collate=False, samples=3),))
    assert loading.slow_lines(thin) == []


@pytest.mark.parametrize(("blocked_s", "blocked"), [(0.09, True), (0.02, False), (None, False)])
def test_who_waits_for_storage_needs_no_core(made: Any, blocked_s: float | None, blocked: bool) -> None:
    loader = slow(made, blocked_s=blocked_s, num_workers=2)
    assert loading.is_blocked(loader) == blocked
    assert loading.most_workers(loader, 2) == (8 if blocked else 2)
    assert any("storage" in figure for figure in loading.figures(loader)) == blocked


def test_a_dataset_that_waits_is_advised_more_workers_than_cores(made: Any) -> None:
    (computes,) = single_process_loading.detect(job(made, slow(made, blocked_s=0.001)))
    (waits,) = single_process_loading.detect(job(made, slow(made, blocked_s=0.095)))
    assert "num_workers=2 " in computes.fix
    assert "num_workers=8 " in waits.fix
    assert any(str(made.place(41)) in figure for figure in waits.evidence)


def test_workers_that_cannot_keep_up_are_a_finding(made: Any) -> None:
    (finding,) = loader_bound.detect(job(made, slow(made, blocked_s=0.001, num_workers=2)))
    assert (finding.code, finding.place) == ("FO105", made.place(10))
    assert finding.ceiling is not None and finding.ceiling.kind == "cached"
    assert finding.fix.startswith(f"make samples cheaper, above all at {made.place(41)}")


def test_workers_that_wait_are_advised_more_of_them(made: Any) -> None:
    (finding,) = loader_bound.detect(job(made, slow(made, blocked_s=0.095, num_workers=2)))
    assert "num_workers=8" in finding.fix


@pytest.mark.parametrize(
    ("speedup", "fix"), [(3.0, "num_workers=6"), (1.0, "wait less for storage"), (1.1, "more workers")]
)
def test_a_run_with_other_workers_decides(made: Any, speedup: float, fix: str) -> None:
    arms = (
        made.counterfactual("cached", 8.0),
        made.counterfactual("workers", speedup, width=0.1 if speedup == 1.1 else 0.02, value=6.0),
    )
    (finding,) = loader_bound.detect(job(made, slow(made, blocked_s=0.095, num_workers=2), *arms))
    assert fix in finding.fix
    assert finding.ceiling is not None
    assert finding.ceiling.kind == ("workers" if speedup == 3.0 else "cached")


def test_a_loader_that_keeps_up_is_left_alone(made: Any) -> None:
    loader = slow(made, num_workers=2)
    assert loader_bound.detect(job(made, loader, wait_share=0.09)) == []
    assert loader_bound.detect(job(made, loader, made.counterfactual("cached", 1.02))) == []
    assert loader_bound.detect(job(made, slow(made))) == []  # without workers: single-process-loading


def test_a_collate_that_explains_the_time_is_the_finding(made: Any) -> None:
    loader = slow(
        made,
        num_workers=2,
        collate_s=made.spread(0.09),
        calls=(made.call("numpy.concatenate", calls_per_batch=64.0),),
    )
    assert loader_bound.detect(job(made, loader)) == []


@pytest.mark.parametrize(
    ("via", "words"),
    [
        (None, "give this DataLoader num_workers=2 and persistent_workers=True"),
        (
            TRAINER,
            "give TrainingArguments dataloader_num_workers=2 and dataloader_persistent_workers=True",
        ),
        (
            "sentence_transformers/fit.py:3",
            "give the DataLoader that sentence_transformers makes num_workers=2 and persistent_workers=True",
        ),
    ],
)
def test_the_library_that_makes_a_loader_is_told_by_its_own_arguments(
    made: Any, via: str | None, words: str
) -> None:
    loader = made.loader(via=via)
    assert loading.loader_arguments(loader, num_workers=2, persistent_workers=True) == words


def test_a_loader_of_the_users_own_line_is_made_by_no_library(made: Any) -> None:
    assert loading.made_by(made.loader()) is None
    assert loading.made_by(made.loader(via="lightning/fabric/utilities/data.py:325")) is None
    assert loading.made_by(made.loader(via=TRAINER)) == "transformers"


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"num_workers": 2, "cpu_s": 1.0}, 0.1 + 0.5),  # of a step of 1 s, on two cores
        ({"num_workers": 2, "cpu_s": 9.0}, 1.0),
        ({"num_workers": 2, "cpu_s": None}, 0.1),
        ({"num_workers": 0, "cpu_s": 1.0}, 0.1),  # the wait holds all of it
    ],
)
def test_workers_that_compute_take_cores_from_the_step(
    made: Any, fields: dict[str, Any], most: float
) -> None:
    evidence = job(made, slow(made, **fields), wait_share=0.1)
    fields = {"cpu_s": None, **fields}
    scaled = fields["cpu_s"] and fields["cpu_s"] * evidence.step_s
    loader = slow(made, **{**fields, "cpu_s": scaled})
    assert loading.most_freed_share(evidence, loader, 0.1) == pytest.approx(most, abs=0.002)


def test_a_loader_whose_workers_share_the_cores_frees_more_than_the_wait(made: Any) -> None:
    """LeNet on CIFAR, two cores: 15 % wait, 2.53 times as fast on cached batches, 2.46 times once mended."""
    plain = job(made, slow(made), wait_share=0.15)
    busy = slow(made, num_workers=2, cpu_s=plain.step_s)
    arm = made.counterfactual("cached", 2.5)
    (finding,) = loader_bound.detect(job(made, busy, arm, wait_share=0.15))
    assert finding.ceiling is not None and finding.share == pytest.approx(0.15)
    assert finding.ceiling.speedup == pytest.approx(2.5) and not finding.ceiling.is_capped
    (capped,) = loader_bound.detect(job(made, slow(made, num_workers=2, cpu_s=0.0), arm, wait_share=0.15))
    assert capped.ceiling is not None and capped.ceiling.is_capped
