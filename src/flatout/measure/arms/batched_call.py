"""Steps that call a module once where the script calls it with one row at a time.

The block's first step keeps the rows that the loop passes.  In later steps the first call of the loop runs
the module on all rows at once, and each call gets its own row of the result: one forward and one backward
pass for the whole batch instead of one per row.  A real fix has no loop and never splits or joins rows.  So
the split before the loop and iterations that only ask for the next row are not timed, and `torch.cat` or
`torch.stack` of all rows gives the one result again.  If rows are used otherwise, the gradient of the first
one stands for all gradients.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from flatout.measure.arms.arm import COMPILED, DEPENDS, Arm, ArmContext
from flatout.measure.batches import arrays_of, map_arrays
from flatout.measure.clock import EXCLUDED, REST, Clock, ident, now
from flatout.measure.evidence import Place
from flatout.measure.lines.function_modes import insert_mode, remove_mode
from flatout.measure.patches import Patches
from flatout.measure.phases import has_compiled
from flatout.measure.user_code import UserCode

if TYPE_CHECKING:
    from types import CodeType

    from flatout.measure.arms.call_results import FirstRow, FollowedResults

LEAST_CALLS, LEAST_SHARE = 8, 0.1
TURN_S = 2e-5  # of an iteration that only passes on what it is given; anything beyond that is counted
LITTLE_MORE = 0.9  # of a loop's time, in such iterations: the GPU then waits for nothing else
TIME_COMES_FIRST = re.compile(r"RNN|LSTM|GRU")
SPLITS, JOINS = ("split", "unbind"), ("cat", "stack")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class OneCall(Arm):
    """One call in place of the calls that a line makes; a block's first step traces their results."""

    def __init__(self, user_code: UserCode, clock: Clock, *, place: Place, suspicion: float) -> None:
        self.label, self.place, self.suspicion = f"{self.kind} {place}", place, suspicion
        self._user_code, self._clock = user_code, clock
        self._patches = Patches()
        self._followed: FollowedResults | None = None
        self._handed_out_s = 0.0  # when the previous result was handed out
        self._turns_s = self._loop_s = 0.0  # of this step: passing results on, and all iterations
        self._only_turns: bool | None = None  # whether a loop does little more; None: not seen yet

    def _types_called(self) -> Iterable[type]:
        """Return the types of modules whose calls become one."""
        raise NotImplementedError

    def _call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for a type's `__call__`."""
        raise NotImplementedError

    def begin(self) -> None:
        from flatout.measure.arms.call_results import FollowedResults

        self._followed = FollowedResults()
        insert_mode(self._followed)
        for kind in self._types_called():
            self._patches.replace(kind, "__call__", self._call(kind.__call__))

    def end(self) -> None:
        self._patches.undo()
        self._stop_following()

    def release(self) -> None:
        self._patches.undo()

    def _begin_turns(self) -> None:
        """Begin to pass on results; while that is all that happens, the GPU's clock stands still as well."""
        if self._clock.marks is not None:
            if self._only_turns is None:
                self.fell_back = True  # this step finds out
            elif self._only_turns:
                self._clock.marks.mark(EXCLUDED, always=True)
        self._handed_out_s = now()

    def _turn(self, *, is_last: bool) -> None:
        """Exclude the loop iteration since the last result: the fix has no such loop."""
        time_s = now()
        spent_s, self._handed_out_s = time_s - self._handed_out_s, time_s
        self._clock.book_out(min(spent_s, TURN_S))
        self._turns_s += min(spent_s, TURN_S)
        self._loop_s += spent_s
        if is_last and self._only_turns and self._clock.marks is not None:
            self._clock.marks.mark(REST, always=True)

    def _end_turns(self) -> None:
        """Note, at the end of a step, what its loops did."""
        if self._loop_s:
            self._only_turns = self._turns_s >= LITTLE_MORE * self._loop_s
        self._turns_s = self._loop_s = 0.0

    def _stop_following(self) -> None:
        if self._followed is not None:
            remove_mode(self._followed)
            self._followed.forget()
            self._followed = None


