"""FO207 costly-block

What it does
Finds a line or loop of your own that takes much of the step outside the model and the optimizer. It may be
a loop over parameters, a metric, a log, a queue or a simulator; no other rule knows a cause there. Inside
the model and the loss, where work is expected, it finds loops that take many times what the device needs
for their arithmetic.

Why it costs
The GPU has nothing to do while Python works. The time grows with the model or the batch, and every step
pays it.

Evidence
The training thread's stack was sampled up to a thousand times a second. The line holds at least 23 % of the
step outside the phases, which corresponds to 1.3 times the speed, and no line that it calls holds as much.
The ceiling is measured: steps without the block, plus what the device needs at its best for the block's
arithmetic and bytes. If the block could not be left out, there is no ceiling. A loop in the model is found
only by steps without it: they are 1.3 times as fast, and the loop takes fifty times what the device needs
at its best. A loop over layers, each of which is called once, is the model itself and not reported.

Fix
Do this less often, in one batched operation, or off the training thread:

```diff
-for average, parameter in zip(averages, parameters):
-    average.mul_(decay).add_(parameter, alpha=1 - decay)
+torch._foreach_lerp_(averages, parameters, 1 - decay)
-log(losses)
+if step % 50 == 0:
+    log(losses)
```

Fix safety
Lossy: only you know what the line is for, and doing it less often changes what it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flatout.doctor.causal_map import encloses
from flatout.doctor.ceilings import (
    RESOLVABLE_SPEEDUP,
    ArmProof,
    arm_at,
    ceiling_of,
    holds,
    host_is_hidden,
    prove,
)
from flatout.doctor.finding import Ceiling, Finding
from flatout.doctor.lines import at_least
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Counterfactual, Evidence, Place, StackPath, Stacks

RULE = title_of(__doc__)
ARMS = ("knock-out",)
TUNE = ("progress-bars",)
PROGRESS_BAR = "tqdm"
LEAST_SPEEDUP = 1.3
LEAST_SHARE = 1 - 1 / LEAST_SPEEDUP  # of the step
FEWEST_SAMPLES = 20
# times what the device needs at its best: a loop of the model that takes more is not its arithmetic
MANY_TIMES = 50
COMPUTING = ("forward", "rest")
MOST_OF_IT = 0.8  # of what a block frees, freed by another block inside it
EXPLAINED = 0.5  # of what a block frees, freed by a finding inside it
OF_THE_STEP = ("FO305",)  # rules that name a line but mean the whole step


@dataclass(frozen=True, kw_only=True, slots=True)
class HeavyBlock:
    """A line and the samples in which it was on the stack."""

    place: Place
    samples: int
    callers: tuple[Place, ...]  # outermost first


def detect(evidence: Evidence) -> list[Finding]:
    found = _between_phases(evidence)
    arms = {finding.ceiling.arm for finding in found if finding.ceiling is not None}
    places = {finding.place for finding in found}
    loops = _loops_of_the_model(evidence)
    return found + [
        loop
        for loop in loops
        if loop.place not in places and loop.ceiling is not None and loop.ceiling.arm not in arms
    ]


def _between_phases(evidence: Evidence) -> list[Finding]:
    step_s, rest_s = evidence.step_s, evidence.phase_s("rest")
    if evidence.stacks is None or not step_s or not rest_s or host_is_hidden(evidence):
        return []
    samples = evidence.stacks.samples_by_phase.get("rest", 0)
    if samples < FEWEST_SAMPLES:
        return []
    # Shares are of timed steps: sampling slows the steps in which it runs.
    rest_share = min(1.0, rest_s / step_s)
    loss = set(evidence.stacks.differentiable)  # its lines are the model's, though no module is called
    paths = [
        replace(path, places=tuple(_as_block(place, evidence.stacks) for place in path.places))
        for path in evidence.stacks.paths
        if path.phase == "rest" and path.places and path.places[-1] not in loss
    ]
    findings = []
    for block in heavy_blocks(paths, least=LEAST_SHARE / rest_share * samples):
        if block.place.at in _lines_of_the_loop(evidence.stacks):
            continue
        proof = _proof(block, evidence)
        share = block.samples / samples * rest_share
        if proof.ceiling is not None:
            pays = proof.ceiling.speedup >= LEAST_SPEEDUP and _low(proof.ceiling) > RESOLVABLE_SPEEDUP
        else:  # thin evidence does not suffice if nothing was removed
            pays = not proof.refuted and at_least(block.samples, samples) * rest_share >= LEAST_SHARE
        if pays:
            findings.append(_finding(block, share=share, step_s=step_s, num=samples, proof=proof))
    return findings


def suits(evidence: Evidence, finding: Finding, _name: str) -> bool:
    """Return whether the block draws a progress bar, which alone could be drawn less often."""
    stacks = evidence.stacks
    if stacks is None or finding.place is None:
        return False
    return any(
        (path.library or "").partition("/")[0] == PROGRESS_BAR
        and any(finding.place in (place, *_loops(place, stacks)) for place in path.places)
        for path in stacks.paths
    )


def _proof(block: HeavyBlock, evidence: Evidence) -> ArmProof:
    """Prove a block by steps without it, or without the innermost statement that calls it."""
    for place in (block.place, *reversed(block.callers)):
        if arm_at(evidence, ARMS[0], place) is not None:
            return prove(evidence, ARMS, place=place)
    return prove(evidence, ARMS, place=block.place)


def _low(ceiling: Ceiling) -> float:
    return ceiling.speedup if ceiling.speedup_low is None else ceiling.speedup_low


def _as_block(place: Place, stacks: Stacks) -> Place:
    """Return the outermost loop around a line except the training loop, or the line itself."""
    trains = _lines_of_the_loop(stacks)
    for header in stacks.loops.get(str(place), ()):
        if (place.file, header) not in trains:
            return replace(place, line=header)
    return place


def _lines_of_the_loop(stacks: Stacks) -> set[tuple[str, int]]:
    """Return lines, and loops around them, that were on the stack in another phase too: the training loop."""
    places = [place for path in stacks.paths if path.phase != "rest" for place in path.places]
    headers = {(place.file, header) for place in places for header in stacks.loops.get(str(place), ())}
    return headers | {place.at for place in places}


def _loops_of_the_model(evidence: Evidence) -> list[Finding]:
    """Find loops of the model and the loss that cost more than their arithmetic."""
    stacks, step_s = evidence.stacks, evidence.step_s
    if stacks is None or not step_s:
        return []
    wasteful: dict[Place, Counterfactual] = {}  # by loop: the loop itself, or the block that frees most
    for found in sorted(evidence.counterfactuals, key=lambda found: found.speedup):
        if found.kind in ARMS and found.place is not None and found.roofline_s is not None:
            ceiling = ceiling_of(found, evidence)
            pays = ceiling.speedup >= LEAST_SPEEDUP and _low(ceiling) > RESOLVABLE_SPEEDUP
            freed_s = found.baseline_step_s - found.step_s
            header = _loop_around(found, stacks)
            wastes = pays and freed_s >= MANY_TIMES * found.roofline_s
            if wastes and header is not None and not _is_over_layers(header, stacks, evidence):
                known = wasteful.get(header)
                if known is None or not _is_loop(known, header) or _is_loop(found, header):
                    wasteful[header] = found
    return [
        _loop_finding(evidence, found, header, step_s=step_s)
        for header, found in wasteful.items()
        if not any(_is_inside(other, found, stacks) for other in wasteful.values())
    ]


def _is_loop(found: Counterfactual, header: Place) -> bool:
    """Return whether a block is the loop alone: what stands before it is not the loop's."""
    return found.place is not None and found.place.at == header.at


