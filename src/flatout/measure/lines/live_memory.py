"""Which lines make tensors that stay alive, step after step?

A mode below autograd sees every operator that returns a fresh storage and notes the user's line and a weak
reference to the storage (not the tensor: views share one).  At the end of each step it adds up, by line,
storages that an earlier step made and that are still alive.  Parameters, optimizer state and caches are old
but do not grow; the last step's `loss` and `logits` are alive but not old; a line whose old bytes rise at
every single boundary is a leak, unless its holder is bounded.  Growing autograd graphs are found as well:
`total += loss` keeps every step's graph though its buffers are freed.

The mode also adds up the arithmetic of matrix products by dtype, since it sees the types that autocast chose,
the bytes that operators read and write, and the largest tensors.  On a GPU the backward pass runs on a thread
of its own, with no line of the user's on its stack: tensors made there (gradients, not leaks) have no place.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from flatout.measure.evidence import GraphGrowth, Growth, LargeTensor, Memory, Place
from flatout.measure.lines.holders import (
    Holder,
    container_sizes,
    does_not_grow,
    find_holder,
    graph_of,
    held_by_python,
    old_nodes,
    tensors_with_graph,
)
from flatout.measure.lines.live_objects import live_objects
from flatout.measure.user_code import UserCode

FEWEST_BOUNDARIES = 3
_MOST_LINES = 8
_MOST_HOLDERS = 8
_MOST_LARGE, _LEAST_LARGE = 8, 1 << 20  # tensors, and their bytes
_DTYPES = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}


class _Birth(weakref.ref[Any]):
    """A live storage: where and in which step it was made."""

    __slots__ = ("key", "num_bytes", "place", "step")
    key: int
    place: Place | None
    num_bytes: int
    step: int


class MemoryRecorder:
    """Watches tensors over a few steps: `start()`, `step_end()` after each, `stop()`."""

    def __init__(self, user_code: UserCode, device_type: str) -> None:
        self._user_code, self._device_type = user_code, device_type
        self.failure: Exception | None = None  # our own failure; nothing is noted after it
        self._births: dict[int, _Birth] = {}
        self._step = 0
        self._marks: list[int] = []  # the autograd order number at every boundary
        self._old_by_place: list[dict[Place | None, tuple[int, int]]] = []  # bytes, tensors
        self._num_old_nodes: list[int] = []
        self._sizes: dict[int, int] = {}
        self._base_bytes = self._live_bytes = self._peak_bytes = 0
        self._flops: dict[str, float] = {}
        self._moved_bytes = 0
        self._largest: dict[tuple[Place | None, str, tuple[int, ...], str], int] = {}
        self._mode: Any = None

    def start(self) -> None:
        gc.collect()
        self._base_bytes = sum({key: size for key, size, _ in _live_storages()}.values())
        self._sizes = container_sizes()
        self._marks.append(_order_number())
        self._mode = _tracking_mode(self)
        _insert(self._mode)

    def step_end(self) -> None:
        """Add up, at a step boundary, what was made before this step and is still alive."""
        gc.collect()  # what only a reference cycle holds is not a leak
        old: dict[Place | None, tuple[int, int]] = {}
        for birth in list(self._births.values()):
            if birth.step < self._step:
                num_bytes, num = old.get(birth.place, (0, 0))
                old[birth.place] = (num_bytes + birth.num_bytes, num + 1)
        self._old_by_place.append(old)
        nodes = old_nodes(tensors_with_graph(), before=self._marks[-1])
        self._num_old_nodes.append(sum(len(numbers) for numbers in nodes))
        self._marks.append(_order_number())
        self._step += 1

    def stop(self) -> Memory:
        """Return what stayed alive and restore the state from before `start`."""
        frame = sys._getframe(1)
        _remove(self._mode)
        if self.failure is not None:
            raise self.failure
        try:
            graphs = self._graph_growth(frame)
            growth = self._growth(frame, with_victims=bool(graphs))
        finally:
            self._births.clear()
        num = max(1, self._step)
        return Memory(
            num_steps=self._step,
            peak_bytes=self._peak(),
            growth_bytes_per_step=sum(line.bytes_per_step for line in growth),
            growth=growth,
            graphs=graphs,
            flops_by_dtype={dtype: flops / num for dtype, flops in self._flops.items()},
            num_bytes=self._moved_bytes / num if self._step else None,
            reserved_bytes=self._statistic("reserved_bytes.all.peak"),
            num_alloc_retries=self._statistic("num_alloc_retries"),
            largest=tuple(
                LargeTensor(place=place, op=op, shape=shape, dtype=dtype, num_bytes=num_bytes)
                for (place, op, shape, dtype), num_bytes in self._by_size()[:_MOST_LARGE]
            ),
        )

    def leave_in_worker(self) -> None:
        """Remove the inherited mode in a forked worker, without a result."""
        _remove(self._mode)

    # -- what the mode reports

    def moved(self, values: Any) -> None:
        """Count the bytes of values that an operator, other than a view, read or wrote."""
        import torch

        for value in values:
            if isinstance(value, torch.Tensor):
                dense = value.layout is torch.strided and not value.is_nested
                self._moved_bytes += value.nbytes if dense else 0
            elif isinstance(value, (list, tuple)):
                self.moved(value)

    def born(self, tensor: Any, frame: FrameType | None, op: str) -> None:
        """Note `tensor`, made by the operator `op` with a fresh storage."""
        import torch

        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._births:
            return
        birth = _Birth(storage, self._died)
        birth.key, birth.num_bytes, birth.step = key, storage.nbytes(), self._step
        birth.place = self._user_code.place(frame)[0]
        self._births[key] = birth
        if birth.num_bytes >= _LEAST_LARGE:
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._largest[birth.place, op, tuple(tensor.shape), dtype] = birth.num_bytes
        self._live_bytes += birth.num_bytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def _died(self, birth: _Birth) -> None:
        self._live_bytes -= birth.num_bytes
        self._births.pop(birth.key, None)

    def computed(self, flops: float, result: Any) -> None:
        """Count the operations of one operator."""
        import torch

        results = result if isinstance(result, (tuple, list)) else (result,)
        # an unwanted gradient is None, and attention kernels return numbers beside tensors
        types = [each.dtype for each in results if isinstance(each, torch.Tensor)]
        if not types:
            return
        name = str(types[0]).removeprefix("torch.")
        dtype = _DTYPES.get(name, "fp8" if name.startswith("float8") else name)
        self._flops[dtype] = self._flops.get(dtype, 0.0) + flops

    # -- conclusions

    def _growing_places(self) -> list[tuple[Place | None, float, float]]:
        """Return (line, bytes per step, tensors per step) of lines whose old bytes rose at every boundary."""
        boundaries = self._old_by_place[1:]  # at the first one nothing observed can be old
        if len(boundaries) < FEWEST_BOUNDARIES:
            return []
        found = []
        for place in boundaries[-1]:
            series = [boundary.get(place, (0, 0)) for boundary in boundaries]
            sizes = [0, *(num_bytes for num_bytes, _ in series)]
            if _rises(sizes):
                steps = len(series) - 1
                rise_bytes, rise = series[-1][0] - series[0][0], series[-1][1] - series[0][1]
                found.append((place, rise_bytes / steps, rise / steps))
        return sorted(found, key=lambda line: -line[1])[:_MOST_LINES]

    def _growth(self, frame: FrameType, *, with_victims: bool) -> tuple[Growth, ...]:
        lines = self._growing_places()
        places = {place for place, _, _ in lines}
        old = {key: birth for key, birth in self._births.items() if birth.step < self._step - 1}
        tensors: dict[Place | None, list[Any]] = {place: [] for place in places}
        for key, _, tensor in _live_storages():
            if key in old and old[key].place in places:
                tensors[old[key].place].append(tensor)
        found: list[Growth] = []
        victims: list[Growth] = []
        for place, bytes_per_step, tensors_per_step in lines:
            holder, tensor = self._holder_among(tensors[place], frame, ignored=[tensors, *tensors.values()])
            if holder is not None and does_not_grow(holder, self._sizes):
                continue
            (victims if holder is None else found).append(
                Growth(
                    place=place,
                    holder=holder.name if holder else None,
                    holder_place=holder.place if holder else None,
                    bytes_per_step=bytes_per_step,
                    tensors_per_step=tensors_per_step,
                    # What no Python object holds is held by a graph that saved it.
                    with_graph=holder is None or graph_of(tensor) is not None,
                )
            )
        # A graph in a bounded holder has victims too, but only the holder shows that they are not a leak.
        return tuple(found + (victims if found or with_victims else []))

    def _holder_among(
        self, tensors: list[Any], frame: FrameType, *, ignored: list[Any]
    ) -> tuple[Holder | None, Any]:
        """Find a holder of one of the tensors; several may share a storage, or only a graph holds them."""
        for tensor in sorted(tensors, key=lambda tensor: graph_of(tensor) is None)[:3]:
            holder = find_holder(tensor, self._user_code, frame=frame, ignored=[*ignored, tensors])
            if holder is not None:
                return holder, tensor
        return None, None

    def _graph_growth(self, frame: FrameType) -> tuple[GraphGrowth, ...]:
        if len(self._num_old_nodes) <= FEWEST_BOUNDARIES or not _rises(self._num_old_nodes):
            return ()
        tensors = held_by_python(tensors_with_graph(), self._user_code, frame=frame)
        begin, end = self._marks[0], self._marks[-2]
        recent = [
            [number for number in numbers if number >= begin] for numbers in old_nodes(tensors, before=end)
        ]
        found: dict[tuple[str | None, Place | None], list[int]] = {}
        assigned: set[int] = set()
        num_looked_up = 0
        for tensor, numbers in sorted(
            zip(tensors, recent, strict=True), key=lambda pair: len(pair[1]), reverse=True
        ):
            if not numbers or id(tensor) in assigned or num_looked_up >= _MOST_HOLDERS:
                continue
            num_looked_up += 1
            holder = find_holder(tensor, self._user_code, frame=frame, ignored=[tensors])
            members = {id(each) for each in _members(holder)} if holder else set()
            assigned |= members
            if holder is not None and does_not_grow(holder, self._sizes):
                continue
            group = [
                number
                for each, own in zip(tensors, recent, strict=True)
                if each is tensor or id(each) in members
                for number in own
            ]
            key = (holder.name, holder.place) if holder else (None, None)
            found.setdefault(key, []).extend(group)
        steps = list(zip(self._marks[:-2], self._marks[1:-1], strict=True))
        return tuple(
            GraphGrowth(holder=name, holder_place=place, nodes_per_step=len(numbers) / len(steps))
            for (name, place), numbers in found.items()
            if all(any(first <= number < last for number in numbers) for first, last in steps)
        )

    def _by_size(self) -> list[tuple[Any, int]]:
        return sorted(self._largest.items(), key=lambda item: -item[1])

    def _peak(self) -> int | None:
        if self._device_type != "cuda":
            return self._base_bytes + self._peak_bytes
        return self._statistic("allocated_bytes.all.peak")

    def _statistic(self, name: str) -> int | None:
        """Read a statistic of the allocator over the whole job; resetting it would take it from the job."""
        if self._device_type != "cuda":
            return None
        import torch

        value = torch.cuda.memory_stats().get(name)
        return None if value is None else int(value)


def _rises(series: list[int]) -> bool:
    return all(after > before for before, after in itertools.pairwise(series))


def _members(holder: Holder | None) -> list[Any]:
    """Return the contents of a holder's innermost container."""
    if holder is None or not holder.containers:
        return []
    container = holder.containers[0]
    return list(container.values()) if isinstance(container, dict) else list(container)


