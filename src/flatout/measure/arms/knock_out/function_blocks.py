"""Blocks of functions that steps call: the function gets new code while its arm runs, then its own again.

Whole functions come first; if one shows a gain, the blocks inside it follow.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.arms.knock_out.blocks import (
    Block,
    FunctionNode,
    find_function,
    inner_blocks,
    whole_block,
)
from flatout.measure.arms.knock_out.knock_out import ALWAYS, LEAST_SHARE, KnockOut, Shares
from flatout.measure.arms.knock_out.rewrite import KNOCK_OUT, CannotRewrite, parse_file, rewritten
from flatout.measure.evidence import Place
from flatout.measure.lines.live_objects import live_objects
from flatout.measure.phases import has_compiled

if TYPE_CHECKING:
    import ast

    from flatout.measure.arms.knock_out.kept_results import KeptResults

MOST_ALWAYS = 8  # blocks of one function
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user's that steps call."""

    code: CodeType
    functions: tuple[FunctionType, ...]
    path: str
    file: str
    node: FunctionNode
    tree: ast.AST

    @property
    def name(self) -> str:
        return self.code.co_qualname.replace("<locals>.", "")


class FunctionBlock(KnockOut):
    """Steps without one block of a function."""

    def __init__(
        self,
        context: ArmContext,
        shares: Shares,
        function: UserFunction,
        block: Block,
        *,
        suspicion: float,
        parent: str | None = None,
    ) -> None:
        place = Place(file=function.file, line=block.first_line, function=function.name)
        super().__init__(context, shares, place, block, suspicion=suspicion)
        self.parent = parent
        self._function = function
        self._name = f"{KNOCK_OUT}_{next(_numbers)}"
        self._code: CodeType | None = None
        self._before: list[tuple[FunctionType, CodeType]] = []

    def put_in(self, results: KeptResults) -> None:
        try:
            code = self._code = self._code or self._rewritten()
        except CannotRewrite as error:
            self.refusal = str(error)
            return
        for function in self._function.functions:
            self._before.append((function, function.__code__))
            function.__globals__[self._name] = results
            function.__code__ = code

    def take_out(self) -> None:
        """Restore the functions' own code; a running call, or another thread, still executes the new one."""
        for function, code in self._before:
            function.__code__ = code
        self._before.clear()

    def _rewritten(self) -> CodeType:
        """Return the code with a switch of its own, because it may still run while another arm is tried."""
        code = rewritten(self._function.code, self._function.path, self._block)
        names = (self._name if name == KNOCK_OUT else name for name in code.co_names)
        return code.replace(co_names=tuple(names))

    def refine(self) -> Iterable[Arm]:
        return propose_blocks(self._context, self._shares, self._function, self._block, parent=self.label)


def propose(context: ArmContext) -> Iterable[Arm]:
    shares = Shares(context)
    found = [
        (shares.of(function.file, function.node.lineno, function.node.end_lineno or 0), function)
        for function in user_functions(context)
    ]
    outermost = {call.place.function for call in context.module_calls}
    again = set(recomputed(context))
    for share, function in found:
        if (function.file, function.name) in again:
            continue
        is_model = function.code.co_name == "forward" or function.name in outermost
        if share < LEAST_SHARE and not (is_model and context.device == "cuda"):
            continue
        block = whole_block(function.node, function.tree)
        if has_compiled() and not shares.sampled(function.file, block.first_line, block.last_line):
            continue  # it runs inside a compiled graph, or not at all
        arm = FunctionBlock(context, shares, function, block, suspicion=max(share, ALWAYS))
        yield arm
        if arm.refusal is not None:
            yield from propose_blocks(context, shares, function, block)


def recomputed(context: ArmContext) -> Iterator[tuple[str, str | None]]:
    """Yield functions that the backward pass repeats below a checkpoint, with equal results expected."""
    paths = context.stacks.paths if context.stacks is not None else ()
    checkpoints = {site.place for site in context.sites if site.op == "checkpoint"}
    begin = {path.places[-1] for path in paths if path.phase == "backward" and path.places}
    for path in paths:
        above = begin if path.phase == "backward" else checkpoints
        depth = next((depth for depth, place in enumerate(path.places) if place in above), None)
        if depth is not None:
            yield from ((place.file, place.function) for place in path.places[depth + 1 :])


def propose_blocks(
    context: ArmContext, shares: Shares, function: UserFunction, block: Block, parent: str | None = None
) -> Iterator[Arm]:
    """Yield the heavy blocks inside a block; on a GPU, whose time host samples miss, some in any case."""
    found = [
        (shares.of(function.file, inner.first_line, inner.last_line), inner)
        for inner in inner_blocks(function.node, block, function.tree)
    ]
    always = MOST_ALWAYS if context.device == "cuda" else 0
    for number, (share, inner) in enumerate(sorted(found, key=lambda pair: -pair[0])):
        if share >= LEAST_SHARE or number < always:
            yield FunctionBlock(context, shares, function, inner, suspicion=max(share, ALWAYS), parent=parent)


def user_functions(context: ArmContext) -> Iterator[UserFunction]:
    """List the user's functions that were seen and that steps call again."""
    user_code = context.user_code
    running = set(map(id, running_codes(context)))
    codes = {
        id(code): code for code in user_code.codes() if id(code) not in running and code.co_name[:1] != "<"
    }
    functions: dict[int, list[FunctionType]] = defaultdict(list)
    for function in live_objects([FunctionType]):
        if id(function.__code__) in codes:
            functions[id(function.__code__)].append(function)
    trees: dict[str, Any] = {}
    for number, own in functions.items():
        code = codes[number]
        path = (
            user_code.absolute(code.co_filename) if not code.co_filename.startswith("<") else code.co_filename
        )
        if path not in trees:
            trees[path] = parse_file(path)
        node = find_function(trees[path], code.co_name, code.co_firstlineno) if trees[path] else None
        if node is not None and not _is_compiled(code):
            file = user_code.place_in(code).file
            yield UserFunction(code, tuple(own), path, file, node, trees[path])


def running_codes(context: ArmContext) -> Iterator[CodeType]:
    """Yield the code on the stack down to the training loop; it is not called again and stays unchanged."""
    frame: FrameType | None = sys._getframe()
    frames: list[FrameType] = []
    while frame is not None:
        if context.user_code.is_user(frame.f_code):
            frames.append(frame)
        frame = frame.f_back
    for position, each in enumerate(frames):  # innermost first
        place = context.user_code.place_in(each.f_code, line=each.f_lineno)
        loops = context.user_code.loops_around(place)
        if any(line > each.f_code.co_firstlineno or each.f_code.co_name == "<module>" for line in loops):
            yield from (above.f_code for above in frames[position:])
            return
    yield from (each.f_code for each in frames if each.f_code.co_name == "<module>")


def _is_compiled(code: CodeType) -> bool:
    """Return whether dynamo has compiled this code."""
    if not has_compiled():
        return False
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return bool(_debug_get_cache_entry_list(code))
