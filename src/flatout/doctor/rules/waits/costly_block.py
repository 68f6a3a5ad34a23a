"""FO207 costly-block

What it does
Finds a line or loop of your own that holds much of the step outside the model and the optimizer. It may be a
loop over parameters, a metric, a log, a queue or a simulator; no other rule knows a cause there. Lines that
compute the loss are not meant: they are part of the model.

Why it costs
The GPU has nothing to do while Python works between the phases. The time grows with the model or the batch,
and it is paid in every step.

Evidence
The training thread's stack was looked at up to a thousand times a second. The line holds at least 23 % of the
step outside the phases, which is what 1.3 times the speed would take, and no line that it calls holds as
much. The ceiling is measured: steps without the block, and what the device needs at its best for the
block's arithmetic and bytes. Where it could not be left out, there is none.

Fix
Do the work less often, or in one batched operation instead of a loop:

```python
torch._foreach_lerp_(averages, parameters, 1 - decay)   # instead of one line per parameter
if step % 50 == 0:
    log(losses)
```

Fix safety
Lossy: what the line does is yours, and doing it less often changes what it does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flatout.doctor.ceilings import RESOLVABLE_SPEEDUP, Proof, arm_at, host_is_hidden, prove
from flatout.doctor.finding import Ceiling, Finding
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence, Place, StackPath, Stacks

RULE = title_of(__doc__)
ARMS = ("knock-out",)
LEAST_SPEEDUP = 1.3
LEAST_SHARE = 1 - 1 / LEAST_SPEEDUP  # of the step
FEWEST_SAMPLES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class HeavyBlock:
    """A line and the samples in which it was on the stack."""

    place: Place
    samples: int
    callers: tuple[Place, ...]  # outermost first


def detect(evidence: Evidence) -> list[Finding]:
    step_s, rest_s = evidence.step_s, evidence.phase_s("rest")
    if evidence.stacks is None or not step_s or not rest_s or host_is_hidden(evidence):
        return []
    samples = evidence.stacks.samples_by_phase.get("rest", 0)
    if samples < FEWEST_SAMPLES:
        return []
    # Shares are of the step as it was timed: the looks slow the steps in which they are taken.
    rest_share = min(1.0, rest_s / step_s)
    loss = set(evidence.stacks.differentiable)  # its lines are the model's, though no module is called there
    paths = [
        replace(path, places=tuple(_as_block(place, evidence.stacks) for place in path.places))
        for path in evidence.stacks.paths
        if path.phase == "rest" and path.places and path.places[-1] not in loss
    ]
    findings = []
    for block in heavy_blocks(paths, least=LEAST_SHARE / rest_share * samples):
        if _line(block.place) in _lines_of_the_loop(evidence.stacks):
            continue
        proof = _proof(block, evidence)
        share = block.samples / samples * rest_share
        if proof.ceiling is not None:
            pays = proof.ceiling.speedup >= LEAST_SPEEDUP and _low(proof.ceiling) > RESOLVABLE_SPEEDUP
        else:  # thin evidence is not enough where nothing was left out
            pays = not proof.refuted and at_least(block.samples, samples) * rest_share >= LEAST_SHARE
        if pays:
            findings.append(_finding(block, share=share, step_s=step_s, num=samples, proof=proof))
    return findings


def at_least(found: int, looks: int) -> float:
    """The lower end of the 95 % interval (Wilson's) of a share that was `found` in some `looks`."""
    z, share = 1.96, found / looks
    spread = z * math.sqrt(share * (1 - share) / looks + (z / looks / 2) ** 2)
    return (share + z**2 / looks / 2 - spread) / (1 + z**2 / looks)


def _proof(block: HeavyBlock, evidence: Evidence) -> Proof:
    """The steps without a block, or else without the innermost statement that calls it."""
    for place in (block.place, *reversed(block.callers)):
        if arm_at(evidence, ARMS[0], place) is not None:
            return prove(evidence, ARMS, place=place)
    return prove(evidence, ARMS, place=block.place)


def _low(ceiling: Ceiling) -> float:
    return ceiling.speedup if ceiling.speedup_low is None else ceiling.speedup_low


def _as_block(place: Place, stacks: Stacks) -> Place:
    """The outermost loop around a line that is not the training loop; the line itself where there is none."""
    trains = _lines_of_the_loop(stacks)
    for header in stacks.loops.get(str(place), ()):
        if (place.file, header) not in trains:
            return replace(place, line=header)
    return place


def _lines_of_the_loop(stacks: Stacks) -> set[tuple[str, int]]:
    """Lines, and loops around lines, that were on the stack in another phase: they hold the whole step."""
    places = [place for path in stacks.paths if path.phase != "rest" for place in path.places]
    headers = {(place.file, header) for place in places for header in stacks.loops.get(str(place), ())}
    return headers | {_line(place) for place in places}


def heavy_blocks(
    paths: Sequence[StackPath], *, least: float, callers: tuple[Place, ...] = ()
) -> Iterator[HeavyBlock]:
    """The innermost lines that hold at least `least` samples each."""
    depth = len(callers)
    at: Counter[Place] = Counter()
    for path in paths:
        if len(path.places) > depth:
            at[path.places[depth]] += path.samples
    for place, samples in at.most_common():
        if samples < least:
            return
        below = [path for path in paths if len(path.places) > depth and path.places[depth] == place]
        inner = list(heavy_blocks(below, least=least, callers=(*callers, place)))
        yield from inner
        if not inner:
            yield HeavyBlock(place=place, samples=samples, callers=callers)


def explains(finding: Finding, other: Finding, evidence: Evidence) -> bool:
    """Whether `other`, of another rule, speaks of the block that `finding` names or of a line inside it."""
    if finding.code != RULE.code or other.code == RULE.code or other.place is None or evidence.stacks is None:
        return False
    for path in evidence.stacks.paths:
        blocks = [_as_block(place, evidence.stacks) for place in path.places]
        if finding.place in blocks:
            inside = path.places[blocks.index(finding.place) :]
            if _line(other.place) in {_line(finding.place), *map(_line, inside)}:
                return True
    return False


def _line(place: Place) -> tuple[str, int]:
    return place.file, place.line


def _finding(block: HeavyBlock, *, share: float, step_s: float, num: int, proof: Proof) -> Finding:
    called = f", called from {block.callers[-1]}" if block.callers else ""
    return RULE.finding(
        block.place,
        f"this block holds {show_share(share)} of the step ({show_seconds(share * step_s)}), outside the "
        f"model, the backward pass and the optimizer{called}",
        figures=(f"on the stack in {block.samples} of {num} looks at the time between the phases",),
        share=share,
        ceiling=proof.ceiling,
        fix="do this less often, in one batched operation, or off the training thread",
        safety="lossy",
        no_ceiling=proof.reason,
    )
