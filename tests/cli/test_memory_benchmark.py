"""The memory benchmark: its configurations are sound, and a sample of the measured table is still predicted.

The measured table comes from a GPU and is committed; the estimates are made here, on a CPU.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "transformers", reason="the benchmark's models are built from transformers configurations"
)
pytest.importorskip("peft", reason="one family of the benchmark is adapters of PEFT")
import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from benchmarks.memory.accuracy import by_group, caps_summary, finder_summary, held_against, summarize
from benchmarks.memory.allocator_record import (
    Block,
    event_differences,
    held_at_peak,
    peak_differences,
    whole_log,
)
from benchmarks.memory.children import Pool
from benchmarks.memory.configuration import HELD_OUT, Configuration
from benchmarks.memory.configurations import SETS, every_configuration, of_sets
from benchmarks.memory.estimates import estimate, estimate_with_probe
from benchmarks.memory.first_look import OURS, REPAIRED, compare_all, without_places
from benchmarks.memory.history import append_history, compact
from benchmarks.memory.largest import bracket
from benchmarks.memory.recommended import budget_of, forecast_of, judged, searched, settings_of
from benchmarks.memory.recommended import summarize as recommended_summary
from benchmarks.memory.table import RESULTS, latest_table, measured_rows, read_table, write_table
from flatout.planner.fit.fit_settings import fit_settings
from tests.support.warm_python import warm

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATIONS = every_configuration()
# One per kind of trouble: a scaler, a trained bias in attention, convolutions, cuDNN's recurrent layers,
# adapters, accumulation with a fused optimizer.  Small ones, so that all take seconds.
SAMPLE = (
    "bert-mlm-tiny/batch64/length128/fp32/adamw",
    "bert-mlm-base/batch32/length256/fp16/clip/adamw",
    "vit-tiny/batch256/image224/fp32/adamw",
    "resnet50/batch64/image224/fp32/sgd-momentum",
    "unet-diffusion/batch32/image64/fp32/clip/adamw",
    "lstm-lm-650x2/batch64/length128/fp32/clip/adamw",
    "t5-small/batch32/length256/target64/fp32/adamw",
    "lora16-llama-125m/batch8/length1024/bf16/adamw",
    "table-2048x8/batch512/rows64/tf32/accumulation2/adamw-fused",
)
ALLOCATED_BOUND, RESERVED_BOUND = 0.01, 0.06
# Searches on the GPU: where flushes matter most, recurrent layers, and sizes that depend on data.
RECOMMENDED = (
    "resnet50/batch64/image224/fp32/sgd-momentum@8",
    "lstm-lm-650x2/batch64/length128/fp32/clip/adamw",
    "mixture-capacity/batch64/length256/bf16/adamw",
)


def _build(configuration: Configuration) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers and PEFT warn about models without a checkpoint
        with torch.device("meta"):
            return configuration.job.make_model()


def test_the_benchmark_is_as_wide_as_it_claims() -> None:
    families = {each.family for each in CONFIGURATIONS}
    assert len({each.label for each in CONFIGURATIONS}) == len(CONFIGURATIONS) >= 66
    assert len(families) >= 12
    assert set(HELD_OUT) < families
    assert len(HELD_OUT) * 3 >= len(families)
    assert sum(each.cap_bytes is not None for each in CONFIGURATIONS) >= 20
    assert {each.recipe.precision for each in CONFIGURATIONS} == {"fp32", "tf32", "bf16", "fp16", "pure-bf16"}
    assert {each.recipe.mode for each in CONFIGURATIONS} == {"train", "evaluate", "generate"}
    assert {CONFIGURATIONS[position].family for position in range(len(families))} == families


def test_the_sets_share_no_family() -> None:
    families = {name: {each.family for each in configurations()} for name, configurations in SETS.items()}
    assert len(families["unseen-second"]) >= 24
    assert sum(map(len, families.values())) == len(set.union(*families.values()))
    second = SETS["unseen-second"]()
    assert len({each.label for each in second}) == len(second)
    assert {each.recipe.precision for each in second} == {"fp32", "tf32", "bf16", "fp16", "pure-bf16"}
    assert of_sets("unseen,unseen-second") == [*SETS["unseen"](), *second]


def test_a_first_look_compares_what_was_predicted_and_counts_what_failed() -> None:
    labels = [each.label for each in SETS["unseen-second"]()[:2]]
    row = {"family": "f", "held_out": False, "num_parameters": 1}
    measured = {"peak_allocated_bytes": 100, "peak_reserved_bytes": 200}
    table = {"rows": [{"label": label, **row, **measured} for label in labels]}
    failed = without_places({"error": "BadInput: no (at /somewhere:1)", "traceback": "..."})
    assert failed == {"error": "BadInput: no"}
    first, repaired = {"allocated": 101, "reserved": 190}, {"allocated": 99, "reserved": 200}
    predictions = {
        "rows": [{"label": labels[0], **first}, {"label": labels[1], **failed, "repaired": repaired}]
    }
    plain, other = (found["errors"] for found in compare_all(table, predictions))
    assert (
        plain[OURS] == plain[REPAIRED] == {"allocated": pytest.approx(0.01), "reserved": pytest.approx(-0.05)}
    )
    assert other[OURS] == {"allocated": None, "reserved": None}
    assert other[REPAIRED] == {"allocated": pytest.approx(-0.01), "reserved": 0.0}


def test_the_fourth_unseen_set_was_predicted_whole_and_measured_whole() -> None:
    configurations = SETS["unseen-fourth"]()
    assert len(configurations) >= 40 and len({each.family for each in configurations}) >= 20
    assert {each.recipe.precision for each in configurations} == {"fp32", "tf32", "bf16", "fp16", "pure-bf16"}
    for subject in ("unseen-fourth-predictions", "unseen-fourth", "unseen-fourth-first-look"):
        path = latest_table(subject)
        assert path is not None
        assert {row["label"] for row in read_table(path)["rows"]} == {each.label for each in configurations}


def test_the_fifth_unseen_set_was_predicted_whole_and_measured() -> None:
    configurations = SETS["unseen-fifth"]()
    assert len({each.label for each in configurations}) == len(configurations) >= 45
    assert len({each.family for each in configurations}) >= 25
    assert {each.recipe.precision for each in configurations} == {"fp32", "tf32", "bf16", "fp16", "pure-bf16"}
    path = latest_table("unseen-fifth-predictions")
    assert path is not None
    labels = [each.label for each in configurations]
    assert [row["label"] for row in read_table(path)["rows"]] == labels
    measured, first = latest_table("unseen-fifth"), latest_table("unseen-fifth-first-look")
    assert measured is not None and first is not None
    rows = read_table(measured)["rows"]
    assert {row["label"] for row in rows} == set(labels)
    ran = {row["label"] for row in rows if "error" not in row}
    assert {row["label"] for row in read_table(first)["rows"]} == ran
    assert len(ran) == len(labels) - 1  # the small batch of a probe had too few answers for a group


def test_the_sixth_unseen_set_was_predicted_whole_and_measured_whole() -> None:
    configurations = SETS["unseen-sixth"]()
    assert len({each.label for each in configurations}) == len(configurations) >= 48
    assert len({each.family for each in configurations}) >= 30
    assert {each.recipe.precision for each in configurations} == {"fp32", "tf32", "bf16", "fp16", "pure-bf16"}
    for subject in ("unseen-sixth-predictions", "unseen-sixth", "unseen-sixth-first-look"):
        path = latest_table(subject)
        assert path is not None
        rows = read_table(path)["rows"]
        assert {row["label"] for row in rows if "error" not in row} == {each.label for each in configurations}


def test_the_second_unseen_set_was_predicted_whole_and_measured_whole() -> None:
    labels = {each.label for each in SETS["unseen-second"]()}
    for subject in ("unseen-second-predictions", "unseen-second", "unseen-second-first-look"):
        path = latest_table(subject)
        assert path is not None
        assert {row["label"] for row in read_table(path)["rows"]} == labels, subject


def test_a_whole_log_numbers_its_blocks_by_birth() -> None:
    kept, freed = Block(1024, "before"), Block(512, "a.py:1 f")
    found = whole_log([(-1, True, kept), (7, True, freed), (7, False, freed), (9, True, freed)], second=3)
    assert found == {
        "events": "0 1 -2 2",
        "bytes": "1024 512 512",
        "origin": "0 1 1",
        "origins": ["before", "a.py:1 f"],
        "second": 3,
    }


def test_every_model_builds_without_memory() -> None:
    counts = {}
    for configuration in CONFIGURATIONS:
        model = _build(configuration)
        counts[configuration.label] = sum(parameter.numel() for parameter in model.parameters())
        assert any(parameter.requires_grad for parameter in model.parameters()), configuration.label
        if configuration.recipe.checkpointing:
            assert callable(model.gradient_checkpointing_enable), configuration.label
    assert 5e6 < min(counts.values()) < 1e7
    assert 1.4e9 < max(counts.values()) < 1.8e9


def test_every_batch_is_of_cpu_tensors_and_grows_with_the_batch_size() -> None:
    for configuration in CONFIGURATIONS:
        volumes = []
        for batch_size in (2, 4):
            batch = configuration.job.make_batch(**configuration.sizes(batch_size=batch_size))
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            assert {tensor.device.type for tensor in tensors} == {"cpu"}, configuration.label
            volumes.append(sum(tensor.numel() for tensor in tensors))
        assert volumes[1] == 2 * volumes[0], configuration.label


@pytest.mark.parametrize("label", SAMPLE)
def test_a_sample_of_the_measured_table_is_predicted(label: str) -> None:
    path = latest_table()
    assert path is not None
    rows = {
        configuration.label: (configuration, row) for configuration, row in measured_rows(read_table(path))
    }
    configuration, row = rows[label]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = estimate(configuration)
    assert found["allocated"] == pytest.approx(row["peak_allocated_bytes"], rel=ALLOCATED_BOUND)
    assert found["reserved"] == pytest.approx(row["peak_reserved_bytes"], rel=RESERVED_BOUND)


@pytest.mark.parametrize("label", RECOMMENDED)
def test_what_a_plan_recommends_trained_on_the_gpu_under_the_cap(label: str) -> None:
    """The product's own number: of a fit with the cap as what is free, at a margin of 1."""
    configuration, row = next(found for found in searched() if found[1]["label"] == label)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = fit_settings(
            settings_of(configuration), budget=budget_of(configuration), forecast=forecast_of(configuration)
        )
    (group,) = fit.groups
    assert (group.caution is not None) == label.startswith("mixture")
    assert group.safe is not None and group.safe <= group.largest
    found = judged(row, group.largest)
    assert found["trains"] and found["near"], (group.largest, found)
    wider = next(one for one in group.suggestions if "largest effective batch" in one.names)
    assert wider.batch_size == group.largest


