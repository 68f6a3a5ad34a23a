"""The causal map of a step: what the step would take without each block of the user's own code.

A profile adds up where time was spent; work overlaps, and a line can slow others down.  So blocks are knocked
out, one at a time, in steps interleaved with ordinary ones: the time that such a step saves is the cost of
the block, including its backward and everything it starves.  The map needs no rule.

A block is inside another one if its lines are, or if the other one calls it, as stack samples of the training
thread show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flatout.doctor.ceilings import KNOCKED_OUT, holds, loading_s, num_lines
from flatout.ground.units import show_interval, show_ratio
from flatout.measure.evidence import Counterfactual, Evidence, Place, StackPath

SLACK = 1.2  # between two measured figures
CALLS = 0.8  # of a block's samples, the share that has the caller on the stack too


@dataclass(frozen=True, kw_only=True, slots=True)
class MapBlock:
    """A block of the user's code and the step without it."""

    place: Place
    last_line: int
    step_s: float  # without the block
    speedup: float
    speedup_low: float  # 95 % interval
    speedup_high: float
    freed_share: float  # of the step
    blocks: tuple[MapBlock, ...] = ()  # inside it, largest first

    @property
    def where(self) -> str:
        """`model.py:68-88`."""
        last = f"-{self.last_line}" if self.last_line > self.place.line else ""
        return f"{self.place}{last}"

    @property
    def is_noise(self) -> bool:
        """Whether this run cannot show that the step is faster without the block."""
        return self.speedup_low <= 1

    @property
    def gain(self) -> str:
        """`2.17× [1.94, 2.40]`, or that the gain is within the noise."""
        figure = "noise" if self.is_noise else show_ratio(self.speedup)
        return f"{figure} {show_interval(self.speedup_low, self.speedup_high)}"


def causal_map(evidence: Evidence) -> tuple[MapBlock, ...]:
    """Return the blocks that were knocked out, largest first, each with the blocks inside it."""
    found = _distinct([each for each in evidence.counterfactuals if each.kind == KNOCKED_OUT and each.place])
    paths = evidence.stacks.paths if evidence.stacks is not None else ()
    around = {
        inner.label: [outer for outer in found if outer is not inner and encloses(outer, inner, paths)]
        for inner in found
    }
    parents = {
        label: max(outer, key=lambda each: len(around[each.label]))
        for label, outer in around.items()
        if outer
    }
    return _largest_first(
        _block(each, found, parents, evidence) for each in found if each.label not in parents
    )


def flat(blocks: Sequence[MapBlock], *, depth: int = 0, brief: bool = False) -> list[tuple[int, MapBlock]]:
    """Return (depth, block) from the top down; if brief, replace a block by an inner one of the same cost."""
    listed = []
    for block in blocks:
        shown = block
        while brief and len(shown.blocks) == 1 and shown.blocks[0].step_s <= SLACK * shown.step_s:
            shown = shown.blocks[0]
        listed += [(depth, shown), *flat(shown.blocks, depth=depth + 1, brief=brief)]
    return listed


def encloses(outer: Counterfactual, inner: Counterfactual, paths: Sequence[StackPath]) -> bool:
    """Return whether `inner` is within the lines of `outer`, or is called from there."""
    if inner.parent == outer.label:
        return True
    assert outer.place is not None
    assert inner.place is not None
    last = inner.last_line or inner.place.line
    if outer.place.file == inner.place.file and holds(outer, inner.place):
        return holds(outer, replace(inner.place, line=last)) and num_lines(outer) > num_lines(inner)
    if _freed(outer) < _freed(inner) / SLACK or holds(inner, outer.place):
        return False  # a block that holds another costs at least as much
    seen = below = 0
    for path in paths:
        depth = next((i for i, place in enumerate(path.places) if holds(inner, place)), None)
        if depth is not None:
            seen += path.samples
            below += path.samples * any(holds(outer, place) for place in path.places[:depth])
    return seen > 0 and below >= CALLS * seen


def _freed(found: Counterfactual) -> float:
    """Return the share of the step that a block costs."""
    return max(0.0, 1 - 1 / found.speedup) if found.speedup > 0 else 0.0


def _distinct(found: Sequence[Counterfactual]) -> list[Counterfactual]:
    """Return one arm per run of lines, the one with the most steps."""
    kept: dict[tuple[str, int, int], Counterfactual] = {}
    for each in sorted(found, key=lambda each: each.num_steps):
        assert each.place is not None
        kept[each.place.file, each.place.line, each.last_line or each.place.line] = each
    return list(kept.values())


def _block(
    found: Counterfactual,
    others: Sequence[Counterfactual],
    parents: dict[str, Counterfactual],
    evidence: Evidence,
) -> MapBlock:
    assert found.place is not None
    inside = (_block(each, others, parents, evidence) for each in others if parents.get(each.label) is found)
    apart_s = loading_s(found, evidence)
    whole_s = found.baseline_step_s + apart_s

    def of_the_job(speedup: float) -> float:
        without_s = found.baseline_step_s / speedup + apart_s if speedup > 0 else 0.0
        return whole_s / without_s if without_s > 0 else 0.0

    speedup = of_the_job(found.speedup)
    return MapBlock(
        place=found.place,
        last_line=found.last_line or found.place.line,
        # of the job's own step: an arm may run on one batch, whose step is longer or shorter
        step_s=(evidence.step_s or whole_s) / speedup if speedup > 0 else found.step_s,
        speedup=speedup,
        speedup_low=of_the_job(found.speedup_low),
        speedup_high=of_the_job(found.speedup_high),
        freed_share=max(0.0, 1 - 1 / speedup) if speedup > 0 else 0.0,
        blocks=_largest_first(inside),
    )


def _largest_first(blocks: Iterable[MapBlock]) -> tuple[MapBlock, ...]:
    return tuple(sorted(blocks, key=lambda block: (block.step_s, block.place.file, block.place.line)))
