"""Which lines build a batch by concatenating arrays: count calls while one batch is made.

`sys.setprofile` sees every call of the data path, NumPy's and torch's, in a worker process as well as in the
main one.  It is on for a single batch, which is never timed.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import CodeType, FrameType
from typing import Any

from flatout.measure.evidence import Call, Place
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode

GLUE = {
    "concatenate", "stack", "vstack", "hstack", "dstack", "column_stack", "append", "pad", "tile",
    "repeat", "cat", "concat", "tensor", "as_tensor", "from_numpy", "array", "insert",
}  # fmt: skip

MODE = "__torch_function__"


class CallProfile:
    """Counts calls of NumPy and torch that lines of the user's code make directly."""

    def __init__(self, user_code: UserCode) -> None:
        self.user_code = user_code
        self.counts: Counter[tuple[str, Place, bool]] = Counter()
        self.in_collate = False
        self._libraries: dict[CodeType, str | None] = {}
        self._running = False
        self._mode: Any = None
        self._patches = Patches()

    def start(self) -> None:
        """Start, unless the job has a profiler of its own: cProfile could not be restored."""
        from flatout.measure.lines.array_lists import ArrayLists
        from flatout.measure.lines.counted_calls import count_creations

        self._running = sys.getprofile() is None
        if self._running:
            count_creations(self._note_creation, self._patches)
            self._mode = ArrayLists(lambda function: self._count(function, sys._getframe(1)))
            self._mode.__enter__()
            sys.setprofile(self._event)

    def stop(self) -> None:
        if self._running:
            sys.setprofile(None)
            self._running = False
            self._patches.undo()
            if self._mode is not None:
                self._mode.__exit__(None, None, None)

    def calls(self) -> tuple[Call, ...]:
        return tuple(
            Call(function=function, place=place, in_collate=in_collate, calls_per_batch=float(count))
            for (function, place, in_collate), count in self.counts.most_common(40)
        )

    def _note_creation(self, name: str, args: Any, _tensor: Any, frame: FrameType, _spent_s: float) -> None:
        """Count `torch.LongTensor` of a list of arrays, which neither the mode nor the profile sees."""
        from flatout.measure.lines.array_lists import OF_ARRAYS, of_arrays

        if of_arrays(name, args):
            self._count(f"torch.{name}{OF_ARRAYS}", frame)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_name == MODE:
            return  # a mode calls what the user's line called
        if event == "c_call":
            name = getattr(argument, "__name__", "")
            if name in GLUE:
                library = _library_of(argument)
                if library is not None:
                    self._count(f"{library}.{name}", frame)
        elif event == "call" and frame.f_code.co_name in GLUE and frame.f_back is not None:
            library = self._library_of_code(frame.f_code)
            if library is not None:
                self._count(f"{library}.{frame.f_code.co_name}", frame.f_back)

    def _count(self, function: str, caller: FrameType) -> None:
        place, via = self.user_code.place(caller)
        if place is not None and via is None:
            self.counts[(function, place, self.in_collate)] += 1

    def _library_of_code(self, code: CodeType) -> str | None:
        if code not in self._libraries:
            path = code.co_filename.replace("\\", "/")
            self._libraries[code] = next(
                (library for library in ("numpy", "torch") if f"/{library}/" in path), None
            )
        return self._libraries[code]


def _library_of(function: Any) -> str | None:
    """Return the package of a C function; torch's functions carry it on the class they are bound to."""
    module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
    root = str(module).partition(".")[0]
    owner = type(getattr(function, "__self__", None)).__name__
    if root == "torch" or owner.startswith("_VariableFunctions"):
        return "torch"
    return "numpy" if root == "numpy" else None
