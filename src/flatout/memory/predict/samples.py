"""Choose the sizes to trace so that a replay can answer for all others.

Three values of each knob fix a quadratic.  They are small, because integer tensors are computed for real, but
not so small that they are special cases (a batch of 1).  For a size that kernels round up to a period, they
are chosen so that rounding does not show: values with the same remainder, or values of one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flatout.ground.errors import BadInput

BATCH = "batch_size"
PERIODS: Mapping[str, int] = {"length": 128}  # what kernels round a size up to; 1 for every other knob
NUM_POINTS = 3  # of a quadratic polynomial
SMALLEST_BATCH = 5  # above 1, which is often a case of its own, and above most numbers of channels and labels


def sample_sizes(
    job_sizes: Mapping[str, int],
    *,
    knobs: Sequence[str] = (BATCH,),
    smallest_batch: int = SMALLEST_BATCH,
) -> list[dict[str, int]]:
    """Choose the sizes to trace so that a `Replay` can answer for any value of `knobs`; others stay.

    Samples are small, because integer tensors are computed for real, but a size with a period is never
    sampled above the job's own: a model may have no positions for it.  No two knobs share a value.
    """
    missing = [knob for knob in knobs if knob not in job_sizes]
    if missing:
        raise BadInput(f"{', '.join(missing)} is not one of the job's sizes: {', '.join(job_sizes)}")
    taken = {value for knob, value in job_sizes.items() if knob not in knobs}
    points: dict[str, tuple[int, ...]] = {}
    for knob in sorted(knobs, key=lambda knob: (PERIODS.get(knob, 1) == 1, knob != BATCH)):
        smallest = smallest_batch if knob == BATCH else 2
        points[knob] = _points(job_sizes[knob], PERIODS.get(knob, 1), smallest=smallest, taken=taken)
        taken.update(points[knob])
    base = {knob: points[knob][0] if knob in points else value for knob, value in job_sizes.items()}
    samples = [base]
    for knob in knobs:
        samples += [{**base, knob: value} for value in points[knob][1:]]
    if len(knobs) > 1:
        samples.append({**base, **{knob: points[knob][1] for knob in knobs}})
    return samples


def _points(wanted: int, period: int, *, smallest: int, taken: Iterable[int]) -> tuple[int, ...]:
    if period == 1:
        held = set(taken)
        while held & set(range(smallest, smallest + NUM_POINTS)):
            smallest += 1
        return tuple(range(smallest, smallest + NUM_POINTS))
    if wanted > NUM_POINTS * period - period // 2:  # the same rest, three times, and not a tiny length
        first = wanted % period or period
        first += period if first < period // 4 else 0
        return tuple(first + index * period for index in range(NUM_POINTS))
    # Too short for that: three lengths that every rounding takes to one and the same.
    inside = (wanted - 1) % block_of(period) + 1
    step = 1
    while 2 * step * (NUM_POINTS - 1) < inside:
        step *= 2
    last = wanted if inside >= NUM_POINTS else wanted + (NUM_POINTS - inside)
    return tuple(last - index * step for index in reversed(range(NUM_POINTS)))


def block_of(period: int) -> int:
    """Return the block in which all lengths round up alike, to the period, its half or its quarter.

    The rows that efficient attention keeps are rounded up to 32.
    """
    return max(1, period // 4)
