"""One recording by torch's profiler, started and stopped at step boundaries of the user's job.

The profiler allows one session per process.  So a recording declines if the job has a session of its own, and
stops if the job starts one while it runs: the job's profiler must not fail because the job is watched.
Events stay raw: converting a million of them into `FunctionEvent`s takes minutes, reading a few fields of
each takes a second or two.
"""

from __future__ import annotations

import os
import time
from typing import Any

from flatout.measure.lines.live_objects import live_objects, with_subclasses
from flatout.measure.patches import Patches
from flatout.measure.process.own_thread import torch_keeps_threads

_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"


class Recording:
    """A profiler session over some steps: `start()`, the steps, `stop()`."""

    def __init__(
        self, *, cpu: bool, cuda: bool, backward_only: bool = False, with_memory: bool = False
    ) -> None:
        self._cpu, self._cuda, self._backward_only = cpu, cuda, backward_only
        self._with_memory = with_memory  # events named [memory] for what the host allocates and frees
        self._patches = Patches()
        self._running = False
        self.start_ns = 0  # the first and last nanosecond of the steps, on the events' clock
        self.stop_ns = 0
        self.end_ns = 0  # when the device had finished the work of these steps

    def start(self) -> None:
        import torch
        from torch.autograd import profiler

        _refuse_beside_another()
        only_device = self._cuda and not self._cpu  # only then do events give the bytes of a copy
        session = profiler.profile(
            use_cpu=self._cpu,
            use_device="cuda" if self._cuda else None,
            use_kineto=True,
            profile_memory=self._with_memory,
            experimental_config=torch._C._profiler._ExperimentalConfig(
                expose_kineto_event_metadata=only_device
            ),
        )
        config = session.config(create_trace_id=True)
        scope = torch._C._profiler.RecordScope
        enable: Any = torch._C._autograd._enable_profiler  # its stub lacks the scopes
        scopes = {scope.BACKWARD_FUNCTION, scope.USER_SCOPE} if self._backward_only else set()
        if self._cuda:
            torch.cuda.synchronize()
        # The tracer reads its log level once, on first use, and otherwise prints to the job's stderr.
        quiet = _LOG_LEVEL not in os.environ
        if quiet:
            os.environ[_LOG_LEVEL] = _SILENT
        try:
            with torch_keeps_threads():
                torch._C._autograd._prepare_profiler(config, session.kineto_activities)
                enable(config, session.kineto_activities, scopes)
        finally:
            if quiet:
                os.environ.pop(_LOG_LEVEL, None)
        self._running = True
        profiler._set_is_profiler_enabled(True)
        self._step_aside_for(profiler.profile)
        self.start_ns = time.time_ns()

    def stop(self) -> list[Any]:
        """Return the events and restore the state from before `start`."""
        import torch

        self.stop_ns = time.time_ns()
        self._patches.undo()
        if not self._running:
            raise RuntimeError("the job started a profiler of its own during the recording")
        if self._cuda:
            torch.cuda.synchronize()
        self.end_ns = time.time_ns()
        return list(self._end().events())

    def _end(self) -> Any:
        import torch
        from torch.autograd import profiler

        self._running = False
        try:
            return torch._C._autograd._disable_profiler()
        finally:
            profiler._set_is_profiler_enabled(False)

    def _step_aside_for(self, session_type: Any) -> None:
        prepare = session_type._prepare_trace

        def prepare_after_ours(session: Any) -> Any:
            if self._running:
                self._end()
            return prepare(session)

        self._patches.replace(session_type, "_prepare_trace", prepare_after_ours)


def leave_in_child() -> None:
    """Stop recording in a process that was forked during a recording: it would never end there."""
    import torch

    clear: Any = torch._C._autograd._clear_callbacks  # type: ignore[attr-defined]
    clear()


def _refuse_beside_another() -> None:
    import torch.profiler
    from torch.autograd import profiler

    busy = profiler._is_profiler_enabled or any(
        # A scheduled profiler that warms up has claimed the tracer without being enabled.
        candidate.current_action is not torch.profiler.ProfilerAction.NONE
        and getattr(candidate, "profiler", None) is not None
        and candidate.profiler.kineto_results is None
        for candidate in live_objects(with_subclasses(torch.profiler.profile))
    )
    if busy:
        raise RuntimeError("the job runs a profiler of its own")
