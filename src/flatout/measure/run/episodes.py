"""Time outside the typical step: evaluations, rollouts, checkpoints, epoch starts, set-up.

A step that takes several times as long as its peers holds something else, and so may the first step of an
epoch, or one that calls a model more often than nearly all others: a short game between updates. Its excess
over a typical step is the time to explain, and the stack samples in it say which of the user's lines hold it.
That line is the outermost one that no typical step has on its stack: `evaluate(model)` in the loop, not the
model's own lines below it. Time in which another program held the core makes no step long, and lengthens
what is found as it lengthens the typical step.

The steps that follow are slower than usual if it drove the job's data out of the processor's caches: their
excess over steps long after it belongs to it, too.

A diagnosis sees a minute of a job that may take days.  Time that recurs is spread over the steps in which it
was seen, or over the epoch if it comes with each; time paid once (set-up, compilation) or seen a single time
is not spread.  Many loops evaluate at their first step, so evaluations count in the warm-up as well.
"""

from __future__ import annotations

import bisect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from flatout.measure.arms.arm import ONE_BATCH
from flatout.measure.clock import WAIT
from flatout.measure.evidence import INSTRUMENTS, ROLLS_OUT, Episode, EpisodeKind, Place, Stacks
from flatout.measure.lines.stack_watch import Look
from flatout.measure.run.step_rows import StepRow, usual_forwards
from flatout.measure.statistics import OUTLIER_FACTOR

COUNTED = (
    "real",
    "same",
    "cached",
    "half",
    "stacks",
)  # arms in which a job still does everything outside the step
SERVED = ("cached", "half", ONE_BATCH)  # arms whose loaders give kept batches
WARM_UP = "warmup"
MAY_COME_AGAIN = ("evaluation", "rollout", "checkpoint")  # kinds that count in the warm-up
FEWEST = 4  # steps of an arm, to know what is usual
LEAST_EPOCH_START = 1.5  # times a usual step
LEAST_SET_UP_S = 1.0
FEWEST_LOOKS = 3  # for a cause to count
LATE_S = 0.001  # a sample this late shows what came before the line that it found
LEAST_TYPICAL = 0.002  # of the samples in typical steps, for a line to belong to them
ALIKE = math.log(1.5)  # the largest ratio between the excesses of similar long steps
LEAST_WITH_EPOCH = 0.9  # of its steps
LEAST_OF_CALLS = 0.9  # of a line's samples, for a function to stand for what it calls
TRACES = 1.03  # times a settled step: a step after a long one that is slower is still slowed by it
FEWEST_FOLLOWED = 5  # long steps, to know how much slower the steps after them are
UNLIKE = 10.0  # added to the distance of two long steps if only one begins an epoch or calls more models
MOST_EPISODES = 20
EVALUATES = re.compile(r"eval|valid|test|score|metric|loss|accura|perplex", re.IGNORECASE)
SAVES = re.compile(r"save|checkpoint", re.IGNORECASE)

Loops = Callable[[Place], tuple[int, ...]]  # the first lines of the loops around a line, outermost first


@dataclass(slots=True)
class LongStep:
    """A step that holds more than a usual one, and the samples in it."""

    row: StepRow
    took_s: float
    excess_s: float  # over a usual step
    more_calls: bool  # models are called more often than in a usual step
    more_batches: bool  # more are loaded than in a usual step
    looks: list[Look] = field(default_factory=list)
    followers: list[StepRow] = field(default_factory=list)  # that it still slows
    traces_s: float = 0.0  # what it adds to them

    @property
    def is_whole(self) -> bool:
        """Return whether the step did everything outside the usual one as the job does it."""
        return self.row.arm in (*COUNTED, WARM_UP) and not self.is_served

    @property
    def is_served(self) -> bool:
        """Return whether an evaluation got batches that were kept, without loading any."""
        return self.row.arm in SERVED and self.more_batches

    def set_apart(self, is_known: bool) -> None:
        """Leave the step, and those that it slows, out of the typical ones if its cause `is_known`."""
        for row in (self.row, *self.followers):
            row.apart |= is_known

    def distance(self, other: LongStep) -> float:
        """Return how unlike two long steps are: by their excess, and by what else is known of them."""
        apart = abs(math.log(max(self.excess_s, 1e-9) / max(other.excess_s, 1e-9)))
        differ = (self.row.begins_epoch != other.row.begins_epoch) + (self.more_calls != other.more_calls)
        return apart + UNLIKE * differ