def _is_over_layers(header: Place, stacks: Stacks, evidence: Evidence) -> bool:
    """Return whether a loop spends its time in modules that it calls once each: the layers."""
    inner = {call.place.at: call for call in evidence.inner_calls}
    samples = of_layers = 0
    for path in stacks.paths:
        depth = next((i for i, place in enumerate(path.places) if header in _loops(place, stacks)), None)
        if depth is None or path.phase not in COMPUTING:
            continue
        call = inner.get(path.places[depth].at)
        below = path.places[depth + 1 :]
        once = bool(below) and (below[0].function or "").endswith(".forward")
        samples += path.samples
        of_layers += path.samples * (once if call is None else call.calls_per_step <= call.num_modules)
    return samples > 0 and of_layers >= samples / 2


def _is_inside(inner: Counterfactual, outer: Counterfactual, stacks: Stacks) -> bool:
    """Return whether a block inside it frees most of what a block frees."""
    if inner is outer or not encloses(outer, inner, stacks.paths):
        return False
    return 1 - 1 / inner.speedup >= MOST_OF_IT * (1 - 1 / outer.speedup)


def _loop_around(found: Counterfactual, stacks: Stacks) -> Place | None:
    """Return the outermost loop inside a block, or around its call, that holds most samples of the block."""
    trains = {
        (place.file, header)
        for path in stacks.paths
        if path.phase in ("backward", "optimizer")
        for place in path.places
        for header in stacks.loops.get(str(place), ())
    }
    looks, headers = 0, Counter[Place]()
    for path in stacks.paths:
        depth = next((depth for depth, place in enumerate(path.places) if holds(found, place)), None)
        if depth is None or path.phase not in COMPUTING:
            continue
        looks += path.samples
        inside = [header for header in _loops(path.places[depth], stacks) if holds(found, header)]
        calling = _loops(path.places[depth - 1], stacks) if depth and trains else []
        header = next((each for each in (*inside, *calling) if each.at not in trains), None)
        if header is not None:
            headers[header] += path.samples
    most = headers.most_common(1)
    if looks < FEWEST_SAMPLES or not most or most[0][1] <= looks / 2:
        return None
    return most[0][0]


