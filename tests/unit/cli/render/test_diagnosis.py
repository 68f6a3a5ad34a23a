"""The diagnosis in the terminal: every part is there, nothing overflows, nothing injects."""

from __future__ import annotations

import dataclasses
import io
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rich.console import Console

from flatout.cli.render.diagnosis import LOOKS, render
from flatout.doctor.examine import Diagnosis
from flatout.doctor.rule import all_rules
from flatout.measure import PHASES
from flatout.measure.evidence import ArmNotRun, Counterfactual
from flatout.measure.run.step_blocks.schedule import ENDED_FIRST, NO_TIME
from tests.support import doctor as builders


def show(diagnosis: Diagnosis, *, width: int = 80, color: bool = False) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=color, highlight=False)
    return render(diagnosis, console=console)


def flowing(text: str) -> str:
    """Without the line breaks that the width put in."""
    return " ".join(text.split())


def test_the_headline_names_the_job_the_device_and_the_step() -> None:
    lines = show(builders.diagnosis()).splitlines()
    assert lines[0] == "darkroom/train.py --batch-size 512"
    assert lines[1] == "NVIDIA H200 · step 8.62 s (mean of 9 steps, 54 observed)"


def test_the_phase_bar_is_as_long_as_the_screen_and_split_by_shares() -> None:
    lines = show(builders.diagnosis()).splitlines()
    bar = next(line for line in lines if LOOKS["backward"][0] * 10 in line)
    assert len(bar) == 80
    assert abs(bar.count(LOOKS["backward"][0]) - 80 * 4.9 / 8.6) < 1
    text = show(builders.diagnosis())
    for phase in PHASES:
        assert re.search(rf"\S {phase} [\d.]+ %", text), phase


def test_the_counterfactuals_are_said_in_words() -> None:
    text = flowing(show(builders.diagnosis()))
    assert "on cached batches: 1.04× [1.02, 1.07] measured — the loader costs 4 % of the step" in text
    assert "on half the batch: a step takes 0.52 [0.51, 0.53] of the full one — bound by work per" in text


def test_the_table_has_place_share_ceiling_and_fix() -> None:
    text = show(builders.diagnosis(), width=130)
    assert re.search(r"FO302 row-indexing-in-loop +64 % +3\.40× measured +Gather all rows", text)
    assert re.search(r"darkroom/data\.py:93 +\[1\.02, 1\.07\]", text)
    assert re.search(r"FO701 graph-retained-across-steps +n/a +n/a +Append", text)


def test_each_finding_is_explained_in_rank_order() -> None:
    text = show(builders.diagnosis())
    places = [text.index(f"{i}. {finding.code} ") for i, finding in enumerate(builders.findings(), start=1)]
    assert places == sorted(places)
    for finding in builders.findings():
        assert finding.message in flowing(text)
        for line in finding.evidence:
            assert f"- {line}" in flowing(text)


def test_what_is_missing_and_where_evidence_lies_are_said() -> None:
    text = show(builders.diagnosis())
    assert "not measured:\n- worker memory: psutil could not read /proc of worker 1" in text
    assert text.endswith("Evidence: evidence.json\n")


def test_ranks_are_shown_only_where_there_are_several() -> None:
    many = flowing(show(builders.diagnosis(evidence=builders.evidence(ranks=builders.ranks()))))
    assert "rank step wait transfer forward backward optim. rest" in many
    assert (
        "Rank 1 on node-b is the straggler: outside backward and the optimizer it takes 1.25× the median"
        in many
    )
    alone = show(builders.diagnosis(evidence=builders.evidence(ranks=builders.ranks()[:1])))
    assert "straggler" not in alone
    assert "rank" not in alone


def test_of_many_ranks_those_with_most_work_of_their_own_are_shown() -> None:
    slow, *_ = builders.ranks()
    ranks = tuple(dataclasses.replace(slow, rank=number) for number in range(512))
    ranks = (*ranks[:-1], dataclasses.replace(builders.ranks()[1], rank=511))
    text = show(builders.diagnosis(evidence=builders.evidence(ranks=ranks)))
    assert "Of 512 ranks, these do the most work on their own" in text
    assert re.search(r"^ *511 ", text, flags=re.MULTILINE)
    assert not re.search(r"^ *510 ", text, flags=re.MULTILINE)


def test_no_findings_says_what_was_checked_and_what_bounds_the_step() -> None:
    text = flowing(show(builders.diagnosis(findings=(), evidence=builders.cpu_evidence())))
    assert f"No findings: {len(all_rules())} rules" in text
    assert "checked: 9 timed steps, the loader" in text
    assert "Most of the step is backward: 57 %." in text


@pytest.mark.parametrize(("missing", "where"), [((), "here"), (("counterfactuals",), "in what was measured")])
def test_no_findings_reach_as_far_as_the_measurement(missing: tuple[str, ...], where: str) -> None:
    evidence = dataclasses.replace(builders.cpu_evidence(), missing=missing)
    text = flowing(show(builders.diagnosis(findings=(), evidence=evidence)))
    assert f"rules found nothing that costs time {where}." in text


def test_no_findings_are_no_praise_where_the_loader_was_measured_to_cost_time() -> None:
    """Two workers on two cores that cannot keep up: no line is at fault, and three quarters are lost."""
    cached = dataclasses.replace(
        builders.counterfactuals()[0], speedup=4.0, speedup_low=2.8, speedup_high=5.7
    )
    evidence = builders.cpu_evidence(counterfactuals=(cached,))
    text = flowing(show(builders.diagnosis(findings=(), evidence=evidence)))
    assert "found nothing that costs time" not in text
    assert "names a line, but the step waits for the loader 4 % of its time" in text