@dataclass(frozen=True, slots=True)
class Cause:
    """What a sample found outside the typical step."""

    place: Place
    function: str | None = field(compare=False)  # that it calls: a line that loops calls several
    library: str | None = None  # what libraries did, if the user's own lines are in every step


@dataclass(frozen=True, slots=True)
class Seen:
    """A long step with samples: the seconds they stand for, in total and by cause."""

    step: LongStep
    weights: Mapping[Cause, float]
    whole_s: float


@dataclass(slots=True)
class CauseTally:
    """Everything found about one cause."""

    seconds: float = 0.0
    steps: set[int] = field(default_factory=set)
    looks: list[Look] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    called: Counter[str | None] = field(default_factory=Counter)
    num_with_epoch: int = 0  # in the first step of a training epoch
    served_in: set[str] = field(default_factory=set)  # arms in which it got kept batches
    in_warm_up: bool = True  # always
    more_calls: bool = False
    loads: bool = False

    @property
    def with_epoch(self) -> bool:
        """Return whether it comes with each epoch; a step or two may be divided wrongly."""
        return self.num_with_epoch >= LEAST_WITH_EPOCH * len(self.steps)

    def note(self, look: Look, cause: Cause) -> None:
        self.looks.append(look)
        self.called[cause.function] += 1
        self.loads |= look.library == "loading"
        self.names |= {place.function for place in look.places if place.function and place != cause.place}

    @property
    def function(self) -> str | None:
        """Return the function that the line calls in nearly all samples, if there is one."""
        function, num = self.called.most_common(1)[0]
        return function if num >= LEAST_OF_CALLS * len(self.looks) else None

    def innermost(self, cause: Cause) -> Place | None:
        """Return the line below the cause in which most samples ended, if half of them did."""
        ends = Counter(look.places[-1] for look in self.looks if look.places[-1] != cause.place)
        place, num = ends.most_common(1)[0] if ends else (None, 0)
        return place if num * 2 >= len(self.looks) else None


def find_episodes(
    rows: Sequence[StepRow],
    looks: Sequence[Look],
    *,
    stacks: Stacks | None,
    loops: Loops,
    steps_per_epoch: float | None,
    started_at_s: float,
    has_loader: bool,
    seconds: Mapping[int, float] | None = None,
) -> tuple[Episode, ...]:
    """Find the episodes of a run, those that cost most per step first; those paid once come last.

    `seconds` maps step indices to seconds on the GPU's clock: a host that waits for work it queued long ago
    delays nothing.  Rows that hold an episode are marked: their steps are not typical.
    """
    looks = list(looks)
    timed = [row for row in rows if row.arm not in INSTRUMENTS or row.arm in COUNTED]
    num_of_arm = Counter(row.arm for row in timed)
    for row in timed:  # more is known than at the last call
        row.apart = False
    long = list(_long_steps(timed, seconds or {}))
    found: list[Episode] = []
    if long:
        lined_up = _LinedUp(looks)
        long_rows = {id(step.row) for step in long}
        usual = [
            look
            for row in timed
            if row.arm in COUNTED and id(row) not in long_rows
            for look in lined_up.within(row)
        ]
        typical = _Typical(usual, stacks, loops)
        for step in long:
            step.looks = lined_up.within(step.row)
        # without usual steps no line is unusual
        known = bool(usual or stacks is not None)
        _follow(timed, long, took_s=lambda row: _took_s(row, seconds or {}))
        whole = _tally(long, typical, lambda step: step.is_whole) if known else {}
        # epochs may all have ended in arms, which tell less exactly what an evaluation takes
        in_arms = _tally(long, typical, lambda step: not step.is_served) if known else {}
        for cause, of_arms in in_arms.items():
            tally, arms = (whole[cause], (*COUNTED, WARM_UP)) if whole[cause].steps else (of_arms, num_of_arm)
            among = sum(num_of_arm[arm] for arm in arms if arm not in tally.served_in)
            if tally.steps:
                episode = _episode(cause, tally, among, steps_per_epoch, has_loader=has_loader)
                found += [episode] if not tally.in_warm_up or episode.kind in MAY_COME_AGAIN else []
    slowed = _slowed_by_others(timed, seconds or {})
    found = [_as_long(episode, slowed) for episode in found]
    found.sort(key=lambda episode: -(episode.per_step_s or 0.0))
    set_up = _set_up(rows, looks, started_at_s)
    return (*found[:MOST_EPISODES], *([set_up] if set_up is not None else []))


