"""Tensor creations, row accesses, waits for the GPU, copies and recurrent cells, by line.

A torch-function mode sees every call of torch's Python API on the training thread, and a walk up the frames
finds the user's line.  That costs about 3 µs per call, so it is on for one or two steps that are never timed.
While *attributing* it also notes how long each call took and which autograd sequence numbers it consumed: the
backward nodes carry the same numbers, so the profiler's backward times can be charged to the line whose
forward call caused them.  A tensor created in a loop causes more work than its creation: calls on the same
line that see only such tensors and parameters (an embedding of a constant) disappear with it, and are charged
to the creation as *derived*.

Every call that makes the device work is also counted for the module that makes it: a step of many small calls
is bound by launching them.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from flatout.measure import PHASES
from flatout.measure.batches import bytes_of
from flatout.measure.clock import REST, Clock, ident, now
from flatout.measure.evidence import OperatorCalls, Place, Site, SiteKind
from flatout.measure.lines.array_lists import OF_ARRAYS, of_arrays
from flatout.measure.lines.attention_calls import NAMES, AttentionCalls, CallPlace
from flatout.measure.lines.counted_calls import COLLECTIVE
from flatout.measure.user_code import UserCode

CREATE = {
    "tensor", "as_tensor", "asarray", "zeros", "ones", "full", "empty", "rand", "randn", "randint",
    "randperm", "arange", "linspace", "eye", "scalar_tensor", "zeros_like", "ones_like", "full_like",
    "empty_like", "rand_like", "randn_like", "new_tensor", "new_zeros", "new_ones", "new_full",
    "new_empty", "from_numpy",
}  # fmt: skip
SYNC = {
    "item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__repr__",
    "__format__", "__array__", "__contains__", "nonzero", "masked_select", "unique", "equal",
    "allclose", "is_nonzero", "argwhere",
}  # fmt: skip
ROW = {"__getitem__", "__setitem__", "select"}
CELL = {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
LAYER = {"lstm", "gru", "rnn_tanh", "rnn_relu"}  # a cell, if given one position at a time
COPY = {"to", "cuda"}
WEIGHTS = {"copy_"}
KINDS: dict[str, SiteKind] = {
    **dict.fromkeys(CREATE, "create"),
    **dict.fromkeys(SYNC, "sync"),
    **dict.fromkeys(ROW, "row"),
    **dict.fromkeys(CELL | LAYER, "cell"),
    **dict.fromkeys(COPY, "copy"),
    **dict.fromkeys(WEIGHTS, "weights"),
}
# Views and queries: nothing runs on the device.
NO_WORK = {
    "__get__", "__set__", "__len__", "__hash__", "__iter__", "size", "dim", "ndimension", "stride", "numel",
    "view", "view_as", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "expand_as",
    "flatten", "unflatten", "split", "chunk", "unbind", "narrow", "detach", "requires_grad_", "backward",
    "is_contiguous", "is_floating_point", "is_complex", "is_pinned", "get_device", "data_ptr",
    "untyped_storage", "register_hook",
}  # fmt: skip
MOST_SITES = 200
MOST_CALLERS = 8
OUTSIDE_MODULES = "outside the model's modules"
MOST_DERIVED = 2  # consecutive calls on one line; a whole model fed from here is not the creation's fault

BackwardSeconds = Callable[[list[tuple[int, int]]], float]
SiteKey = tuple[SiteKind, str, Place, str | None, str]  # kind, op, place, via, device


@dataclass(slots=True)
class SiteCounts:
    """One operation at one line, summed over the counted steps."""

    calls: int = 0
    requires_grad: bool = False
    num_bytes: int = 0
    pinned: bool | None = None
    blocking: bool | None = None
    wide_bytes: int = 0
    # by attributed step and region
    host_s: defaultdict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    sequences: list[tuple[int, tuple[int, int]]] = field(default_factory=list)  # each with its step
    derived_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # by that step
    derived_sequences: list[tuple[int, tuple[int, int]]] = field(default_factory=list)


class CallSites(TorchFunctionMode):
    """Counts calls by site; with `attributing` on, also their time and their autograd nodes."""

    def __init__(self, user_code: UserCode, clock: Clock | None = None) -> None:
        super().__init__()
        self.user_code, self._clock = user_code, clock
        self.sites: dict[SiteKey, SiteCounts] = {}
        self.differentiable: set[Place] = set()  # lines whose operators made autograd nodes
        self.meeting_regions: set[int] = set()  # in which collectives were called
        self.callers: Counter[CodeType | str] = Counter()  # of operators: a module's forward, an optimizer
        self._kinds: dict[CodeType, str] = {}  # by code object: the class whose forward it is
        self.num_steps = 0
        self.attributing = False
        self.attributed_steps = 0
        self.usual_steps: Sequence[int] = ()  # those of them that hold nothing else; empty: all
        # by attributed step and region
        self.called_s: defaultdict[tuple[int, int], float] = defaultdict(float)
        # by identity: tensors made from constants in this step, each with the creation it derives from
        self._derived: dict[int, tuple[torch.Tensor, SiteCounts, Place, int]] = {}
        self.failure: Exception | None = None  # our own failure; nothing is noted after it
        self._attention = AttentionCalls(user_code, self._count_call)
        self._sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before, start = self._sequence(), now()
        result = function(*args, **(kwargs or {}))
        spent_s = now() - start
        if self.failure is None:
            try:
                self._note(function, args, kwargs or {}, result, before, spent_s)
            except Exception as error:  # noqa: BLE001 - ours; the job's call has been made
                self.failure = error
        return result

    def _note(
        self, function: Any, args: Any, kwargs: dict[str, Any], result: Any, before: int, spent_s: float
    ) -> None:
        name = getattr(function, "__name__", "")
        kind = KINDS.get(name)
        if kind is not None:
            kind = _refine(kind, name, args)
            name += OF_ARRAYS if of_arrays(name, args) else ""
        elif name == "backward" and torch.is_anomaly_enabled():
            self.note_call("detect_anomaly", sys._getframe(2), "cpu", 0.0)
        site = self._site(kind, name, args, kwargs, result) if kind is not None else None
        if not self.attributing:
            if name in NAMES:
                self._attention.see(name, args, result, sys._getframe(2))
            if name not in NO_WORK:
                self.callers[self._caller(sys._getframe(2))] += 1
            if site is not None:
                site[1].calls += 1
            if self._sequence() > before and (place := self.user_code.place(sys._getframe(2))[0]) is not None:
                self.differentiable.add(place)
        else:
            after, step = self._sequence(), self.attributed_steps
            sequences = [(before, after)] if after > before else []
            region = REST if self._clock is None else self._clock.stack[-1]
            if name != "backward":  # it is a phase of its own
                self.called_s[step, region] += spent_s
            if site is not None:
                place, counts = site
                counts.host_s[step, region] += spent_s
                counts.sequences += [(step, interval) for interval in sequences]
                if kind == "create":
                    self._follow(result, counts, place, 0)
            elif self._derived:
                self._note_derived((*args, *kwargs.values()), result, spent_s, sequences)

    def note_creation(
        self, name: str, args: tuple[Any, ...], tensor: Any, frame: FrameType, spent_s: float
    ) -> None:
        """Count a creation that no mode sees."""
        if self.failure is None and (self._clock is None or ident() == self._clock.owner):
            try:
                self._note_creation(name, args, tensor, frame, spent_s)
            except Exception as error:  # noqa: BLE001 - ours; the job has its tensor
                self.failure = error

    def _note_creation(
        self, name: str, args: tuple[Any, ...], tensor: Any, frame: FrameType, spent_s: float
    ) -> None:
        place, via = self.user_code.place(frame)
        if not self.attributing:
            self.callers[self._caller(frame)] += 1
        if place is None:
            return
        name += OF_ARRAYS if of_arrays(name, args) else ""
        counts = self.sites.setdefault(("create", name, place, via, tensor.device.type), SiteCounts())
        if not self.attributing:
            counts.calls += 1
            return
        region = REST if self._clock is None else self._clock.stack[-1]
        self.called_s[self.attributed_steps, region] += spent_s
        counts.host_s[self.attributed_steps, region] += spent_s
        self._follow(tensor, counts, place, 0)

    def note_call(self, op: str, frame: FrameType, device: str, spent_s: float) -> None:
        """Count a call that no mode sees; a setting counts at the line that names it."""
        if COLLECTIVE.match(op):
            if self._clock is not None:
                self.meeting_regions.add(self._clock.stack[-1])
            return
        place, via = self.user_code.place(frame)
        if op == "detect_anomaly":
            place = self.user_code.named(("detect_anomaly", "set_detect_anomaly")) or place
        # checkpoints are called through torch's own file
        self._count_call(op, (place, None if op == "checkpoint" else via), device, spent_s)

    def _count_call(self, op: str, where: CallPlace, device: str, spent_s: float = 0.0) -> None:
        place, via = where
        if place is None:
            return
        key: SiteKey = ("call", op, place, via, device)
        counts = self.sites.setdefault(key, SiteCounts())
        if self.attributing:
            region = REST if self._clock is None else self._clock.stack[-1]
            counts.host_s[self.attributed_steps, region] += spent_s
        else:
            counts.calls += 1

    def _caller(self, frame: FrameType | None) -> CodeType | str:
        """Return the caller of an operator: a forward, the user's before a library's, or an optimizer."""
        library: str | None = None
        while frame is not None:
            code = frame.f_code
            if code.co_name in ("forward", "step") and code.co_varnames[:1] == ("self",):
                owner = frame.f_locals.get("self")
                if isinstance(owner, torch.optim.Optimizer):
                    return f"{type(owner).__name__}.step"
                if isinstance(owner, torch.nn.Module):
                    if self.user_code.is_user(code):
                        self._kinds[code] = type(owner).__name__
                        return code
                    library = library or type(owner).__name__
            frame = frame.f_back
        return library or OUTSIDE_MODULES

    def operator_calls(self) -> tuple[OperatorCalls, ...]:
        """Return the most frequent callers of operators, per step."""
        return tuple(
            OperatorCalls(
                caller=caller if isinstance(caller, str) else self._kinds[caller],
                place=None
                if isinstance(caller, str)
                else self.user_code.place_in(caller, line=caller.co_firstlineno),
                calls_per_step=calls / max(1, self.num_steps),
            )
            for caller, calls in self.callers.most_common(MOST_CALLERS)
        )

    def _note_derived(
        self, values: tuple[Any, ...], result: Any, spent_s: float, sequences: list[tuple[int, int]]
    ) -> None:
        origin = self._origin(values)
        if origin is None or self.user_code.place(sys._getframe(3))[0] != origin[1]:
            return
        counts, place, depth = origin
        step = self.attributed_steps
        counts.derived_s[step] += spent_s
        counts.derived_sequences += [(step, interval) for interval in sequences]
        self._follow(result, counts, place, depth + 1)

    def _follow(self, result: Any, counts: SiteCounts, place: Place, depth: int) -> None:
        if isinstance(result, torch.Tensor) and depth < MOST_DERIVED:
            self._derived[id(result)] = (result, counts, place, depth)

    def _origin(self, values: tuple[Any, ...]) -> tuple[SiteCounts, Place, int] | None:
        """Return the creation that all tensors of a call derive from; None if it also sees anything else."""
        origin = None
        for value in values:
            if isinstance(value, torch.Tensor):
                known = self._derived.get(id(value))
                if known is not None and known[0] is value:
                    origin = known[1:]
                elif not isinstance(value, torch.nn.Parameter):
                    return None
            elif isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
                return None
        return origin

    def attributed_step_end(self) -> None:
        self.attributed_steps += 1
        self.forget_tensors()

    def forget_tensors(self) -> None:
        self._derived.clear()

    def _site(
        self, kind: SiteKind, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> tuple[Place, SiteCounts] | None:
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if kind == "copy":
            if source is None or not isinstance(result, torch.Tensor) or result is source:
                return None
            if source.device.type != "cpu" or result.device.type == "cpu":
                if source.device.type != "cpu" and result.device.type == "cpu":
                    kind = "sync"
                else:
                    return None
        tensor = result if kind in ("create", "copy") and isinstance(result, torch.Tensor) else source
        place, via = self.user_code.place(sys._getframe(3))
        if place is None:
            return None
        device = tensor.device.type if tensor is not None else "cpu"
        counts = self.sites.setdefault((kind, name, place, via, device), SiteCounts())
        if source is not None and kind in ("row", "cell"):
            counts.requires_grad |= source.requires_grad and torch.is_grad_enabled()
        if kind in ("copy", "weights") and source is not None and not self.attributing:
            moved = bytes_of(source)
            counts.num_bytes += moved
            counts.wide_bytes += moved if source.dtype == torch.float64 else 0
        if kind == "copy" and source is not None:
            counts.blocking = bool(counts.blocking) or not _is_asked_not_to_wait(args, kwargs)
            if counts.pinned is not True:
                counts.pinned = source.is_pinned()
        return place, counts

    def evidence(self, backward_seconds: BackwardSeconds | None) -> tuple[Site, ...]:
        """Return counts per step; `backward_seconds` gives the backward time of sequence-number intervals."""
        steps = max(1, self.num_steps)
        usual = self.usual_steps or range(max(1, self.attributed_steps))
        sites = [
            _site(key, counts, steps, usual, backward_seconds or (lambda intervals: 0.0))
            for key, counts in self.sites.items()
            if counts.calls
        ]
        return tuple(sorted(sites, key=lambda site: -site.calls_per_step)[:MOST_SITES])


def _site(
    key: SiteKey, counts: SiteCounts, steps: int, usual: Sequence[int], backward_seconds: BackwardSeconds
) -> Site:
    kind, op, place, via, device = key
    phases_s: defaultdict[str, float] = defaultdict(float)
    steps_s = dict.fromkeys(usual, 0.0)
    for (step, region), seconds in counts.host_s.items():
        if step in steps_s:
            steps_s[step] += seconds
            if region < len(PHASES):
                phases_s[PHASES[region]] += seconds / len(usual)
    host_s = sum(steps_s.values())
    by_step: dict[int, list[tuple[int, int]]] = {}
    for step, interval in counts.sequences:
        by_step.setdefault(step, []).append(interval)
    backward_s = {step: backward_seconds(by_step[step]) for step in usual if step in by_step}
    for step, seconds in backward_s.items():
        steps_s[step] += seconds
    derived = [interval for step, interval in counts.derived_sequences if step in steps_s]
    derived_s = sum(counts.derived_s[step] for step in usual) + backward_seconds(derived)
    known = bool(counts.host_s)
    return Site(
        kind=kind,
        op=op,
        place=place,
        via=via,
        device=device,
        calls_per_step=counts.calls / steps,
        requires_grad=counts.requires_grad,
        host_s=host_s / len(usual) if known else None,
        backward_s=sum(backward_s.values()) / len(usual) if backward_s else None,
        derived_s=derived_s / len(usual) if known and kind == "create" else None,
        phases_s=dict(phases_s),
        steps_s=tuple(steps_s.values()) if known else (),
        bytes_per_step=counts.num_bytes / steps if kind in ("copy", "weights") else None,
        pinned=counts.pinned,
        blocking=counts.blocking,
        wide_bytes_per_step=counts.wide_bytes / steps if kind == "copy" else None,
    )


def _is_asked_not_to_wait(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a copy has `non_blocking=True`, also by position: no other flag precedes it."""
    return bool(kwargs.get("non_blocking", next((value for value in args if isinstance(value, bool)), False)))


def _refine(kind: SiteKind, name: str, args: tuple[Any, ...]) -> SiteKind | None:
    """Refine a kind: an index decides what indexing does, and the destination what a copy does."""
    if kind == "weights":
        return kind if args and isinstance(args[0], torch.nn.Parameter) else None
    if name in LAYER:
        return kind if _is_one_position(*args) else None
    if name not in ("__getitem__", "__setitem__") or len(args) < 2:
        return kind
    index = args[1]
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts):
        return "sync"
    return "row" if any(_is_one_number(part) for part in parts) else None


def _is_one_position(*args: Any) -> bool:
    """Return whether a recurrent layer gets one position of unpacked sequences, and runs one way."""
    inputs, _hx, weights, *_, is_bidirectional, batch_first = args
    is_unpacked = isinstance(weights, list)  # packed sequences have their sizes first
    return is_unpacked and not is_bidirectional and inputs.shape[int(batch_first)] == 1


def _is_one_number(part: Any) -> bool:
    if isinstance(part, torch.Tensor):
        return part.numel() == 1
    return type(part) is int or isinstance(part, np.integer)  # True adds a dimension
