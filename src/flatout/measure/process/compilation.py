"""What torch.compile does during the job, from dynamo's own records.

Dynamo records every compilation with its time and, if it is not a function's first, the guard that failed; it
records every graph break with the user's stack.  Both are read when steps end: nothing of ours is inside a
compiled region.  Steps of arms are excluded, since half a batch recompiles because of us.

After eight compilations a function runs uncompiled, with a warning that is easily missed.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flatout.measure.evidence import Compilation, CompiledFunction, GraphBreak, Place
from flatout.measure.user_code import UserCode

LOOKED_AT = ("warmup", "real")
GAVE_UP = "recompile limit exceeded"
MOST_REASONS = 3
MOST_FUNCTIONS = 20
# The backward pass is compiled apart from the forward pass, and an optimizer's step apart from both.
NOT_THE_USERS = ("Unsupported Tensor.backward()",)
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")
_EXPLAINED = re.compile(r"Explanation: (.+?)(?:\.`?(?= [A-Z])|\.?$)", re.MULTILINE)  # its first sentence
_WHERE = re.compile(r"# \S+?:(\d+) in \w+")


@dataclass(slots=True)
class _Function:
    name: str | None = None
    file: str | None = None
    line: int = 0
    compiled: int = 0
    recompiled: int = 0
    compile_s: float = 0.0
    late_s: float = 0.0
    late_steps: set[int] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)
    guard_lines: Counter[int] = field(default_factory=Counter)
    gave_up: bool = False


class CompilationWatch:
    """Reads dynamo's records step by step."""

    def __init__(self, user_code: UserCode) -> None:
        self._user_code = user_code
        self._functions: dict[str, _Function] = {}  # by dynamo's frame number
        self._breaks: Counter[tuple[Place, str]] = Counter()
        self._last: Any = None
        self._num_breaks = 0
        self.num_steps = 0

    def step_end(self, label: str) -> bool:
        """Read the records after a step with this label; return whether anything was compiled in it."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        self.num_steps += label == "real"
        if dynamo is None:
            return False
        records, new = dynamo._compilation_metrics, []
        if records and records[-1] is not self._last:
            new = self._new(records)
            self._last = records[-1]
            for record in new if label in LOOKED_AT else ():
                self._note(record, late=label == "real")
        reasons = dynamo.graph_break_reasons
        if len(reasons) != self._num_breaks:
            self._num_breaks = min(self._num_breaks, len(reasons))  # the job may reset dynamo
            for reason in reasons[self._num_breaks :] if label in LOOKED_AT else ():
                self._note_break(reason)
            self._num_breaks = len(reasons)
        return bool(new)

    def _new(self, records: Iterable[Any]) -> list[Any]:
        new: list[Any] = []
        for record in records:
            new.append(record)
            if record is self._last:
                new = []
        return new

    def _note(self, record: Any, *, late: bool) -> None:
        frame = str(record.compile_id).partition("/")[0]
        if record.compile_id is None:
            return
        function = self._functions.setdefault(frame, _Function())
        if record.co_name is not None:
            function.name, function.file = record.co_name, record.co_filename
            function.line = record.co_firstlineno or 0
            function.compiled += 1
        seconds = ((record.end_time_us or 0) - (record.start_time_us or 0)) / 1e6
        function.compile_s += seconds
        if record.recompile_reason is not None:
            reason, line = _read(record.recompile_reason)
            function.recompiled += record.co_name is not None
            function.reasons[reason] += 1
            if line is not None:
                function.guard_lines[line] += 1
            if late:
                function.late_s += seconds
                function.late_steps.add(self.num_steps)
        function.gave_up |= GAVE_UP in (record.fail_reason or "")

    def _note_break(self, reason: Any) -> None:
        frames = [frame for frame in reason.user_stack if self._is_user(frame.filename)]
        if not frames or frames[-1] is not reason.user_stack[-1]:
            return  # a library's own, as in every optimizer's step
        words = reason.reason.partition("\n")[0].strip()
        if words.startswith(NOT_THE_USERS):
            return
        explained = _EXPLAINED.search(reason.reason)
        place = self._user_code.place_at(
            frames[-1].filename, line=frames[-1].lineno, function=frames[-1].name
        )
        self._breaks[place, explained[1].replace("`", "") if explained else _plain(words)] += 1

    def _is_user(self, file: str) -> bool:
        return self._user_code.is_user_file(file)

    def evidence(self, *, steps_s: float) -> Compilation | None:
        """Return what was compiled, or None; `steps_s` is the total of all real steps."""
        if not self._functions:
            return None
        functions = sorted(self._functions.values(), key=lambda each: (-each.late_s, -each.compile_s))
        return Compilation(
            functions=tuple(self._function(each) for each in functions[:MOST_FUNCTIONS]),
            breaks=tuple(
                GraphBreak(place=place, reason=reason, times=times)
                for (place, reason), times in self._breaks.most_common()
            ),
            num_steps=self.num_steps,
            steps_s=steps_s,
        )

    def _function(self, found: _Function) -> CompiledFunction:
        name = found.name or "a function"
        resumed = _RESUMED.match(name)
        place = None
        if found.file is not None and self._is_user(found.file):
            line = found.guard_lines.most_common(1)[0][0] if found.guard_lines else found.line
            place = self._user_code.place_at(found.file, line=line, function=resumed[1] if resumed else name)
        return CompiledFunction(
            function=resumed[1] if resumed else name,
            place=place,
            num_compiled=found.compiled,
            num_recompiled=found.recompiled,
            compile_s=found.compile_s,
            late_s=found.late_s,
            num_late_steps=len(found.late_steps),
            reasons=tuple(reason for reason, _ in found.reasons.most_common(MOST_REASONS)),
            gave_up=found.gave_up,
        )


def _read(reason: str) -> tuple[str, int | None]:
    """Split a reason into the guard that failed and its line, if dynamo names one."""
    words = reason.partition("\n")[0].partition(": ")[2] or reason
    where = _WHERE.search(words)
    guard = re.split(r"\s{2,}#|\s*\(HINT|\s# \S+:\d+ in ", words, maxsplit=1)[0].strip()
    return guard, int(where[1]) if where else None


def _plain(words: str) -> str:
    """Translate dynamo's words: `generic_jump TensorVariable()` is a branch on a tensor's value."""
    return "a branch depends on a tensor's value" if words.startswith("generic_jump") else words