def test_the_recommended_batches_meet_the_goal_in_every_search() -> None:
    path = latest_table("recommended")
    assert path is not None
    table = read_table(path)
    searches = {row["label"]: row for _, row in searched()}
    found = [judged(searches[row["label"]], row["recommended"]) for row in table["rows"]]
    assert {row["label"] for row in table["rows"]} == set(searches) and len(found) == len(searches) >= 60
    assert table["summary"] == recommended_summary(found)
    assert all(each["trains"] for each in found)
    assert sum(each["near"] for each in found) >= 0.95 * len(found)


def test_the_page_shows_what_the_result_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    figures = importlib.import_module("memory_figures")
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    assert len(re.findall(r"<!-- memory: \w+ -->", page)) == 8
    assert figures.with_tables(page, folder=tmp_path).count("Not measured yet") == 7
    shown = figures.with_tables(page)
    result = json.loads(sorted(RESULTS.glob("estimates_*.json"))[-1].read_text(encoding="utf-8"))
    assert len(result["rows"]) >= 60
    for quantity in ("allocated", "reserved"):
        errors = [row["errors"]["flatout"][quantity] for row in result["rows"] if not row["held_out"]]
        median = f"{100 * float(np.median(np.abs(errors))):.2f} %"
        assert re.search(
            rf"^\| {quantity} \| tuned \| {len(errors)} \| 0 \| {median} \|", shown, re.MULTILINE
        )
    for family in {row["family"] for row in result["rows"]}:
        assert f"\n| {family} |" in shown


