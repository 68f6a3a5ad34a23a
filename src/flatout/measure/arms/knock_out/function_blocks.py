"""Steps without a block of the user's own code: what they take is what the block really costs.

A profiler adds up what an operator's own call took, and misses what a loop makes others do: gradients that
are accumulated row by row, a thousand-way `cat`, launches that starve the GPU.  So a block is taken away
whole, with its backward pass: in the first step of an arm its results are kept, in the others they stand in
for it.  The function gets new code for that while the arm runs, and its own code back afterwards.

Functions come first; where one gains, the blocks inside it follow.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from flatout.measure.arms.arm import REAL, Arm, ArmContext
from flatout.measure.arms.kept_batches import ONE_BATCH
from flatout.measure.arms.knock_out.blocks import (
    Block,
    FunctionNode,
    find_function,
    inner_blocks,
    whole_block,
)
from flatout.measure.arms.knock_out.rewrite import KNOCK_OUT, CannotRewrite, parse_file, rewritten
from flatout.measure.clock import Clock
from flatout.measure.evidence import Place
from flatout.measure.live_objects import live_objects
from flatout.measure.patches import Patches
from flatout.measure.phases import has_compiled

if TYPE_CHECKING:
    import ast

    from flatout.measure.arms.knock_out.kept_results import KeptResults

LEAST_SHARE = 0.05  # of the step
ALWAYS = 0.05  # the suspicion of blocks that are tried whatever the host's samples say
MOST_KEPT_BYTES = 1 << 26  # between two blocks of steps
MOST_ALWAYS = 8  # blocks of one function


class Shares:
    """How much of the step the lines of a file hold, by what the instruments saw of the host."""

    def __init__(self, context: ArmContext) -> None:
        self._context = context
        self.are_ragged = False  # the shapes of a block's inputs change from step to step
        stacks = context.stacks
        self._total = sum(stacks.samples_by_phase.values()) if stacks is not None else 0
        by_phase = stacks.samples_by_phase if stacks is not None else {}
        forward = max(1, by_phase.get("forward", 0))
        # the backward pass of a line is done elsewhere, and goes with it
        self._with_backward = 1 + by_phase.get("backward", 0) / forward

    def of(self, file: str, first_line: int, last_line: int) -> float:
        """The share of the lines from `first_line` to `last_line`, with what they call."""
        return max(self._sampled(file, first_line, last_line), self._attributed(file, first_line, last_line))

    def _sampled(self, file: str, first_line: int, last_line: int) -> float:
        stacks = self._context.stacks
        if stacks is None or not self._total:
            return 0.0
        found = 0.0
        for path in stacks.paths:
            if any(place.file == file and first_line <= place.line <= last_line for place in path.places):
                found += path.samples * (self._with_backward if path.phase == "forward" else 1.0)
        return found / self._total

    def _attributed(self, file: str, first_line: int, last_line: int) -> float:
        step_s = self._context.attributed_step_s
        if not step_s:
            return 0.0
        return sum(
            ((site.host_s or 0.0) + (site.backward_s or 0.0) + (site.derived_s or 0.0)) / step_s
            for site in self._context.sites
            if site.place.file == file and first_line <= site.place.line <= last_line
        )


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
    def class_name(self) -> str | None:
        parts = self.code.co_qualname.split(".")
        return parts[-2] if len(parts) > 1 and parts[-2] != "<locals>" else None

    @property
    def name(self) -> str:
        return self.code.co_qualname.replace("<locals>.", "")


class KnockOut(Arm):
    """Steps without one block of a function."""

    kind = "knock-out"

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
        self._context, self._shares, self._function, self._block = context, shares, function, block
        self.place = Place(file=function.file, line=block.first_line, function=function.name)
        self.last_line, self.function = block.last_line, function.name
        self.label = f"{self.kind} {self.place}"
        self.suspicion, self.parent = suspicion, parent
        self._on_one_batch: bool | None = None  # decided with the first block
        self.refusal = block.refusal
        self._results: KeptResults | None = None
        self._code: CodeType | None = None
        self._before: list[tuple[FunctionType, CodeType]] = []
        self._patches = Patches()
        self._count: Any = None
        self._flops: float | None = None
        self._counting = False

    @property
    def baseline(self) -> str:  # type: ignore[override]
        """Real steps; where shapes change from step to step, steps on one and the same batch."""
        on_one_batch = self._shares.are_ragged if self._on_one_batch is None else self._on_one_batch
        return ONE_BATCH if on_one_batch else REAL

    @property
    def serves(self) -> str | None:  # type: ignore[override]
        return "one" if self.baseline == ONE_BATCH else None

    # -- a block of steps

    def begin(self) -> None:
        from flatout.measure.arms.knock_out.lost_gradients import keep_gradients

        if self._results is None:
            self._prepare()
        if self._on_one_batch is None:
            self._on_one_batch = self._shares.are_ragged
        results, code = self._results, self._code
        assert results is not None and code is not None
        results.giving = not results.is_empty
        results.reset()
        for function in self._function.functions:
            self._before.append((function, function.__code__))
            function.__globals__[KNOCK_OUT] = results
            function.__code__ = code
        self._patches.on_undo(keep_random_state())
        keep_gradients(self._context.optimizers, self._patches)

    def step_end(self) -> None:
        results = self._results
        if results is None:
            return
        self._stop_counting()
        self.fell_back = False
        if results.failure is not None:
            self.refusal = results.failure
        elif results.num_calls == 0:
            self.refusal = "it did not run in a step"
        elif not results.giving:
            results.giving = True
            self._set_roofline(results)
        elif results.num_unknown and self._context.loaders.trained_on() is not None:
            self._on_one_batch = self._shares.are_ragged = True
        results.reset()

    def end(self) -> None:
        for function, code in self._before:
            function.__code__ = code
            function.__globals__.pop(KNOCK_OUT, None)
        self._before.clear()
        self._stop_counting()
        self._patches.undo()
        if self._results is not None and self._results.num_bytes > MOST_KEPT_BYTES:
            self._results.forget()

    def release(self) -> None:
        if self._results is not None:
            self._results.failure = "its steps did not end"

    def refine(self) -> Iterable[Arm]:
        return propose_blocks(self._context, self._shares, self._function, self._block, parent=self.label)

    def _prepare(self) -> None:
        from flatout.measure.arms.knock_out.kept_results import KeptResults

        clock: Clock = self._context.clock
        try:
            self._code = rewritten(self._function.code, self._function.path, self._block)
        except CannotRewrite as error:
            self.refusal = str(error)
            raise
        self._results = KeptResults(
            self._block,
            owner=lambda: clock.owner,
            class_name=self._function.class_name,
            on_begin=self._start_counting,
            on_end=self._stop_counting,
            on_fall_back=self._fall_back,
        )

    def _fall_back(self) -> None:
        self.fell_back = True

    # -- the roofline

    def _start_counting(self) -> None:
        """In the step whose results are kept; compiled code would be traced anew under a mode."""
        if self._flops is None and not self._counting and not has_compiled():
            from flatout.measure.arms.knock_out.roofline import FlopCount

            self._count = self._count or FlopCount()
            self._count.__enter__()
            self._counting = True

    def _stop_counting(self) -> None:
        if self._counting:
            self._count.__exit__(None, None, None)
            self._counting = False

    def _set_roofline(self, results: KeptResults) -> None:
        from flatout.measure.arms.knock_out.roofline import roofline_s

        if self._count is not None:
            self._flops = self._count.flops
            self.roofline_s = roofline_s(
                flops=self._flops,
                num_bytes=results.num_bytes,
                with_backward=results.requires_grad,
                device=self._context.device,
            )


def keep_random_state() -> Callable[[], None]:
    """Remember the generators' state; the steps that follow draw what they would have drawn."""
    import torch

    states: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))

    def put_back() -> None:
        for set_state, state in states:
            set_state(state)

    return put_back