def _slowed_by_others(rows: Sequence[StepRow], seconds: Mapping[int, float]) -> float:
    """Return how many times as long a typical step lasts as it would if no other program held the cores."""
    typical = [row for row in rows if row.arm in COUNTED and not row.apart]
    lasted_s = sum(seconds.get(row.index, row.host_s) for row in typical)
    took_s = sum(_took_s(row, seconds) for row in typical)
    return max(1.0, lasted_s / took_s) if took_s > 0 else 1.0


def _as_long(episode: Episode, slowed: float) -> Episode:
    """Let an episode last as long as on this machine, as the typical steps do that it is compared with."""
    per_step_s = None if episode.per_step_s is None else episode.per_step_s * slowed
    return replace(episode, seconds=episode.seconds * slowed, per_step_s=per_step_s)


# -- long steps


def _long_steps(rows: Sequence[StepRow], seconds: Mapping[int, float]) -> Iterator[LongStep]:
    def took_s(row: StepRow) -> float:
        return _took_s(row, seconds)

    def work_s(row: StepRow) -> float:
        """Exclude waits: loaders with several workers wait in bursts, which belong to the typical step."""
        return took_s(row) - row.totals[WAIT]

    starts_count = sum(row.epoch_start for row in rows) * 2 > len(rows)
    for arm in dict.fromkeys(row.arm for row in rows):
        of_arm = [row for row in rows if row.arm == arm]
        warms_up = arm == WARM_UP
        too_few = warms_up or (arm == "real" and len(of_arm) < FEWEST)
        alike = [row for row in rows if row.arm in (WARM_UP, "real")] if too_few else of_arm
        if len(alike) < FEWEST:
            continue
        usual_s = median(map(took_s, alike))
        usual_work_s = median(map(work_s, alike))
        usual_calls = median(row.num_forwards for row in alike)
        most_call = usual_forwards(alike)
        usual_batches = median(row.num_batches for row in alike)
        for row in of_arm:
            begins = row.epoch_start and not (starts_count or warms_up)
            begins = begins and took_s(row) > LEAST_EPOCH_START * usual_s
            calls_more = most_call is not None and row.num_forwards > most_call
            calls_more = calls_more and took_s(row) > usual_s
            if begins or calls_more or work_s(row) > OUTLIER_FACTOR * usual_work_s > 0:
                yield LongStep(
                    row,
                    took_s(row),
                    took_s(row) - usual_s,
                    row.num_forwards > usual_calls,
                    row.num_batches > usual_batches,
                )


def _took_s(row: StepRow, seconds: Mapping[int, float]) -> float:
    """Exclude time in which others held the cores: it belongs to the machine, not the job."""
    return max(0.0, seconds.get(row.index, row.host_s) - row.in_line_s)


def _follow(rows: Sequence[StepRow], long: Sequence[LongStep], *, took_s: Callable[[StepRow], float]) -> None:
    """Find the steps that long ones still slow: the first ones after them, up to one that has settled.

    A step has settled if it lies in the last third of the steps between two long ones.
    """
    of_row = {id(step.row): step for step in long}
    gaps: list[tuple[LongStep, list[StepRow]]] = []
    before: StepRow | None = None  # if a long step came earlier in its block
    for row in rows:
        if id(row) in of_row:
            gaps.append((of_row[id(row)], []))
            before = row
        elif before is not None and (row.block, row.index) == (before.block, before.index + 1):
            gaps[-1][1].append(row)
            before = row
        else:
            before = None
    usual = [len(between) for step, between in gaps if step.row.arm in COUNTED]
    num_followed = round(median(usual)) * 2 // 3 if len(usual) >= FEWEST_FOLLOWED else 0
    settled = [took_s(row) for _, between in gaps for row in between[num_followed:]]
    if not num_followed or not settled:
        return
    settled_s = median(settled)
    for number in range(num_followed):
        found = [took_s(between[number]) for _, between in gaps if number < len(between)]
        if len(found) < FEWEST_FOLLOWED or median(found) < TRACES * settled_s:
            break
        for step, between in gaps:
            if number < len(between):
                step.followers.append(between[number])
                step.traces_s += took_s(between[number]) - settled_s


