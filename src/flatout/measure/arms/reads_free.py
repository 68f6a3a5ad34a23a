"""Steps in which reading a value back from the GPU does not wait.

`loss.item()` makes the host wait until the GPU has caught up, but that costs only what it exposes: if the GPU
is behind anyway, removing the read gains nothing.  So the arm answers the reads of the user's own lines from
memory: each with what the same line read at the same call of the block's first step, which is never timed.  A
branch that depends on the value therefore repeats, and a loop that reads until it is done ends as before.

The arm does not touch reads that libraries make (a gradient scaler's check, an error check of clipping),
tensors whose shape differs from the remembered one, large tensors, and integers that the code uses as a size
or an index: last step's size does not fit this step's tensors.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.batches import bytes_of
from flatout.measure.clock import Clock, ident
from flatout.measure.evidence import Place
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode

READS = (
    *("item", "tolist", "cpu", "to", "__float__", "__int__", "__bool__"),
    *("__repr__", "__format__", "__contains__"),
)
COPIES = ("cpu", "to")
LEAST_SUSPICION = 0.05  # if the kernels were not recorded
MOST_BYTES = 1 << 20  # a larger read costs the copy itself
SIZES = frozenset(
    (
        *("range", "view", "reshape", "expand", "repeat", "split", "narrow", "chunk", "topk", "one_hot"),
        *("zeros", "ones", "full", "empty", "rand", "randn", "randint", "arange", "new_zeros", "new_ones"),
        *("select", "index_select", "unflatten", "repeat_interleave", "pack_padded_sequence", "pad"),
    )
)
Line = tuple[int, int, str]  # code, line, method
Read = Callable[..., Any]


class ReadsFree(Arm):
    """Answers the reads of the user's lines with what they read in the block's first step."""

    kind = label = "reads-free"

    def __init__(
        self, user_code: UserCode, clock: Clock, *, device: str, suspicion: float, place: Place | None = None
    ) -> None:
        self.suspicion, self.place = suspicion, place
        self._user_code, self._clock, self._device = user_code, clock, device
        self._patches = Patches()
        self._answering = False
        self._num_answered = 0
        self._calls: Counter[Line] = Counter()  # in this step
        self._known: dict[tuple[Line, int], tuple[Any, Any]] = {}  # (shape and dtype, the value read)

    def begin(self) -> None:
        import torch

        self._answering, self._num_answered = False, 0
        for name in READS:
            self._patches.replace(torch.Tensor, name, self._reader(name, getattr(torch.Tensor, name)))

    def step_end(self) -> None:
        self._answering = self.fell_back = True  # until something is answered
        self._calls.clear()

    def end(self) -> None:
        self._patches.undo()
        self._known.clear()
        self._calls.clear()
        if self._answering and not self._num_answered:
            self.refusal = "no line of the script reads the same kind of value in every step"

    def release(self) -> None:
        self._patches.undo()

    def _reader(self, name: str, read: Read) -> Read:
        def read_or_remember(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if (
                tensor.device.type != self._device
                or self.refusal is not None
                or ident() != self._clock.owner
                or not self._user_code.is_user(frame.f_code)
                or bytes_of(tensor) > MOST_BYTES
                or (name in COPIES and not _waits_for_copy(tensor, args, kwargs))
            ):
                return read(tensor, *args, **kwargs)
            line = (id(frame.f_code), frame.f_lineno, name)
            number = self._calls[line]
            self._calls[line] += 1
            if self._answering:
                return self._answer((line, number), read, tensor, args, kwargs)
            value = read(tensor, *args, **kwargs)
            if not (_is_whole(name, tensor) and self._is_size(frame)):
                kept = tensor.detach().cpu() if name == "tolist" else value
                self._known[line, number] = ((tensor.shape, tensor.dtype), kept)
            return value

        return read_or_remember

    def _is_size(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        path = file if linecache.getlines(file) else self._user_code.absolute(file)
        return is_size(path, frame.f_lineno)

    def _answer(self, key: tuple[Line, int], read: Read, tensor: Any, args: Any, kwargs: Any) -> Any:
        kind, kept = self._known.get(key, (None, None))
        if kind != (tensor.shape, tensor.dtype):
            return read(tensor, *args, **kwargs)
        self._num_answered += 1
        self.fell_back = False
        name = key[0][2]
        if name == "tolist":
            return kept.tolist()
        return kept.clone() if name in COPIES else kept


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose the arm on a GPU whose queue runs dry after reads of the user's own lines."""
    reads = [
        site for site in context.sites if site.kind == "sync" and site.device == "cuda" and site.via is None
    ]
    kernels = context.kernels
    if context.device != "cuda" or sum(site.calls_per_step for site in reads) < 1:
        return
    gap_s = kernels.sync_gap_s if kernels is not None else None
    if kernels is not None and (not gap_s or not kernels.num_syncs or kernels.num_syncs < 1):
        return
    share = gap_s / kernels.step_s if kernels is not None and gap_s else LEAST_SUSPICION
    place = max(reads, key=lambda site: site.calls_per_step).place
    yield ReadsFree(context.user_code, context.clock, device="cuda", suspicion=min(1.0, share), place=place)


def _waits_for_copy(tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `.cpu()` or `.to(...)` brings values without a gradient to the host."""
    import torch

    if kwargs.get("non_blocking") or (tensor.requires_grad and torch.is_grad_enabled()):
        return False
    asked = [*args, *kwargs.values()]
    return not asked or any(str(value) == "cpu" for value in asked if isinstance(value, (str, torch.device)))


def _is_whole(name: str, tensor: Any) -> bool:
    return name == "__int__" or (name in ("item", "tolist") and not tensor.is_floating_point())


@functools.lru_cache(maxsize=1024)
def is_size(file: str, line: int) -> bool:
    """Return whether the source uses an integer read at this line as a size or an index."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return True
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _spans(node, line)]
    if not around:
        return True
    functions = [node for node in around if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    scope: ast.AST = functions[-1] if functions else tree
    parts = list(_own_nodes(around[-1]))
    names = {node.id for node in parts if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for use in _uses_as_size(scope):
        for node in ast.walk(use):
            if (isinstance(node, ast.Name) and node.id in names) or (node in parts and _is_read(node)):
                return True
    return False


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without the statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, (ast.stmt, ast.excepthandler)):
            yield from ast.walk(child)


def _uses_as_size(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Subscript):
            yield node.slice
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in SIZES:
                yield from (*node.args, *(keyword.value for keyword in node.keywords))


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and (
        getattr(node.func, "attr", None) in READS or getattr(node.func, "id", None) == "int"
    )