def _loops(place: Place, stacks: Stacks) -> list[Place]:
    """Return the first lines of the loops around a line, outermost first."""
    return [replace(place, line=line) for line in stacks.loops.get(str(place), ())]


def heavy_blocks(
    paths: Sequence[StackPath], *, least: float, callers: tuple[Place, ...] = ()
) -> Iterator[HeavyBlock]:
    """Return the innermost lines that hold at least `least` samples each."""
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
    """Return whether `other`, from another rule, names the block of `finding` or a line inside it."""
    if finding.code != RULE.code or other.code == RULE.code or other.place is None or evidence.stacks is None:
        return False
    arm = finding.ceiling.arm if finding.ceiling is not None else None
    if other.code not in OF_THE_STEP and any(
        found.label == arm and holds(found, other.place) for found in evidence.counterfactuals
    ):
        return _freed(other) is None or (_freed(other) or 0.0) >= EXPLAINED * (_freed(finding) or 0.0)
    if finding.place in _loops(other.place, evidence.stacks) and other.code not in OF_THE_STEP:
        return (_freed(other) or 0.0) >= EXPLAINED * (_freed(finding) or 0.0)
    for path in evidence.stacks.paths:
        blocks = [_as_block(place, evidence.stacks) for place in path.places]
        if finding.place in blocks:
            inside = path.places[blocks.index(finding.place) :]
            if other.place.at in {finding.place.at, *(each.at for each in inside)}:
                return True
    return False


def _freed(finding: Finding) -> float | None:
    return None if finding.ceiling is None else 1 - 1 / finding.ceiling.speedup


def _loop_finding(evidence: Evidence, found: Counterfactual, header: Place, *, step_s: float) -> Finding:
    share = max(0.0, 1 - 1 / found.speedup)
    return RULE.finding(
        header,
        f"this loop takes {show_share(share)} of the step ({show_seconds(share * step_s)}), "
        "including its backward pass",
        figures=(
            f"the device at its best needs {show_seconds(found.roofline_s)} for its arithmetic and bytes",
        ),
        share=share,
        ceiling=ceiling_of(found, evidence),
        fix="do this in one batched operation on the whole batch",
        safety="reordered",
    )


def _finding(block: HeavyBlock, *, share: float, step_s: float, num: int, proof: ArmProof) -> Finding:
    called = f", called from {block.callers[-1]}" if block.callers else ""
    return RULE.finding(
        block.place,
        f"this block takes {show_share(share)} of the step ({show_seconds(share * step_s)}), outside the "
        f"model, the backward pass and the optimizer{called}",
        figures=(f"on the stack in {block.samples} of {num} samples between the phases",),
        share=share,
        ceiling=proof.ceiling,
        no_ceiling=proof.reason,
    )