class _LinedUp:
    """Stack samples, ordered by time."""

    def __init__(self, looks: list[Look]) -> None:
        self._looks = looks
        self._times_s = [look.time_s for look in looks]

    def within(self, row: StepRow) -> list[Look]:
        first = bisect.bisect_right(self._times_s, row.ended_at_s - sum(row.totals))
        return self._looks[first : bisect.bisect_right(self._times_s, row.ended_at_s)]


# -- whose time it is


class _Typical:
    """The lines, and the loops around lines, that typical steps have on their stack."""

    def __init__(self, looks: Iterable[Look], stacks: Stacks | None, loops: Loops) -> None:
        self._loops = loops
        found = Counter(place for look in looks for place in set(look.places))
        for path in stacks.paths if stacks is not None else ():
            for place in set(path.places):
                found[place] += path.samples
        # a sample on the border of two steps may have been assigned to the wrong one
        least = LEAST_TYPICAL * max(found.values(), default=0)
        places = [place for place, num in found.items() if num >= least]
        self._lines = {(place.file, place.line) for place in places}
        self._headers = {(place.file, header) for place in places for header in loops(place)}

    def cause(self, look: Look, *, begins_epoch: bool) -> Cause | None:
        called_by_loader = look.in_loader if look.in_loader is not None else len(look.places)
        for depth, place in enumerate(look.places[:called_by_loader]):
            if (place.file, place.line) not in self._lines:
                inner = (below for below in look.places[depth + 1 :] if below != place)  # a comprehension
                called = next((below.function for below in inner), look.callee)
                header = self._loop(place)
                if header is not None and header != place.line:
                    place, called = replace(place, line=header), None
                return Cause(place, called)
        if look.in_loader and begins_epoch:  # lines of a sampler or dataset are the loader's time
            return Cause(look.places[min(look.in_loader, len(look.places)) - 1], None, "loading")
        if look.places and look.library in ("checkpoint", "compilation"):
            return Cause(look.places[-1], look.callee, look.library)
        return None

    def _loop(self, place: Place) -> int | None:
        """Return the outermost loop around a line that is not the training loop."""
        headers = (header for header in self._loops(place) if (place.file, header) not in self._headers)
        return next(headers, None)


def _tally(
    long: list[LongStep], typical: _Typical, is_counted: Callable[[LongStep], bool]
) -> dict[Cause, CauseTally]:
    """Divide the excess of each long step that counts by what its samples found.

    A step too short for a sample is divided like all samples in similar steps together: a single sample may
    have hit the typical part of its step, and says little about another.
    """
    tallies: dict[Cause, CauseTally] = defaultdict(CauseTally)
    seen: dict[int, Seen] = {}
    for step in long:
        weights: defaultdict[Cause, float] = defaultdict(float)
        whole_s = 0.0
        for look in step.looks:
            cause = typical.cause(look, begins_epoch=step.row.epoch_start)
            if cause is not None:
                weights[cause] += look.weight_s
                tallies[cause].note(look, cause)
            whole_s += look.weight_s if cause is not None or not _is_late(look) else 0.0
        if whole_s:
            seen[id(step)] = Seen(step, weights, whole_s)
    for step in long if seen else ():
        own = seen.get(id(step))
        alike = [own] if own is not None else _alike(step, list(seen.values()))
        whole_s = sum(each.whole_s for each in alike)
        parts: defaultdict[Cause, float] = defaultdict(float)
        for each in alike:
            for cause, weight_s in each.weights.items():
                parts[cause] += weight_s / whole_s
        held = sum(parts.values()) * step.took_s
        fits = min(1.0, step.excess_s / held) if held > 0 else 0.0
        main = max(parts, key=parts.__getitem__, default=None)
        for cause, part in parts.items():
            tally, counts = tallies[cause], is_counted(step)
            tally.seconds += part * (step.took_s * fits + step.traces_s) if counts else 0.0
            if own is None and cause != main:
                continue  # one of several that it may hold, and not the likeliest
            step.set_apart(len(tally.looks) >= FEWEST_LOOKS)
            if step.is_served:
                tally.served_in.add(step.row.arm)
            if counts:
                tally.steps.add(step.row.index)
                tally.num_with_epoch += step.row.begins_epoch
                tally.in_warm_up &= step.row.arm == WARM_UP
                tally.more_calls |= step.more_calls
    return tallies