class BatchedCall(OneCall):
    """One call of a module on the rows that a line passes one by one."""

    kind = "batched-call"

    def __init__(
        self,
        user_code: UserCode,
        clock: Clock,
        num_backwards: Callable[[], int],
        *,
        types: Iterable[type],
        place: Place,
        suspicion: float,
    ) -> None:
        super().__init__(user_code, clock, place=place, suspicion=suspicion)
        self._num_backwards = num_backwards
        self._types = tuple(types)
        self._calls: list[Arguments] = []
        self._reset()

    def _reset(self) -> None:
        self._module: Any = None
        self._inside = False
        self._backwards = 0
        self._calls.clear()
        self._shapes: list[tuple[int, ...]] = []  # of the result for one row
        self._batch: Arguments | None = None
        self._buffers: list[tuple[Any, Any]] = []
        self._number = 0
        self._rows: list[Any] = []  # of this step's one result
        self._columns: list[tuple[list[Any], Any, FirstRow]] = []  # rows, what they were, and the first one
        self._first_rows: list[FirstRow] = []  # its gradient stands for the gradients of all rows
        self._is_trained = False  # whether gradients reached joined rows
        self._parts: tuple[Any, ...] = ()  # of the last tensor that was split
        self._split_s = 0.0
        self._watched: dict[tuple[CodeType, int], bool] = {}  # whether a caller's line belongs to this arm

    def _types_called(self) -> Iterable[type]:
        return self._types

    def begin(self) -> None:
        import torch

        super().begin()
        for owner in (torch, torch.Tensor):
            for name in SPLITS:
                self._patches.replace(owner, name, self._split(getattr(owner, name)))
        for name in JOINS:
            self._patches.replace(torch, name, self._join(getattr(torch, name), stacks=name == "stack"))

    def step_end(self) -> None:
        self._end_turns()
        if not all(first.has_gradient for first in self._first_rows):
            self.refusal = "the first row gets no gradient, so it cannot stand for all of them"
        self._number, self._rows, self._first_rows = 0, [], []
        self._columns, self._parts = [], ()
        if self._followed is not None:
            self._stop_following()
            if self.refusal is None:
                self._batch = self._join_rows()

    def end(self) -> None:
        import torch

        super().end()
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        self._reset()

    def _call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_once(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or self.refusal is not None or not self._is_watched(module, sys._getframe(1)):
                return call(module, *args, **kwargs)
            self._inside = True
            try:
                if self._followed is not None:
                    return self._note(call, module, (args, kwargs))
                return self._hand_out(call, module, (args, kwargs))
            finally:
                self._inside = False

        return call_once

    def _is_watched(self, module: Any, frame: Any) -> bool:
        if ident() != self._clock.owner or (self._module is not None and module is not self._module):
            return False
        if not self._user_code.is_user(frame.f_code):
            return self._user_code.place(frame)[0] == self.place
        key = (frame.f_code, frame.f_lineno)
        if key not in self._watched:
            self._watched[key] = self._user_code.place(frame)[0] == self.place
        return self._watched[key]

    def _note(self, call: Callable[..., Any], module: Any, arguments: Arguments) -> Any:
        followed = self._followed
        assert followed is not None
        if not self._calls:
            self._module, self._backwards = module, self._num_backwards()
        elif followed.depends(arguments, id(module)):
            self.refusal = f"{DEPENDS}, so the calls cannot be one"
        elif self._num_backwards() != self._backwards:
            self.refusal = "a backward pass runs between the calls, so they cannot be one"
        self._calls.append(map_arrays(arguments, lambda array: getattr(array, "detach", lambda: array)()))
        result = call(module, *arguments[0], **arguments[1])
        self._shapes = [tuple(array.shape) for array in arrays_of(result)]
        followed.follow(result, id(module))
        return result

    def _join_rows(self) -> Arguments | None:
        """Join the arguments of all calls into the arguments of one."""
        import torch

        rows = [arrays_of(call) for call in self._calls]
        kinds = {tuple((tuple(array.shape), str(array.dtype)) for array in arrays) for arrays in rows}
        if len(rows) < 2:
            self.refusal = "the line made fewer than two calls in a step"
        elif len(kinds) > 1:
            self.refusal = "the rows differ in shape or type"
        elif any(not isinstance(each, torch.Tensor) or each.shape[:1] != (1,) for each in rows[0]):
            self.refusal = "the module takes more than single rows"
        else:
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
            columns = iter([torch.cat(column) for column in zip(*rows, strict=True)])
            joined: Arguments = map_arrays(self._calls[0], lambda _array: next(columns))
            return joined
        return None

    def _hand_out(self, call: Callable[..., Any], module: Any, arguments: Arguments) -> Any:
        if not self._rows and self._number == 0 and self._batch is not None:
            self._book_out_split(arguments)
            self._rows = self._run(call, module, arguments)
            self._begin_turns()
        self._number += 1
        if self._number <= len(self._rows):
            self._turn(is_last=self._number == len(self._rows))
            return self._rows[self._number - 1]
        self.fell_back = True
        return call(module, *arguments[0], **arguments[1])

    def _run(self, call: Callable[..., Any], module: Any, arguments: Arguments) -> list[Any]:
        from flatout.measure.arms.call_results import attached, tensors_in

        own = list(tensors_in(arguments))
        args, kwargs = map_arrays(
            self._batch, lambda array: attached(array, own) if array.is_floating_point() else array
        )
        result = call(module, *args, **kwargs)
        with self._clock.excluded():
            return self._rows_like(result)

    def _rows_like(self, result: Any) -> list[Any]:
        """Split the result for all rows into the results that the loop expects."""
        parts: list[Any] = [array.split(1) if array.dim() else () for array in arrays_of(result)]
        num_calls = len(self._calls)
        shapes = [tuple(part[0].shape) if len(part) == num_calls else None for part in parts]
        if not parts or shapes != self._shapes:
            self.refusal = "the module's result for many rows is not one row for each"
            return []

        columns = [self._rows_of(array) for array in arrays_of(result)]
        if len(columns) == 1 and columns[0] and isinstance(result, type(columns[0][0])):
            return columns[0]

        def row(number: int) -> Any:
            values = iter([column[number] for column in columns])
            return map_arrays(result, lambda _array: next(values))

        return [row(number) for number in range(num_calls)]

    def _rows_of(self, whole: Any) -> list[Any]:
        """Split a result into rows; the first row carries the gradient."""
        from flatout.measure.arms.call_results import FirstRow

        rows = list(whole.detach().split(1))
        if whole.requires_grad:
            first = FirstRow()
            rows[0] = first.take(whole)
            self._first_rows.append(first)
            self._columns.append((rows, whole, first))
        return rows

    def _split(self, split: Callable[..., Any]) -> Callable[..., Any]:
        """Note what a split of a tensor makes, and how long it takes."""

        def split_noted(*args: Any, **kwargs: Any) -> Any:
            if self._inside or ident() != self._clock.owner:
                return split(*args, **kwargs)
            start_s = now()
            self._parts = split(*args, **kwargs)
            self._split_s = now() - start_s
            return self._parts

        return split_noted

    def _book_out_split(self, arguments: Arguments) -> None:
        """Exclude the split that made the rows of a loop."""
        from flatout.measure.arms.call_results import tensors_in

        if len(self._parts) == len(self._calls) and any(
            each is self._parts[0] for each in tensors_in(arguments)
        ):
            self._clock.book_out(self._split_s)

    def _join(self, join: Callable[..., Any], *, stacks: bool) -> Callable[..., Any]:
        """Return the one result where the script joins all of its rows in their order."""

        def join_or_give_whole(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            is_plain = not kwargs and args in ((), (0,)) and ident() == self._clock.owner
            for rows, whole, first in self._columns:
                if not is_plain or len(tensors) != len(rows):
                    continue
                if all(given is row for given, row in zip(tensors, rows, strict=True)):
                    joined = (whole.unsqueeze(1) if stacks else whole).clone()  # the script may change it
                    self._note_training(joined, first)
                    return joined
            return join(tensors, *args, **kwargs)

        return join_or_give_whole

    def _note_training(self, joined: Any, first: FirstRow) -> None:
        """Note, once, that gradients reach what the script makes of the rows."""
        first.has_gradient = self._is_trained
        if not self._is_trained and joined.requires_grad:

            def note(_gradient: Any) -> None:
                first.has_gradient = self._is_trained = True

            joined.register_hook(note)


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose lines that call a module with parameters many times in a step, with one row each."""
    forward_s, backward_s = (context.phases_s.get(phase, 0.0) for phase in ("forward", "backward"))
    with_backward = 1 + (backward_s / forward_s if forward_s > 0 else 0.0)
    for call in context.module_calls:
        share = (call.host_s or 0.0) * with_backward / context.step_s
        if call.rows != 1 or not call.has_parameters or call.calls_per_step < LEAST_CALLS:
            continue
        types = [kind for kind in context.outermost_types if kind.__name__ == call.module]
        if share < LEAST_SHARE or TIME_COMES_FIRST.search(call.module) or not types:
            continue
        arm = BatchedCall(
            context.user_code,
            context.clock,
            context.num_backwards,
            types=types,
            place=call.place,
            suspicion=min(1.0, share),
        )
        arm.refusal = COMPILED if has_compiled() else None
        yield arm
