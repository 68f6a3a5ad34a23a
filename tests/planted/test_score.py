"""The doctor's score, and the scorer's own honesty: it must see a miss, a wrong line and a wrong rule."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flatout.doctor.finding import Finding
from flatout.doctor.rule import all_rules
from flatout.measure.evidence import Evidence, Host, ObservedJob, Place
from flatout.measure.evidence_file import save_evidence

PLANTED = Path(__file__).resolve().parent


def load_scorer() -> ModuleType:
    """The scoring command is a script beside this file, not a package."""
    specification = importlib.util.spec_from_file_location("planted_score", PLANTED / "score.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


score = load_scorer()
CASES = score.cases()
# Live runs that `make test` has time for, one of each kind of arm; `make planted` runs them all.
EVERY = os.environ.get("FLATOUT_PLANTED") == "all"
QUICK = ("batch_of_one_forwards", "blocking_checkpoint", "row_indexing_in_loop")


def is_chosen(case) -> bool:
    return EVERY or case.recording is not None or case.rule in QUICK


@pytest.fixture(scope="module")
def judged():
    """Futures of all chosen cases: while one is awaited, the next is under way."""
    started = {}

    def result_of(case, chosen):
        if not started:
            started.update(zip([each.name for each in chosen], score.run_together(chosen), strict=True))
        return started[case.name].result()

    return result_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_judged_right(case, judged, request):
    """A live run is a measurement: one that is wrong is made once more, with the machine to itself."""
    if not is_chosen(case):
        pytest.skip("a live run: make planted")
    cases = [item.callspec.params["case"] for item in request.session.items if is_case(item)]
    faults = judged(case, [each for each in cases if is_chosen(each)]).faults
    if faults and case.recording is None:
        faults = score.run(case).faults
    assert faults == ()


def is_case(item: pytest.Item) -> bool:
    return item.name.startswith("test_every_case_is_judged_right") and hasattr(item, "callspec")


def test_every_rule_is_planted_and_has_a_clean_twin():
    rules = {case.rule for case in CASES} - {score.DECOYS, score.SEVERAL}
    one_process = {rule.name for rule in all_rules() if not rule.code.startswith("FO7")}
    assert {score.kebab(rule) for rule in rules} == one_process
    for rule in rules:
        planted = score.marks((PLANTED / rule / "planted.py").read_text(), rule=rule)
        clean = score.marks((PLANTED / rule / "clean.py").read_text(), rule=rule)
        assert sum(mark.required for mark in planted) >= 1
        assert sum(mark.required for mark in clean) == 0


# a GPU has yet to run these
NOT_RECORDED = {"hidden_library_sync", "misaligned_dimensions", "no_mixed_precision"}


def test_every_guilty_line_is_judged_on_a_device_where_it_counts():
    """A rule that needs a GPU is proven here by what was recorded on one."""
    recorded = {case.rule for case in CASES if case.recording is not None}
    assert not NOT_RECORDED & recorded, "recorded by now: take it off the list"
    for rule in {case.rule for case in CASES} - NOT_RECORDED - {score.DECOYS, score.SEVERAL}:
        wanted = {
            mark.device
            for mark in score.marks((PLANTED / rule / "planted.py").read_text(), rule=rule)
            if mark.required
        }
        if None not in wanted:
            recordings = [case for case in CASES if case.rule == rule and case.recording is not None]
            assert {case.script.stem for case in recordings} == {"planted", "clean"}, rule


def test_every_decoy_names_the_advice_that_is_wrong_there():
    names = {rule.name for rule in all_rules()}
    decoys = [case.script for case in CASES if case.rule == score.DECOYS]
    assert len(decoys) >= 8
    for script in decoys:
        source = script.read_text()
        wrong = set(re.findall(r"# decoy: ([a-z-]+)", source))
        assert wrong and wrong <= names, script.name
        assert not wrong & {rule for mark in score.marks(source, rule="decoys") for rule in mark.rules}


SOURCE = """import torch
for i in range(9):
    x = torch.tensor(i)  # guilty
    y = x.cuda()  # also: unpinned-host-memory, sync-in-step
    z = y.item()  # guilty on cuda
