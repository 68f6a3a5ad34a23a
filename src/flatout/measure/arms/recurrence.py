"""Steps that replace a loop over a recurrent cell with one call of torch's recurrent layer.

A cell computes one position at a time, in many small kernels; `nn.LSTM`, `nn.GRU` and `nn.RNN` run the whole
sequence in one, with the cell's own weights.  A layer that a loop gives one position at a time is such a cell
too.  The block's first step keeps the inputs that the loop passes.  In later steps the first call of each
sequence runs the layer on them, from the state it was given, and each call gets its own position of the
result.  The loop iterations that remain are not timed.

The layer's library needs a cell's weights in one piece of memory, so they move there for the block and back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flatout.measure.arms.arm import COMPILED, DEPENDS, Arm, ArmContext
from flatout.measure.arms.batched_call import OneCall
from flatout.measure.clock import Clock, ident
from flatout.measure.evidence import Place, Site
from flatout.measure.phases import has_compiled
from flatout.measure.user_code import UserCode

LAYERS = {"LSTMCell": "LSTM", "GRUCell": "GRU", "RNNCell": "RNN"}
LEAST_CALLS, LEAST_SHARE = 8, 0.05
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
BATCHED = 3  # dimensions of a layer's input


@dataclass(slots=True)
class CellCalls:
    """The inputs that one cell, or a layer called like one, got in the block's first step."""

    cell: Any
    call: Callable[..., Any]  # of its type
    backwards: int = 0  # before the last call
    inputs: list[Any] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # call numbers at which a sequence begins
    layer: Any = None
    before: list[tuple[Any, Any]] = field(default_factory=list)  # (parameter, its own memory)
    sequences: dict[int, Any] = field(default_factory=dict)  # by first call: the inputs as one tensor
    number: int = 0  # calls in this step
    outputs: tuple[Any, ...] = ()  # of the current sequence
    last: Any = None

    @property
    def is_layer(self) -> bool:
        return type(self.cell).__name__ in LAYERS.values()

    def time(self, inputs: Any) -> int:
        """Return the dimension of a layer's input that counts positions."""
        return int(self.cell.batch_first and inputs.dim() == BATCHED)


class LibraryRecurrence(OneCall):
    """One call of a recurrent layer in place of a loop over a cell."""

    kind = "library-recurrence"

    def __init__(
        self,
        user_code: UserCode,
        clock: Clock,
        num_backwards: Callable[[], int],
        *,
        place: Place,
        suspicion: float,
    ) -> None:
        super().__init__(user_code, clock, place=place, suspicion=suspicion)
        self._num_backwards = num_backwards
        self._cells: dict[int, CellCalls] = {}

    def _types_called(self) -> Iterable[type]:
        import torch

        return [getattr(torch.nn, name) for pair in LAYERS.items() for name in pair]

    def step_end(self) -> None:
        self._end_turns()
        for calls in self._cells.values():
            calls.number, calls.outputs, calls.last = 0, (), None
        if self._followed is not None:
            self._stop_following()
            if not self._cells:
                self.refusal = "the line called no cell of torch.nn"
            for calls in self._cells.values():
                self.refusal = self.refusal or _build_layer(calls)

    def end(self) -> None:
        import torch

        super().end()
        with torch.no_grad():
            for calls in self._cells.values():
                for parameter, memory in calls.before:
                    memory.copy_(parameter)
                    parameter.data = memory
        self._cells.clear()

    def _call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_layer(cell: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                self.refusal is not None
                or ident() != self._clock.owner
                or self._user_code.place(sys._getframe(1))[0] != self.place
            ):
                return call(cell, *args, **kwargs)
            given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
            if self._followed is not None:
                return self._note(call, cell, given)
            return self._hand_out(call, cell, given)

        return call_layer

    def _note(self, call: Callable[..., Any], cell: Any, given: dict[str, Any]) -> Any:
        followed, source = self._followed, id(cell)
        assert followed is not None
        calls = self._cells.setdefault(source, CellCalls(cell, call))
        if calls.is_layer and (reason := _why_no_cell(calls, given["input"])):
            self.refusal = reason
            return call(cell, **given)
        backwards = self._num_backwards()
        if calls.inputs and followed.depends(given["input"], source):
            self.refusal = f"{DEPENDS}, so the positions cannot be one call"
        if not followed.is_from(given.get("hx"), source):
            calls.starts.append(len(calls.inputs))
        elif backwards != calls.backwards:
            self.refusal = "a backward pass runs between the positions, so they cannot be one call"
        calls.backwards = backwards
        calls.inputs.append(given["input"].detach())
        result = call(cell, **given)
        followed.follow(result, source)
        return result

    def _hand_out(self, call: Callable[..., Any], cell: Any, given: dict[str, Any]) -> Any:
        calls = self._cells.get(id(cell))
        if calls is None or calls.number >= len(calls.inputs):
            self.fell_back = True
            return call(cell, **given)
        if calls.number in calls.sequences:
            self._run(calls, given)
            self._begin_turns()
        start = max(each for each in calls.starts if each <= calls.number)
        output = calls.outputs[calls.number - start]
        calls.number += 1
        is_last = calls.number == len(calls.inputs) or calls.number in calls.sequences
        self._turn(is_last=is_last)
        if calls.is_layer:
            return output, calls.last
        return (output, calls.last[1].squeeze(0)) if isinstance(calls.last, tuple) else output

    def _run(self, calls: CellCalls, given: dict[str, Any]) -> None:
        from flatout.measure.arms.call_results import attached

        hx = given.get("hx")
        if calls.is_layer:
            sequence = attached(calls.sequences[calls.number], [given["input"]])
            outputs, calls.last = calls.call(calls.cell, sequence, hx)
            calls.outputs = outputs.split(1, calls.time(sequence))
            return
        if hx is not None:
            hx = tuple(each.unsqueeze(0) for each in hx) if isinstance(hx, tuple) else hx.unsqueeze(0)
        inputs = attached(calls.sequences[calls.number], [given["input"]])
        outputs, calls.last = calls.layer.forward(inputs, hx)  # not a call of the script, which would count
        calls.outputs = outputs.unbind(0)


