"""Steps without a block of the user's own code: the time they save is what the block really costs.

A profiler adds up the operator's own calls and misses what a loop causes elsewhere: gradients accumulated row
by row, a thousand-way `cat`, launches that starve the GPU.  So the arm removes a whole block with
its backward pass: the first step of a block keeps its results, and the other steps use them in its place.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from flatout.measure.arms.arm import ONE_BATCH, REAL, Arm, ArmContext
from flatout.measure.arms.knock_out.blocks import Block
from flatout.measure.evidence import Place
from flatout.measure.patches import Patches
from flatout.measure.phases import has_compiled

if TYPE_CHECKING:
    from flatout.measure.arms.knock_out.kept_results import KeptResults

LEAST_SHARE = 0.05  # of the step
ALWAYS = 0.05  # the suspicion of blocks that are tried whatever the host's samples say
DEAR_STEP_S = 2.0  # too long for one that shows nothing
MOST_KEPT_BYTES = 1 << 26  # between two blocks of steps


class Shares:
    """The share of the step that lines of a file hold, as seen from the host."""

    def __init__(self, context: ArmContext) -> None:
        self._context = context
        # the shapes of a block's inputs change from step to step; short steps find out by trying
        self.are_ragged = context.step_s >= DEAR_STEP_S and _may_be_ragged(context)
        stacks = context.stacks
        self._total = sum(stacks.samples_by_phase.values()) if stacks is not None else 0
        by_phase = stacks.samples_by_phase if stacks is not None else {}
        forward = max(1, by_phase.get("forward", 0))
        # a line's backward pass runs elsewhere, but is removed with the line
        self._with_backward = 1 + by_phase.get("backward", 0) / forward

    def of(self, file: str, first_line: int, last_line: int) -> float:
        """Return the share of the lines from `first_line` to `last_line`, including what they call."""
        return max(self.sampled(file, first_line, last_line), self._attributed(file, first_line, last_line))

    def sampled(self, file: str, first_line: int, last_line: int) -> float:
        """Return the share by stack samples alone."""
        found = self._looks(file, first_line, last_line)
        weighted = found.total() + found["forward"] * (self._with_backward - 1)
        return weighted / max(1, self._total)

    def makes_batches(self, file: str, first_line: int, last_line: int) -> bool:
        """Return whether most samples of these lines fell into the wait for a batch."""
        found = self._looks(file, first_line, last_line)
        return found["wait"] * 2 > found.total()

    def _looks(self, file: str, first_line: int, last_line: int) -> Counter[str]:
        """Count how often the lines were on the stack, by phase."""
        found: Counter[str] = Counter()
        for path in self._context.stacks.paths if self._context.stacks is not None else ():
            if any(place.file == file and first_line <= place.line <= last_line for place in path.places):
                found[path.phase] += path.samples
        return found

    def _attributed(self, file: str, first_line: int, last_line: int) -> float:
        step_s = self._context.attributed_step_s
        if not step_s:
            return 0.0
        return sum(
            ((site.host_s or 0.0) + (site.backward_s or 0.0) + (site.derived_s or 0.0)) / step_s
            for site in self._context.sites
            if site.place.file == file and first_line <= site.place.line <= last_line
        )


class KnockOut(Arm):
    """Steps without one block; subclasses switch it off."""

    kind = "knock-out"

    def __init__(
        self, context: ArmContext, shares: Shares, place: Place, block: Block, *, suspicion: float
    ) -> None:
        self._context, self._shares, self._block = context, shares, block
        self.place, self.last_line, self.function = place, block.last_line, place.function
        self.label = f"{self.kind} {place}"
        self.suspicion, self.refusal = suspicion, block.refusal
        # code that makes batches does not run on served batches; for other code the first block decides
        self._makes_batches = shares.makes_batches(place.file, block.first_line, block.last_line)
        self._on_one_batch = False if self._makes_batches else None
        self._results: KeptResults | None = None
        self._num_idle = 0  # steps of the arm in which the block did not run
        self._patches = Patches()
        self._count: Any = None
        self._flops: float | None = None
        self._counting = False

    @property
    def baseline(self) -> str:  # type: ignore[override]
        """The label of real steps, or of steps on a single batch if input shapes change from step to step."""
        on_one_batch = self._shares.are_ragged if self._on_one_batch is None else self._on_one_batch
        return ONE_BATCH if on_one_batch else REAL

    @property
    def serves(self) -> str | None:  # type: ignore[override]
        return "one" if self.baseline == ONE_BATCH else None

    def put_in(self, results: KeptResults) -> None:
        """Make the block ask `results` from here on."""
        raise NotImplementedError

    def take_out(self) -> None:
        """Let the block run unchanged."""
        raise NotImplementedError

    # -- a block of steps

    def begin(self) -> None:
        if self._on_one_batch is None:
            self._on_one_batch = self._shares.are_ragged
        results = self._results = self._results or self._make_results()
        results.on_one_batch = self.baseline == ONE_BATCH
        results.giving = results.are_known
        results.is_on = True
        results.reset()
        self._num_idle = 0
        self.put_in(results)
        self._patches.on_undo(keep_random_state())
        keep_gradients(self._context.optimizers, self._patches)

    def step_end(self) -> None:
        results = self._results
        if results is None:
            return
        self._stop_counting()
        if results.failure is not None:
            self.refusal = results.failure
        elif results.num_calls == 0:
            self._num_idle += 1  # after the end of the step the old code runs until the next call
            if self._num_idle > 1:
                self.refusal = "it did not run in a step"
        elif not results.giving:
            results.num_steps += 1
            results.giving = results.are_known
            self._set_roofline(results)
        elif results.num_unknown and not self._makes_batches and self._context.loaders.trained_on():
            self._on_one_batch = self._shares.are_ragged = True
        results.reset()

    def end(self) -> None:
        self.take_out()
        if self._results is not None:
            self._results.is_on = False
        self._stop_counting()
        self._patches.undo()
        if self._results is not None and self._results.num_bytes > MOST_KEPT_BYTES:
            self._results.forget()

    def release(self) -> None:
        if self._results is not None:
            self._results.failure = "its steps did not end"

    def _make_results(self) -> KeptResults:
        from flatout.measure.arms.knock_out.kept_results import KeptResults

        clock = self._context.clock
        return KeptResults(
            self._block,
            owner=lambda: clock.owner,
            function=self.function,
            on_begin=self._start_counting,
            on_end=self._stop_counting,
            on_fall_back=self._fall_back,
            book_out=clock.book_out,
        )

    def _fall_back(self) -> None:
        self.fell_back = True

    # -- the roofline

    def _start_counting(self) -> None:
        """Count flops in the step whose results are kept; skip compiled code, which a mode would retrace."""
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


def _may_be_ragged(context: ArmContext) -> bool:
    """Return whether batches differ in their shapes, or hold lists whose effect on shapes is unknown."""
    from flatout.measure.arms.knock_out.kept_results import is_opaque

    record = context.loaders.trained_on()
    return record is not None and (record.is_ragged or any(is_opaque(kept.batch) for kept in record.kept))


def keep_random_state() -> Callable[[], None]:
    """Save the state of the random generators and return a function that restores it."""
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


def keep_gradients(optimizers: Iterable[Any], patches: Patches) -> None:
    """Give zeros to parameters that a backward pass leaves without a gradient, until the patches are undone.

    Removing a block also removes its backward pass: the optimizer would skip the parameters inside it. Zeros
    are sparse where the last gradient was, at the same rows: optimizers for sparse gradients take no others.
    """
    import torch

    parameters = [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    sparse = {id(each): each.grad for each in parameters if each.grad.layout == torch.sparse_coo}
    zeros: dict[int, Any] = {}
    backward: Callable[..., Any] = torch.autograd.backward

    def backward_and_fill(*args: Any, **kwargs: Any) -> Any:
        result = backward(*args, **kwargs)
        for parameter in parameters:
            if parameter.grad is None:
                known = zeros.get(id(parameter))
                if known is None:
                    last = sparse.get(id(parameter))
                    known = torch.zeros_like(parameter) if last is None else _zeroed(last)
                    zeros[id(parameter)] = known
                parameter.grad = known
        return result

    patches.replace(torch.autograd, "backward", backward_and_fill)


def _zeroed(gradient: Any) -> Any:
    """Return a sparse gradient of zeros at the rows of `gradient`, which `zeros_like` would drop."""
    zeroed = gradient.clone()
    zeroed._values().zero_()
    return zeroed