"""


@pytest.fixture
def case(tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(SOURCE)
    return score.Case(rule="tensor_created_in_loop", script=script)


def finding(name: str, line: int | None) -> Finding:
    return Finding(
        code="FO000",
        name=name,
        place=None if line is None else Place(file="planted.py", line=line),
        message="",
        evidence=(),
        share=None,
        ceiling=None,
        fix="",
        safety="exact",
    )


def test_marks_are_read():
    guilty, also, on_cuda = score.marks(SOURCE, rule="tensor_created_in_loop")
    assert (guilty.line, guilty.rules, guilty.required) == (3, ("tensor-created-in-loop",), True)
    assert (also.line, also.rules, also.required) == (4, ("unpinned-host-memory", "sync-in-step"), False)
    assert (on_cuda.line, on_cuda.device) == (5, "cuda")
    (named,) = score.marks("x = 1  # guilty: loader-bound on cuda", rule="decoys")
    assert (named.rules, named.required, named.device) == (("loader-bound",), True, "cuda")
    both = score.marks("x = 1  # guilty  # also: sync-in-step on cuda", rule="a_b")
    assert [(mark.required, mark.device) for mark in both] == [(True, None), (False, "cuda")]


def test_the_guilty_line_and_nothing_else_is_right(case):
    judged = score.judge(case, [finding("tensor-created-in-loop", 3)], device="cpu")
    assert (judged.expected, judged.exact, judged.faults) == (1, 1, ())


def test_a_line_that_counts_on_another_device_is_not_expected_here(case):
    found = [finding("tensor-created-in-loop", 3)]
    assert score.judge(case, found, device="cuda").missed == ("tensor-created-in-loop at line 5",)
    assert score.judge(case, found, device="cpu").missed == ()


def test_silence_is_a_miss(case):
    assert score.judge(case, [], device="cpu").missed == ("tensor-created-in-loop at line 3",)


def test_another_line_is_inexact_and_a_third_is_wrong(case):
    judged = score.judge(
        case, [finding("tensor-created-in-loop", 2), finding("tensor-created-in-loop", 1)], device="cpu"
    )
    assert judged.inexact == ("tensor-created-in-loop at line 2, planted at 3",)
    assert judged.wrong == ("tensor-created-in-loop at line 1",)
    assert judged.missed == ()


@pytest.mark.parametrize("line", [3, 5, None])
def test_another_rule_is_wrong(case, line):
    judged = score.judge(
        case, [finding("tensor-created-in-loop", 3), finding("sync-in-step", line)], device="cpu"
    )
    assert judged.wrong == (f"sync-in-step at line {line}",)


def test_a_rule_that_may_speak_of_a_line_is_neither_right_nor_wrong(case):
    judged = score.judge(
        case, [finding("tensor-created-in-loop", 3), finding("sync-in-step", 4)], device="cpu"
    )
    assert (judged.allowed, judged.faults) == (1, ())


def test_the_largest_cause_is_to_be_said_first(case):
    case.script.write_text(SOURCE.replace("# guilty\n", "# guilty, largest\n"))
    found = [finding("tensor-created-in-loop", 3), finding("sync-in-step", 4)]
    assert score.judge(case, found, device="cuda").first is None
    turned = score.judge(case, found[::-1], device="cpu")
    assert (turned.first, turned.faults) == ("sync-in-step at line 4", ())
    assert score.judge(case, [], device="cpu").first == "nothing"
    case.script.write_text(SOURCE.replace(", sync-in-step\n", ", largest on cuda\n"))
    marks = score.marks(case.script.read_text(), rule=case.rule)
    assert [mark.line for mark in marks if mark.largest] == [4]
    pinned = [finding("unpinned-host-memory", 4), found[0]]
    assert score.judge(case, pinned, device="cuda").first is None
    assert score.judge(case, pinned, device="cpu").first == "unpinned-host-memory at line 4"
    text = "\n".join(score.table([turned, score.judge(case, found, device="cpu")]))
    assert "top-1 cause   50.0%  (1 of 2)" in text


def test_every_script_of_several_causes_names_the_largest():
    scripts = {case.script for case in CASES if case.rule == score.SEVERAL}
    assert len(scripts) >= 10
    for script in scripts:
        found = score.marks(script.read_text(), rule=score.SEVERAL)
        for device in {mark.device for mark in found if mark.required} - {None} or {"cpu"}:
            required = [mark for mark in found if mark.required and mark.holds_on(device)]
            assert len(required) >= 2, script.name
            assert sum(mark.largest for mark in required) == 1, script.name


def test_saying_it_twice_is_wrong(case):
    assert score.judge(case, [finding("tensor-created-in-loop", 3)] * 2, device="cpu").wrong


def test_the_same_line_of_another_file_is_not_the_guilty_line(case):
    elsewhere = dataclasses.replace(
        finding("tensor-created-in-loop", 3), place=Place(file="library.py", line=3)
    )
    assert score.judge(case, [elsewhere], device="cpu").exact == 0


def recording(case, folder: Path, text: str) -> Path:
    job = ObservedJob(
        command=("planted.py",),
        folder="",
        started_at="",
        ended="measured",
        exit_code=None,
        error=None,
        device="cpu",
        device_name=None,
        python="",
        torch="",
        flatout="",
    )
    path = folder / "planted_cpu.json"
    host = Host(cores=None, memory_bytes=None)
    save_evidence(Evidence(job=job, host=host, sources={"planted.py": {"3": text}}), path)
    return path


def test_a_recording_of_another_text_is_an_error(case, tmp_path):
    fresh = recording(case, tmp_path, "    x = torch.tensor(i)")
    replayed = dataclasses.replace(case, recording=fresh)
    assert score.run(replayed).error is None
    assert score.run(replayed).missed
    stale = recording(case, tmp_path, "    x = torch.zeros(i)")
    refused = score.run(dataclasses.replace(case, recording=stale))
    assert "line 3" in refused.error
    assert refused.missed == ("tensor-created-in-loop at line 3",)


def test_a_rule_never_judged_on_its_device_is_unproven(case):
    only_on_cuda = case.script.read_text().replace("# guilty\n", "\n")
    case.script.write_text(only_on_cuda)
    judged = score.judge(case, [], device="cpu")
    assert judged.faults == ()
    assert score.unproven([judged]) == ["tensor_created_in_loop"]


def test_the_table_sums_up(case):
    right = score.judge(case, [finding("tensor-created-in-loop", 3)], device="cpu")
    bad = score.judge(case, [finding("sync-in-step", 1)], device="cpu")
    text = "\n".join(score.table([right, bad]))
    assert "precision     50.0%  (1 of 2)" in text
    assert "recall        50.0%  (1 of 2)" in text
    assert "exact line   100.0%  (1 of 1)" in text


def test_an_unknown_rule_leaves_nothing_to_score(capsys):
    assert score.main(["--only", "no_such_rule"]) == 2
    assert "nothing to score" in capsys.readouterr().err