# -- which blocks


def propose(context: ArmContext) -> Iterable[Arm]:
    shares = Shares(context)
    found = [
        (shares.of(function.file, function.node.lineno, function.node.end_lineno or 0), function)
        for function in user_functions(context)
    ]
    outermost = {call.place.function for call in context.module_calls}
    for share, function in found:
        block = whole_block(function.node, function.tree)
        is_model = function.code.co_name == "forward" or function.name in outermost
        if share < LEAST_SHARE and not (is_model and context.device == "cuda"):
            continue
        arm = KnockOut(context, shares, function, block, suspicion=max(share, ALWAYS))
        yield arm
        if arm.refusal is not None:
            yield from propose_blocks(context, shares, function, block)


def propose_blocks(
    context: ArmContext, shares: Shares, function: UserFunction, block: Block, parent: str | None = None
) -> Iterator[Arm]:
    """The heavy blocks inside a block; on a GPU, whose time the host's samples miss, some in any case."""
    found = [
        (shares.of(function.file, inner.first_line, inner.last_line), inner)
        for inner in inner_blocks(function.node, block, function.tree)
    ]
    always = MOST_ALWAYS if context.device == "cuda" else 0
    for number, (share, inner) in enumerate(sorted(found, key=lambda pair: -pair[0])):
        if share >= LEAST_SHARE or number < always:
            yield KnockOut(context, shares, function, inner, suspicion=max(share, ALWAYS), parent=parent)


def user_functions(context: ArmContext) -> Iterator[UserFunction]:
    """Functions of the user's that were seen and that steps call anew."""
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
    """Code on the stack down to the loop of the steps: it is not called again, so it stays as it is."""
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
    """Whether dynamo has compiled this code."""
    if not has_compiled():
        return False
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return bool(_debug_get_cache_entry_list(code))