def _live_storages() -> Iterator[tuple[int, int, Any]]:
    """Yield (storage, its bytes, tensor) for every live tensor with ordinary memory."""
    import torch

    for each in live_objects((torch.Tensor, torch.nn.Parameter)):
        if each.layout is torch.strided and each.device.type != "meta":
            storage = each.untyped_storage()
            yield storage._cdata, storage.nbytes(), each


def _order_number() -> int:
    import torch

    return int(torch._C._autograd._get_sequence_nr())


def _tracking_mode(recorder: MemoryRecorder) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from flatout.measure.device.flops import flops_of

    makes_storage: dict[Any, bool] = {}
    are_views: dict[Any, bool] = {}

    def judge(func: Any) -> bool:
        schema = getattr(func, "_schema", None)
        fresh = schema is not None and not any(result.alias_info for result in schema.returns)
        # torch.tensor() and from_numpy() show only as a "lift" of memory made elsewhere.
        fresh = fresh or func is torch.ops.aten.lift_fresh.default
        makes_storage[func] = fresh
        results = schema.returns if schema is not None else ()
        are_views[func] = any(each.alias_info and not each.alias_info.is_write for each in results)
        return fresh

    def note(func: Any, args: Any, kwargs: Any, result: Any, frame: FrameType | None) -> None:
        flops = flops_of(func, args, kwargs, result)
        if flops is not None:
            recorder.computed(flops, result)
        fresh = makes_storage.get(func)
        fresh = fresh if fresh is not None else judge(func)
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not are_views[func]:
            recorder.moved((*args, *kwargs.values(), *results))
        if fresh:
            for tensor in results:
                recorder.born(tensor, frame, func.__name__.partition(".")[0])

    class Tracking(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # otherwise the first operator imports all of dynamo into the job

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            if recorder.failure is None:
                try:
                    # on a GPU, backward runs on a thread of its own, with no Python frame below this one
                    note(func, args, kwargs, result, sys._getframe().f_back)
                except Exception as error:  # noqa: BLE001 - ours; the job's operator has done its work
                    recorder.failure = error
            return result

    mode: Any = Tracking
    return mode()


def _insert(mode: Any) -> None:
    """Insert below every mode the job has entered, because their exit pops the top one blindly."""
    from torch.utils._python_dispatch import _push_mode

    above = _take_all()
    mode.__enter__()
    for each in above:
        _push_mode(each)


def _remove(mode: Any) -> None:
    from torch.utils._python_dispatch import _push_mode

    modes = _take_all()
    if any(each is mode for each in modes):
        _push_mode(mode)
        mode.__exit__(None, None, None)
    for each in modes:
        if each is not mode:
            _push_mode(each)


def _take_all() -> list[Any]:
    """Pop all dispatch modes of this thread, outermost first."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

    if any(getattr(mode, "_mode_key", None) is not None for mode in _get_current_dispatch_mode_stack()):
        raise RuntimeError("the job is being traced")
    return [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())][::-1]