def test_the_snippet_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(block, encoding="utf-8")
    done = warm().run("python", "-W", "error", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "optimizer state" in done.stdout and "allocated" in done.stdout


def test_a_table_is_written_as_it_is_read(tmp_path: Path) -> None:
    table = {"hardware": "none", "summary": {"a": [1, 2]}, "rows": [{"label": "x/y"}, {"label": "z"}]}
    write_table(tmp_path / "t.json", table)
    assert read_table(tmp_path / "t.json") == table
    assert len((tmp_path / "t.json").read_text().splitlines()) == 8


def test_errors_are_summed_up_with_failures_counted() -> None:
    found = summarize([0.01, -0.02, 0.03, None])
    assert (found["count"], found["failed"]) == (3, 1)
    assert found["median"] == pytest.approx(0.02)
    assert found["p95"] == found["worst"] == pytest.approx(0.03)
    assert found["under_share"] == pytest.approx(1 / 3)
    assert found["lowest"] == pytest.approx(-0.02)
    assert summarize([None, None]) == {"count": 0, "failed": 2}


def test_held_out_families_are_reported_apart() -> None:
    def row(family: str, held_out: bool, error: float | None) -> dict[str, Any]:
        return {"family": family, "held_out": held_out, "errors": {"ours": {"allocated": error}}}

    rows = [row("bert", False, 0.01), row("t5", True, 0.5), row("gru", True, None)]
    found = by_group(rows, estimator="ours", quantity="allocated")
    assert (found["tuned"]["count"], found["tuned"]["worst"]) == (1, 0.01)
    assert (found["held out"]["count"], found["held out"]["failed"]) == (1, 1)
    assert found["all"]["count"] == 2
    assert set(found["families"]) == {"bert", "t5", "gru"}


def test_searches_are_summed_up() -> None:
    rows: list[dict[str, Any]] = [
        {"label": "a", "safe": 97, "limit": 101, "largest": 100, "fails_at": 101}
        | {"safe_trains": True, "limit_trains": False},
        {"label": "b", "safe": 50, "limit": 60, "largest": 60, "fails_at": 61}
        | {"safe_trains": True, "limit_trains": True},
        {"label": "c", "error": "took over 60 s"},
    ]
    assert caps_summary(rows) == {
        "count": 2,
        "undecided": 1,
        "safe_trains_share": 1.0,
        "safe_near_share": 0.5,
        "limit_trains_share": 0.5,
        "limit_near_share": 1.0,
    }
    finder = [{"label": "a", "found": 64, "seconds": 9.0}, {"label": "b", "found": 61, "seconds": 11.0}]
    found = finder_summary(finder, {"a": 100, "b": 60})
    assert (found["near_share"], found["over_share"], found["median_seconds"]) == (0.5, 0.5, 10.0)


def test_what_is_predicted_again_is_held_against_what_trained() -> None:
    rows = [{"label": label, "largest": 100, "fails_at": 102} for label in "abcd"]
    rows.append({"label": "undecided", "largest": 100, "fails_at": None})
    predicted = {
        label: {"safe": safe, "limit": 100}
        for label, safe in zip(["a", "b", "c", "undecided"], [60, 100, 102, 100], strict=True)
    }
    found = held_against(rows, predicted)
    assert (found["count"], found["not_asked"]) == (3, 2)
    assert (found["safe_trains"], found["safe_fails"], found["safe_near"]) == (2, ["c"], 2)
    assert (found["limit_trains"], found["limit_fails"], found["limit_near"]) == (3, [], 3)
    assert held_against(rows, {"a": {"safe": 101, "limit": 101}})["safe_fails"] == []  # nobody tried it
    tried = [{**rows[0], "tried": {"101": {"trains": True}, "102": {"trains": False}}}]
    assert held_against(tried, {"a": {"safe": 90, "tight": 101, "limit": 102}}) == {
        "count": 1,
        "not_asked": 0,
        "safe_trains": 1,
        "safe_fails": [],
        "safe_near": 0,
        "tight_trains": 1,
        "tight_fails": [],
        "tight_near": 1,
        "limit_trains": 0,
        "limit_fails": ["a"],
        "limit_near": 1,
    }


@pytest.mark.parametrize("real", [0, 1, 2, 7, 33, 100, 1000])
@pytest.mark.parametrize("guess", [1, 5, 30, 90, 1000, 3000])
def test_the_search_closes_in_on_the_border(real: int, guess: int) -> None:
    largest, fails_at = bracket(lambda size: size <= real, guess=guess, may_go_on=lambda: True)
    assert fails_at is not None
    assert largest <= real < fails_at
    assert fails_at - largest <= max(1, largest // 100)


def test_the_probes_of_a_row_correct_its_estimate() -> None:
    path = latest_table()
    assert path is not None
    configuration, row = next(
        found for found in measured_rows(read_table(path)) if found[0].label.startswith("table-1024x6/")
    )
    found = estimate_with_probe(configuration, row)
    assert [each["batch_size"] for each in found["at_probes"]] == [
        probe["batch_size"] for probe in row["probes"]
    ]
    without = found["without_probe"]
    missed = row["probes"][0]["peak_reserved_bytes"] - found["at_probes"][0]["reserved"]
    low = {"batch_size": 1, "peak_allocated_bytes": 1, "peak_reserved_bytes": 1}
    assert found["reserved"] >= without["reserved"] and missed > -100 * 2**20
    nothing = estimate_with_probe(configuration, {**row, "probes": [low]})
    assert {key: nothing[key] for key in without} == nothing["without_probe"] == without
    assert estimate_with_probe(configuration, {**row, "probes": []})["reserved"] == without["reserved"]


def test_a_history_keeps_which_birth_a_death_ends(tmp_path: Path) -> None:
    log = [
        ("alloc", 1, 10),
        ("alloc", 2, 20),
        ("free_completed", 1, 10),
        ("alloc", 1, 5),
        ("free_completed", 9, 7),
    ]
    log.append(("free_completed", 1, 5))
    events = [{"action": action, "addr": address, "size": size} for action, address, size in log]
    found = compact(events)
    assert found["births"].tolist() == [0, 1, 0, 2, -1, 2]
    path = tmp_path / "histories.npz"
    for label in ("a/b", "c/d"):
        assert append_history(path, label, found) == len(log)
    with np.load(path) as read:
        assert read["c/d/sizes"].tolist() == [10, 20, 10, 5, 7, 5]


def _doubles(value: int) -> dict[str, Any]:
    return {"value": 2 * value}


def _dies() -> dict[str, Any]:
    os._exit(3)


def _raises() -> dict[str, Any]:
    raise ValueError("not this one")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_that_fails_costs_only_itself() -> None:
    tasks = [("two", _doubles, (1,)), ("dead", _dies, ()), ("raised", _raises, ()), ("four", _doubles, (2,))]
    with Pool(width=2, limit_s=60) as pool:
        found = dict(pool.run(tasks, deadline=time.monotonic() + 60))
    assert found["two"] == {"value": 2}
    assert found["four"] == {"value": 4}
    assert found["dead"]["error"] == "the child died with exit code 3"
    assert found["raised"]["error"] == "ValueError: not this one"
    with Pool(width=1, limit_s=60) as pool:
        assert list(pool.run(tasks, deadline=time.monotonic() - 1)) == []


def test_a_record_and_a_trace_are_compared_block_by_block() -> None:
    one, two, three = (Block(num_bytes << 20, f"op {num_bytes}") for num_bytes in (1, 2, 3))
    predicted, recorded = [one, two, three, one, three], [one, three, one, three, two]
    said = list(event_differences(predicted, recorded, smallest=1 << 20))
    assert [line.split()[0] for line in said] == ["at", "-", "at", "+"]
    (held,) = peak_differences([one, two], [one, two, two], smallest=1 << 20)
    assert held.startswith("GPU   holds   1 more of     2.000 MiB")
    events = [(0, True, one), (1, True, three), (0, False, one), (2, True, two), (1, False, three)]
    assert held_at_peak(events) == [three, two]
    assert list(event_differences(predicted, predicted, smallest=0)) == []
