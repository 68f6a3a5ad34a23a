from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, schedule

from flatout.measure.device.recording import Recording

# torch 2.11 warns where events of several cycles are not kept
THEIRS: Any = {"activities": [ProfilerActivity.CPU], "acc_events": True}


def names(events: list[object]) -> set[str]:
    return {event.name() for event in events}  # type: ignore[attr-defined]


def test_it_records_between_start_and_stop() -> None:
    recording = Recording(cpu=True, cuda=False)
    torch.ones(3).cos()
    recording.start()
    torch.ones(3).sin()
    events = recording.stop()
    torch.ones(3).tan()
    assert "aten::sin" in names(events)
    assert not names(events) & {"aten::cos", "aten::tan"}
    starts = [event.start_ns() for event in events]
    slack_ns = 1_000_000  # the tracer converts its clock
    assert recording.start_ns - slack_ns <= min(starts)
    assert max(starts) - slack_ns <= recording.stop_ns <= recording.end_ns


def test_only_backward_nodes_where_asked() -> None:
    recording = Recording(cpu=True, cuda=False, backward_only=True)
    x = torch.ones(3, requires_grad=True)
    recording.start()
    x.sin().sum().backward()
    recorded = names(recording.stop())
    assert "SinBackward0" in recorded
    assert not any(name.startswith("aten::") for name in recorded)


def test_everything_is_restored() -> None:
    before = profiler.profile._prepare_trace
    environment = dict(os.environ)
    recording = Recording(cpu=True, cuda=False)
    recording.start()
    recording.stop()
    assert profiler.profile._prepare_trace is before
    assert not profiler._is_profiler_enabled
    assert dict(os.environ) == environment
    with torch.profiler.profile(**THEIRS) as theirs:
        torch.ones(3).sin()
    assert any(event.key == "aten::sin" for event in theirs.key_averages())


def test_it_declines_beside_the_jobs_own_profiler() -> None:
    with (
        torch.profiler.profile(**THEIRS) as theirs,
        pytest.raises(RuntimeError, match="profiler of its own"),
    ):
        Recording(cpu=True, cuda=False).start()
    assert theirs.profiler is not None


def test_it_declines_while_the_jobs_profiler_warms_up() -> None:
    plan = schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(**THEIRS, schedule=plan) as theirs:
        with pytest.raises(RuntimeError, match="profiler of its own"):
            Recording(cpu=True, cuda=False).start()
        theirs.step()
        torch.ones(3).sin()
        theirs.step()
    assert any(event.key == "aten::sin" for event in theirs.key_averages())


def test_a_finished_profiler_of_the_job_does_not_matter() -> None:
    with torch.profiler.profile(**THEIRS) as theirs:
        torch.ones(3).sin()
    recording = Recording(cpu=True, cuda=False)
    recording.start()
    torch.ones(3).cos()
    assert "aten::cos" in names(recording.stop())
    assert theirs.profiler is not None


def test_it_steps_aside_for_a_profiler_the_job_starts() -> None:
    recording = Recording(cpu=True, cuda=False)
    recording.start()
    with torch.profiler.profile(**THEIRS) as theirs:
        torch.ones(3).sin()
    with pytest.raises(RuntimeError, match="during the recording"):
        recording.stop()
    assert any(event.key == "aten::sin" for event in theirs.key_averages())


def test_the_tracer_prints_nothing_into_the_jobs_output() -> None:
    program = """
        import torch
        from flatout.measure.device.recording import Recording
        recording = Recording(cpu=True, cuda=False)
        recording.start()
        torch.ones(3).sin()
        recording.stop()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