def _why_no_cell(calls: CellCalls, inputs: Any) -> str | None:
    """Return why a layer's call is not one position of a sequence."""
    if calls.cell.bidirectional:
        return "the layer runs both ways, so it needs the whole sequence"
    if not hasattr(inputs, "dim") or inputs.shape[calls.time(inputs)] != 1:
        return "the layer is given more than one position at once"
    return None


def _build_layer(calls: CellCalls) -> str | None:
    """Build the layer and its inputs; return the reason if that is impossible."""
    import torch

    cell = calls.cell
    ends = [*calls.starts[1:], len(calls.inputs)]
    for start, end in zip(calls.starts, ends, strict=True):
        sequence = calls.inputs[start:end]
        if len({(each.shape, each.dtype) for each in sequence}) > 1:
            return "the inputs of a sequence differ in shape or type"
        joined = torch.cat(sequence, calls.time(sequence[0])) if calls.is_layer else torch.stack(sequence)
        calls.sequences[start] = joined
    if calls.is_layer:
        return None
    name = LAYERS.get(type(cell).__name__)
    weights = [getattr(cell, weight) for weight in WEIGHTS if getattr(cell, weight) is not None]
    if name is None or any(type(weight) is not torch.nn.Parameter for weight in weights):
        return "the cell's weights are not its own parameters"
    options = {"nonlinearity": cell.nonlinearity} if name == "RNN" else {}
    layer = getattr(torch.nn, name)(
        cell.input_size, cell.hidden_size, bias=cell.bias, device="meta", **options
    )
    calls.before = [(weight, weight.data) for weight in weights]
    for weight_name, weight in zip(WEIGHTS, weights, strict=False):
        setattr(layer, f"{weight_name}_l0", weight)
    layer.train(cell.training)
    layer.flatten_parameters()
    calls.layer = layer
    return None


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose lines that call a recurrent cell many times in a step."""
    cells = [site for site in context.sites if site.kind == "cell"]
    for place in dict.fromkeys(site.place for site in cells):
        here = [site for site in cells if site.place == place]
        share = _share(here, context)
        if sum(site.calls_per_step for site in here) >= LEAST_CALLS and share >= LEAST_SHARE:
            arm = LibraryRecurrence(
                context.user_code, context.clock, context.num_backwards, place=place, suspicion=share
            )
            arm.refusal = COMPILED if has_compiled() else None
            yield arm


def _share(cells: list[Site], context: ArmContext) -> float:
    """Return the cells' share of the step, or the whole model's if its calls were not timed."""
    if context.attributed_step_s and any(site.host_s is not None for site in cells):
        seconds = sum((site.host_s or 0.0) + (site.backward_s or 0.0) for site in cells)
        return min(1.0, seconds / context.attributed_step_s)
    model_s = sum(context.phases_s.get(phase, 0.0) for phase in ("forward", "backward"))
    return min(1.0, model_s / context.step_s)
