"""Scripts nobody tuned for: every way to load and to step, under observation.

The first goes through `flatout diagnose`; the others only through the process that it starts for the job.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from flatout.measure.evidence import INSTRUMENTS, Evidence
from tests.support.cli import (
    ARMS,
    COUNTERFACTUAL,
    SCRIPTS,
    arms,
    diagnose,
    line_of,
    losses,
    observe,
    the_loader,
    unobserved,
)


def usual(evidence: Evidence, field: str) -> int:
    """What most steps have of `field`."""
    return Counter(getattr(step, field) for step in evidence.steps).most_common(1)[0][0]


def assert_losses_are_unchanged(evidence: Evidence, observed: str, reference: str) -> None:
    """Up to the first step that was given another batch than its own, or left out a print."""
    first = min(step.index for step in evidence.steps if step.arm not in ("warmup", "real", *INSTRUMENTS))
    assert first > 10
    assert losses(observed)[: first - 2] == losses(reference)[: first - 2]
    assert len(losses(reference)) >= first - 1


# Loaders


@pytest.fixture(scope="module")
def reference() -> str:
    return unobserved("plain_loop.py", "--steps", "700")  # past warm-up and the looks at the stack


def test_a_plain_loop_with_dataclass_batches(tmp_path: Path, reference: str) -> None:
    outcome = diagnose("plain_loop.py", "--batches", "dataclass", save=tmp_path / "evidence.json")
    evidence = outcome.measured
    assert arms(evidence) == ARMS
    assert evidence.missing == ()
    assert_losses_are_unchanged(evidence, outcome.stdout, reference)
    loader = the_loader(evidence)
    assert (loader.num_workers, loader.batch_size, loader.num_batches, loader.trains) == (0, 16, 40, True)
    assert str(loader.place) == f"plain_loop.py:{line_of('plain_loop.py', 'Samples(), batch_size=16')}"
    assert loader.collate_place is not None and loader.collate_place.function == "collate_records"
    assert loader.fetch_s is not None and loader.collate_s is not None
    assert {step.rows for step in evidence.steps if step.arm not in ("half", "unwatched")} == {16}
    assert {step.rows for step in evidence.steps if step.arm == "half"} == {8}
    assert {name: evidence.counterfactual(name) is not None for name in COUNTERFACTUAL} == {
        "cached": True,
        "half": True,
    }
    assert evidence.job.exit_code == 0
    assert "Evidence:" in outcome.stdout


@pytest.mark.parametrize(
    ("context", "options"),
    [
        ("fork", ()),
        ("spawn", ("--persistent", "--dataset", "iterable")),
        ("forkserver", ("--persistent", "--dataset", "batch_sampler")),
    ],
)
def test_two_workers(context: str, options: tuple[str, ...], tmp_path: Path) -> None:
    command = ("plain_loop.py", "--workers", "2", "--context", context, *options)
    outcome = observe(*command, save=tmp_path / "evidence.json")
    evidence = outcome.measured
    assert arms(evidence) == ARMS
    assert evidence.missing == ()
    loader = the_loader(evidence)
    assert loader.trains
    assert loader.num_batches == (None if "iterable" in options else 40)
    assert loader.persistent_workers == ("--persistent" in options)
    assert loader.batch_size == 16
    assert [worker.worker for worker in loader.workers] == [0, 1]
    assert all(worker.num_batches > 0 and worker.fetch_s > 0 for worker in loader.workers)
    assert loader.epochs[0].iter_s > 0
    stacks = [call for call in loader.calls if call.function == "torch.stack"]  # counted in the worker
    assert [(call.place.function, call.in_collate) for call in stacks] == [("collate_pairs", True)]
    assert usual(evidence, "num_batches") == 1


def test_accumulation_over_a_loader_hidden_in_a_generator_by_a_script_that_changes_folder(
    tmp_path: Path,
) -> None:
    shutil.copy(SCRIPTS / "accumulation.py", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    outcome = observe("accumulation.py", "elsewhere", save=Path("evidence.json"), folder=tmp_path)
    evidence = outcome.measured
    assert arms(evidence) == ARMS
    assert {step.num_batches for step in evidence.steps} == {4}
    assert {step.num_backwards for step in evidence.steps} == {4}
    place = the_loader(evidence).place
    assert str(place) == f"accumulation.py:{line_of('accumulation.py', '# the loader')}"
    assert str(place).partition(":")[0] in evidence.sources
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == []


@pytest.mark.parametrize("how", ["structure", "in-place"])
def test_batches_changed_by_the_script_come_back_as_they_were(how: str, tmp_path: Path) -> None:
    outcome = observe("mutation.py", how, save=tmp_path / "evidence.json")
    evidence = outcome.measured  # the script ends with an error when a served batch is not as it was
    assert arms(evidence) == ARMS
    assert evidence.missing == ()
    assert evidence.counterfactual("cached") is not None


# Steps


def test_two_optimizers_make_one_step(tmp_path: Path) -> None:
    evidence = observe("gan.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "Adam.step"
    steps = [step for step in evidence.steps if step.arm in ARMS]
    assert {(step.num_batches, step.num_backwards) for step in steps} == {(2, 3)}
    assert arms(evidence) == ARMS


def test_neither_optimizer_nor_loader(tmp_path: Path) -> None:
    evidence = observe("manual_sgd.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "backward"
    assert {step.num_backwards for step in evidence.steps} == {1}
    assert {step.num_batches for step in evidence.steps} == {0}
    assert evidence.loaders == ()
    assert evidence.counterfactual("cached") is not None  # the statement that makes the batch ran no more
    assert not [reason for reason in evidence.missing if "mode" in reason]
    (created,) = (site for site in evidence.sites if site.op == "randn")
    assert created.calls_per_step == 1.0
    assert created.place.line == line_of("manual_sgd.py", "torch.randn(32, 64)")


def test_inference_is_stepped_by_the_model_called_last(tmp_path: Path) -> None:
    evidence = observe("inference.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "Linear call"
    assert {step.num_forwards for step in evidence.steps} == {2}
    assert {step.num_batches for step in evidence.steps} == {1}
    assert {step.num_backwards for step in evidence.steps} == {0}
    (sync,) = (site for site in evidence.sites if site.op == "__float__")
    assert sync.calls_per_step == 16.0
    assert sync.place.line == line_of("inference.py", "# one sync per row")
    assert evidence.counterfactual("cached") is not None


def test_a_compiled_model_is_counted_by_its_own_lines_and_not_compiled_again(tmp_path: Path) -> None:
    outcome = observe("compiled.py", save=tmp_path / "evidence.json")
    evidence = outcome.measured
    assert arms(evidence) == ARMS
    (rows,) = (site for site in evidence.sites if site.kind == "row" and site.via is None)
    assert rows.place.line == line_of("compiled.py", "# row by row")
    assert rows.place.function == "Rows.forward"
    assert rows.calls_per_step == 16.0
    # the full batch once, and half of it once: nothing that an instrument caused
    assert "compiled 2 graphs" in outcome.stdout
    assert {step.num_forwards for step in evidence.steps if not step.arm.startswith("knock-out")} == {1}


def test_parts_that_are_compiled_by_themselves_stay_compiled(tmp_path: Path) -> None:
    """A wrapper that dynamo compiles is one code for all parts, and one code gets eight graphs."""
    outcome = observe("compiled_parts.py", save=tmp_path / "evidence.json")
    assert arms(outcome.measured) == ARMS
    assert "compiled 10 graphs" in outcome.stdout  # each part for the full batch, and once for half of it
    assert "recompile_limit" not in outcome.stderr


def test_evaluation_is_not_taken_for_training(tmp_path: Path) -> None:
    evidence = observe("evaluation.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "SGD.step"
    assert arms(evidence) == ARMS
    trains = {loader.place.line: loader.trains for loader in evidence.loaders if loader.place}
    assert trains == {
        line_of("evaluation.py", "training = "): True,
        line_of("evaluation.py", "held_out = "): False,
    }
    kept = [step for step in evidence.steps if step.kept]
    assert {step.num_batches for step in kept} == {1}
    assert any(step.num_batches == 101 for step in evidence.steps)
