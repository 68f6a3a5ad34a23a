from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from flatout.measure.clock import BACKWARD, FORWARD, OPTIMIZER, Clock
from flatout.measure.loading.workers import LOG
from flatout.measure.run.passes import Passes
from flatout.measure.user_code import UserCode

HERE = Path(__file__)


@pytest.fixture
def passes() -> Passes:
    return Passes(UserCode(str(HERE.parent)), Clock())


def train(num_steps: int, passes: Passes) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        rows = [torch.tensor([float(i)] * 4) for i in range(5)]
        model(torch.stack(rows)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        passes.step_end()


@pytest.mark.parametrize("arm", ["stacks", "count", "attribution", "kernels", "memory"])
def test_a_pass_leaves_nothing_on_when_it_ends(passes: Passes, arm: str) -> None:
    if arm == "attribution":
        passes.begin("count", "cpu")
        passes.end("count", [0.1])
    before = torch.compiler.get_stance() if hasattr(torch.compiler, "get_stance") else None
    passes.begin(arm, "cpu")
    assert bool(_get_current_function_mode_stack()) == (arm in ("count", "attribution"))
    train(2, passes)
    passes.end(arm, [0.1, 0.1])
    assert passes.missing == []
    assert passes.module_calls is None
    assert _get_current_function_mode_stack() == []
    assert LOG.profile is None
    assert not torch.autograd.profiler._is_profiler_enabled
    assert before is None or torch.compiler.get_stance() == before  # type: ignore[attr-defined]


def test_each_pass_brings_its_evidence(passes: Passes) -> None:
    arms: tuple[str, ...] = ("stacks", "count", "kernels", "attribution", "memory")
    for arm in arms:
        passes.begin(arm, "cpu")
        train(2, passes)
        passes.end(arm, [0.25, 0.75])
    assert passes.sites is not None and passes.modules is not None and passes.kernels is not None
    (site,) = [site for site in passes.sites.evidence(None) if site.kind == "create" and site.op == "tensor"]
    assert site.calls_per_step == 5
    assert passes.modules.num_steps == 2
    assert (passes.kernels.num_steps, passes.kernels.step_s) == (2, 0.5)
    assert passes.attributed_step_s == 0.5
    assert passes.backward_costs is not None
    assert passes.memory is not None


def test_a_step_with_an_evaluation_in_it_is_attributed_to_no_line(passes: Passes) -> None:
    """Else a line of the training step would hold a tenth of what it costs."""
    for arm, usual in (("count", (0, 1)), ("attribution", (1,))):
        passes.begin(arm, "cpu")
        train(2, passes)
        if passes.sites is not None and arm == "attribution":
            forward = next(region for _step, region in passes.sites.called_s)
            passes.sites.called_s[0, forward] += 9.0
        passes.end(arm, [9.25, 0.25], usual_steps=usual)
    assert passes.attributed_step_s == 0.25
    assert 0 < sum(passes.attributed_calls_s.values()) < 9
    assert passes.sites is not None and passes.sites.usual_steps == (1,)


def test_phases_in_which_ranks_meet_besides_backward_are_noted(passes: Passes) -> None:
    passes.begin("count", "cpu")
    assert passes.sites is not None
    for region in (FORWARD, BACKWARD, OPTIMIZER):
        passes.clock.enter(region)
        passes.sites.note_call("all_gather_into_tensor", sys._getframe(), "cpu", 0.0)
        passes.clock.leave()
    passes.end("count", [0.1])
    assert passes.evidence()["meets_in"] == ("forward",)
    assert passes.found_sites() == ()


@pytest.mark.parametrize("arms", [("count", "stacks"), ("stacks", "count")])
def test_lines_of_the_loss_are_known_whichever_pass_comes_first(
    passes: Passes, arms: tuple[str, ...]
) -> None:
    weight = torch.ones(400, 400, requires_grad=True)
    for arm in arms:
        passes.begin(arm, "cpu")
        for _ in range(20):
            (weight @ weight @ weight @ weight).sum()
        passes.step_end()
        passes.end(arm, [0.1])
    assert passes.stacks is not None and passes.stacks.differentiable
    assert all(place.file == HERE.name for place in passes.stacks.differentiable)


def test_an_instrument_that_fails_is_left_out_and_named(passes: Passes) -> None:
    with torch.profiler.profile(acc_events=True):  # the job's own: ours must not take it away
        passes.begin("kernels", "cpu")
        passes.end("kernels", [0.1])
    assert passes.kernels is None
    assert len(passes.missing) == 1
    assert passes.missing[0].startswith("kernels: the instrument failed: ")


def test_ending_a_pass_that_never_began_does_nothing(passes: Passes) -> None:
    arms: tuple[str, ...] = ("real", "stacks", "count", "attribution", "kernels", "memory", "cached")
    for arm in arms:
        passes.end(arm, [])
    assert passes.missing == []


def test_a_mode_the_script_took_off_is_said(passes: Passes) -> None:
    from flatout.measure.lines.function_modes import remove_mode

    passes.begin("count", "cpu")
    assert remove_mode(passes.sites)
    passes.end("count", [0.1])
    assert "removed the counting mode" in passes.missing[0]


def test_a_process_forked_inside_a_pass_takes_the_modes_off(passes: Passes) -> None:
    passes.begin("count", "cpu")
    passes.leave_in_child()
    assert _get_current_function_mode_stack() == []
    passes.end("count", [0.1])


def test_a_process_forked_while_stacks_are_sampled_switches_threads_as_before(passes: Passes) -> None:
    before_s = sys.getswitchinterval()
    passes.begin("stacks", "cpu")
    assert sys.getswitchinterval() < before_s
    passes.leave_in_child()
    assert sys.getswitchinterval() == before_s
    passes.end("stacks", [0.1])


@pytest.mark.parametrize("arm", ["kernels", "attribution"])
def test_a_process_forked_inside_a_recording_records_nothing(passes: Passes, arm: str) -> None:
    """A worker that lives on would keep every operator that it calls."""
    passes.begin("count", "cpu")
    passes.end("count", [0.1])
    passes.begin(arm, "cpu")
    passes.leave_in_child()
    train(2, passes)
    recorder = passes._kernel_recorder if arm == "kernels" else passes.backward_costs
    assert recorder is not None
    assert {event.name() for event in recorder._recording.stop()} <= {"flatout::training thread"}
    passes.end(arm, [0.1])


def test_compiled_code_runs_eagerly_inside_a_pass_and_as_before_after_it(passes: Passes) -> None:
    import torch._dynamo
    from torch._dynamo import eval_frame

    before = eval_frame._stance.stance
    passes.begin("count", "cpu")
    assert eval_frame._stance.stance == "force_eager"
    passes.end("count", [0.1])
    assert eval_frame._stance.stance == before
    assert sys.modules["torch._dynamo"] is torch._dynamo


@pytest.mark.parametrize("arm", ["count", "memory"])
def test_no_mode_is_put_on_inside_a_function_that_is_compiled(passes: Passes, arm: str) -> None:
    """Its graphs have guards on the modes, and its end takes the dispatch keys of the thread back."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = nn.Linear(4, 2)
    begun: list[str] = []

    @torch.compiler.disable
    def step_end() -> None:
        if begun:
            passes.end(arm, [0.1])
        else:
            begun.append(arm)
            passes.begin(arm, "cpu")

    def step() -> None:
        model(torch.ones(3, 4)).sum().backward()
        step_end()

    compiled = torch.compile(step, backend="eager")
    for _ in range(3):
        compiled()
        assert _get_current_function_mode_stack() == []
    (reason,) = passes.missing
    assert reason.startswith(f"{arm}: the step ends inside a function that torch.compile compiles")
    assert counters["stats"]["unique_graphs"] == 1


def test_a_stance_that_cannot_be_set_is_no_error_of_the_job(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stance: str) -> None:
        raise RuntimeError("attempted to set_stance in a torch.compile region")

    import torch._dynamo

    monkeypatch.setattr(torch.compiler, "set_stance", refuse)
    passes.begin("count", "cpu")
    passes.end("count", [0.1])
    (words,) = passes.missing
    assert words.startswith("count: the instrument failed: RuntimeError: attempted to set_stance")