def test_a_job_that_only_warmed_up_is_not_called_clean() -> None:
    steps = tuple(dataclasses.replace(step, arm="warmup") for step in builders.cpu_evidence().steps[:2])
    evidence = dataclasses.replace(builders.bare_evidence(), steps=steps)
    text = show(Diagnosis(evidence=evidence, findings=()))
    assert evidence.step_s is not None
    assert "Nothing could be examined." in text
    assert "No findings" not in text


def test_a_job_without_a_step_claims_nothing() -> None:
    text = show(Diagnosis(evidence=builders.bare_evidence(), findings=()))
    assert "No step was measured." in text
    assert "crashed before the diagnosis was complete: ValueError: no data" in text
    assert "No findings" not in text
    assert "step n/a" in text


def test_a_pipe_gets_no_colour_codes_and_a_terminal_does() -> None:
    assert "\x1b" not in show(builders.diagnosis())
    assert "\x1b[" in show(builders.diagnosis(), color=True)


def test_text_of_the_job_is_neither_markup_nor_terminal_code() -> None:
    evidence = builders.evidence(
        job=builders.job(command=("[bold]x[/bold]", "\x1b[31mred\x07")), missing=("[red]y",)
    )
    text = show(Diagnosis(evidence=evidence, findings=builders.hostile_findings()))
    assert "[bold]x[/bold]" in text
    assert "[red]y" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text


@given(width=st.integers(min_value=60, max_value=200))
def test_no_line_is_wider_than_the_screen_or_ends_in_spaces(width: int) -> None:
    evidence = builders.evidence(ranks=builders.ranks() if width >= 70 else ())
    for findings in (builders.findings(), builders.hostile_findings()):
        for line in show(builders.diagnosis(evidence=evidence, findings=findings), width=width).splitlines():
            assert len(line) <= width
            assert line == line.rstrip()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_word_of_a_fix_is_lost(width: int) -> None:
    text = show(builders.diagnosis(), width=width)
    for finding in builders.findings():
        for word in re.findall(r"[a-z]{4,14}", finding.fix):
            assert word in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_map_is_a_list_of_bars(width: int) -> None:
    text = show(builders.diagnosis(evidence=builders.with_map()), width=width)
    title, *bars = text.partition("Your code, ")[2].partition("\n\n")[0].splitlines()
    assert title == "by block: what a step of 8.62 s takes without it"
    assert all(len(line) <= width for line in bars)
    outer, inner, other = bars
    assert "model.py:57-62 " in outer
    assert "model.py:60-61 " in inner
    assert outer.count("█") > inner.count("█") > other.count("█")
    assert outer.rstrip().endswith("43.0× [38.7, 47.3]")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_block_within_the_noise_has_no_bar_and_no_figure(width: int) -> None:
    block = builders.knocked_out(builders.SYNC_LINE, last_line=55, step_s=8.0)
    text = show(builders.diagnosis(evidence=builders.evidence(counterfactuals=(block,))), width=width)
    _title, line = text.partition("Your code, ")[2].partition("\n\n")[0].splitlines()
    assert line.rstrip().endswith("noise [0.97, 1.18]")
    assert "█" not in line


def test_a_long_map_shows_the_blocks_that_cost_most() -> None:
    def block(line: int, step_s: float) -> Counterfactual:
        return builders.knocked_out(
            dataclasses.replace(builders.SYNC_LINE, line=line), last_line=line, step_s=step_s
        )

    dear = [block(line, 4.0 + line / 100) for line in range(1, 8)]
    noise = [block(line, 8.0) for line in range(20, 30)]
    late = block(99, 5.0)
    text = show(builders.diagnosis(evidence=builders.evidence(counterfactuals=(*dear, *noise, late))))
    _title, *lines = text.partition("Your code, ")[2].partition("\n\n")[0].splitlines()
    assert len(lines) == 8 and "noise" not in "".join(lines) and ":99" in lines[-1]


def test_a_job_that_was_too_noisy_is_not_said_to_be_healthy() -> None:
    (found, *_others) = builders.counterfactuals()
    wide = dataclasses.replace(found, speedup=1.0, speedup_low=0.5, speedup_high=2.0)
    noisy = builders.diagnosis(findings=(), evidence=builders.cpu_evidence(counterfactuals=(wide,)))
    assert "No findings, but steps vary too much to tell" in flowing(show(noisy))


def test_a_job_that_no_cause_could_be_looked_for_in_is_told_how_long_to_run() -> None:
    evidence = builders.cpu_evidence(
        counterfactuals=(), missing=("count: no time was left for this pass",), sites=(), module_calls=()
    )
    text = flowing(show(builders.diagnosis(findings=(), evidence=evidence)))
    assert "Too little was measured to find a cause" in text
    assert re.search(r"Try --seconds \d+\.", text)
    assert "No findings" not in text


@pytest.mark.parametrize("found", [False, True])
def test_arms_that_the_job_ended_before_are_counted(found: bool) -> None:
    ended = ArmNotRun(kind="cached", label="cached", reason=ENDED_FIRST)
    evidence = builders.cpu_evidence(arms_not_run=(ended, ended))
    options = {} if found else {"findings": ()}
    text = flowing(show(builders.diagnosis(evidence=evidence, **options)))
    assert "The job ended before 2 arms could be measured. Give it more steps or epochs." in text


def test_arms_that_the_time_did_not_suffice_for_are_counted() -> None:
    left_out = ArmNotRun(kind="cached", label="cached", reason=NO_TIME)
    evidence = builders.cpu_evidence(arms_not_run=(left_out, left_out))
    text = flowing(show(builders.diagnosis(findings=(), evidence=evidence)))
    assert "No time was left for 2 arms: try --seconds" in text
