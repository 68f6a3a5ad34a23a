from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from flatout.api import fit_config, plan_config
from flatout.cli.render.plan import render_fit, render_overview
from flatout.ground.errors import BadInput
from flatout.planner.plan import ConfigFit, ConfigPlan, PlanOptions
from tests.support import planner as plans


def console(width: int = 80, *, colour: bool = False) -> Console:
    return Console(
        width=width, force_terminal=colour, color_system="standard" if colour else None, markup=False
    )


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return plans.write_curriculum(tmp_path)


def shown(conf: Path, **options: str) -> ConfigPlan:
    return plan_config(conf, PlanOptions(**options), make_forecast=plans.toy_maker())  # type: ignore[arg-type]


def fitted(conf: Path, **forecast: object) -> ConfigFit:
    options = PlanOptions(model="x", gpu_memory="24GB")
    return fit_config(conf, options, make_forecast=plans.toy_maker(**forecast))


def test_the_overview_without_a_model(conf: Path) -> None:
    text = render_overview(shown(conf), console=console())
    assert "device: n/a" in text
    assert "n_negatives    24 / 8" in text
    assert text.count("n/a") >= 10
    assert "is given 2 times; the last one counts" in text


def test_the_overview_with_one(conf: Path) -> None:
    text = render_overview(shown(conf, model="x", gpu_memory="24GB"), console=console())
    assert "24GB: 22.5 GiB free of 22.5 GiB" in text
    assert "\nallocator: fixed segments (PyTorch's default" in text
    assert "01_stage      4         64  6.79 GiB" in text
    assert "recommended:\n- a batch of 29 fits in every stage" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_but_the_diff_keeps_to_the_width(conf: Path, width: int) -> None:
    fit = fitted(conf)
    text = render_fit(fit, console=console(width))
    text += render_overview(shown(conf, model="x", gpu_memory="24GB"), console=console(width))
    assert max(len(line) for line in text.splitlines()) <= width


def test_a_fit_marks_what_is_chosen_and_ends_with_the_diff(conf: Path) -> None:
    fit = fitted(conf)
    text = render_fit(fit, console=console(100))
    (chosen,) = [line for line in text.splitlines() if line.startswith(">")]
    assert "largest batch" in chosen and "13.1 GiB" in chosen and "58 %" in chosen and chosen.endswith("n/a")
    assert "a batch of up to 29 fits; up to 27 it never holds more than the margin" in text
    assert text.rstrip().endswith("\\ No newline at end of file")
    assert "\x1b[" not in text


def test_what_holds_more_than_the_margin_says_so(conf: Path) -> None:
    text = " ".join(render_fit(fitted(conf), console=console(100)).split())
    assert "with --effective 464; holds more than 19.1 GiB only while that is free" in text
    assert text.count("only while that is free") == 1


def test_why_no_more_is_relied_on_is_shown(conf: Path) -> None:
    options = PlanOptions(model="x", gpu_memory="24GB", margin=0.95)
    doubtful = plans.toy_maker(caveats=("its sizes depend on data",))
    fit = fit_config(conf, options, make_forecast=doubtful)
    text = " ".join(render_fit(fit, console=console(100)).split())
    assert "; the margin is not fully used: a margin of 95 % spares 5 %, and its sizes depend on data" in text


def test_measured_time_is_shown(conf: Path) -> None:
    text = render_fit(fitted(conf, seconds=lambda batch, checkpointing: 0.1), console=console(100))
    assert "the shortest step that was measured" in text
    assert "100 ms" in text


def test_nothing_to_change_and_nothing_that_can_be_written(conf: Path) -> None:
    fit = dataclasses.replace(fitted(conf), edits=())
    assert "Nothing to change" in render_fit(fit, console=console())
    fit = dataclasses.replace(fit, unwritable=BadInput("no place for it"))
    text = render_fit(fit, console=console())
    assert "this suggestion cannot be written:\n- no place for it" in text
    assert "Nothing to change" not in text


def test_a_diff_is_coloured_on_a_terminal_and_harmless_there(conf: Path) -> None:
    path = conf / "config.yaml"
    path.write_bytes(path.read_bytes().replace(b"# per device", "# per \u202edevice".encode()))
    fit = fitted(conf)
    text = render_fit(fit, console=console(100, colour=True))
    assert "\x1b[32m+  batch_size: 16" in text
    assert "\u202e" not in text


def test_a_line_of_the_diff_is_never_cut_or_wrapped(conf: Path) -> None:
    path = conf / "config.yaml"
    long = b"# per device, and " + b"ever so much " * 12 + b"more"
    path.write_bytes(path.read_bytes().replace(b"# per device", long))
    fit = fitted(conf)
    text = render_fit(fit, console=console(60))
    assert (
        f"\n-  batch_size: 4          {long.decode()}\n+  batch_size: 16          {long.decode()}\n" in text
    )


def test_the_chosen_batch_is_shown_for_every_stage(conf: Path) -> None:
    for name in ("03_stage", "04_stage"):
        (conf / "curriculum" / f"{name}.yaml").write_text("n_positives: 16\nn_negatives: 8\n")
    text = " ".join(render_fit(fitted(conf), console=console()).split())
    assert "largest batch by stage: 01_stage 13.1 GiB (58 %), 02_stage to 04_stage " in text
    overview = " ".join(render_overview(shown(conf), console=console()).split())
    assert "n_negatives 24 / 8 n_negatives (01_stage.yaml:3 to 04_stage.yaml:2)" in overview


def test_evaluation_says_what_it_needs(conf: Path) -> None:
    text = " ".join(render_fit(fitted(conf), console=console()).split())
    assert "evaluation: batch 16 needs " in text
    assert "it has no size of its own and uses the training batch" in text