def _is_late(look: Look) -> bool:
    """Return whether a sample in a typical line says nothing: something else held the lock until then.

    Pure Python is asked for the lock after 5 ms only, so a sample due in shorter work finds what follows it.
    """
    return look.due_earlier or look.late_s >= LATE_S


def _alike(step: LongStep, seen: list[Seen]) -> list[Seen]:
    """Return the sampled steps that a long step without samples is most like."""
    nearest = min(seen, key=lambda each: each.step.distance(step))
    return [each for each in seen if each.step.distance(step) <= ALIKE] or [nearest]


def _episode(
    cause: Cause, tally: CauseTally, num_steps: int, steps_per_epoch: float | None, *, has_loader: bool
) -> Episode:
    kind = _kind(cause, tally, has_loader=has_loader)
    times = len(tally.steps)
    per_step_s: float | None = None
    if kind == "compilation":
        per_step_s = None
    elif tally.with_epoch and steps_per_epoch:
        per_step_s = tally.seconds / times / steps_per_epoch
    elif times > 1:
        per_step_s = tally.seconds / num_steps
    return Episode(
        kind=kind,
        place=cause.place,
        function=tally.function,
        seconds=tally.seconds,
        times=times,
        num_steps=num_steps,
        per_step_s=per_step_s,
        with_epoch=tally.with_epoch and steps_per_epoch is not None,
        samples=len(tally.looks),
        inside=tally.innermost(cause),
    )


def _kind(cause: Cause, tally: CauseTally, *, has_loader: bool) -> EpisodeKind:
    libraries = Counter(look.library for look in tally.looks)
    for library in ("compilation", "checkpoint"):
        if libraries[library] * 2 > len(tally.looks):
            return library
    if cause.library == "loading":
        return "epoch-start"
    names = " ".join(sorted(tally.names | {function or "" for function in tally.called}))
    if EVALUATES.search(names):
        return "evaluation"
    if SAVES.search(names):
        return "checkpoint"
    calls_model = tally.more_calls or any(look.in_model for look in tally.looks)
    if calls_model and (ROLLS_OUT.search(names) or not has_loader):
        return "rollout"
    if calls_model:
        return "evaluation" if tally.loads else "other"
    starts = tally.with_epoch and libraries["loading"] * 2 > len(tally.looks)  # `batches = iter(loader)`
    return "epoch-start" if starts else "other"


# -- set-up


def _set_up(rows: Sequence[StepRow], looks: Sequence[Look], started_at_s: float) -> Episode | None:
    """Return the time before the first step, with the line that holds most of it."""
    if not rows:
        return None
    first_s = rows[0].ended_at_s - sum(rows[0].totals)
    before = [look for look in looks if look.time_s <= first_s and look.places]
    if first_s - started_at_s < LEAST_SET_UP_S or not before:
        return None
    places, function = heaviest(before)
    return Episode(
        kind="set-up",
        place=places[-1],
        function=function,
        seconds=first_s - started_at_s,
        times=1,
        num_steps=0,
        per_step_s=None,
        samples=len(before),
    )


def heaviest(looks: Sequence[Look]) -> tuple[tuple[Place, ...], str | None]:
    """Return the lines that at least half of the samples have in common, outermost first, and what they call.

    If the outermost line with the most samples holds fewer than half, it is returned alone.
    """
    depth, among = 0, list(looks)
    while True:
        at = Counter(look.places[depth] for look in among if len(look.places) > depth)
        if not at or at.most_common(1)[0][1] * 2 < len(looks):
            break
        place = at.most_common(1)[0][0]
        among = [look for look in among if len(look.places) > depth and look.places[depth] == place]
        depth += 1
    inner = Counter(
        look.places[depth].function if len(look.places) > depth else look.callee for look in among
    )
    return among[0].places[: max(1, depth)], inner.most_common(1)[0][0]
