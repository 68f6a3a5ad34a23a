"""What the tuner must never do: keep a mistake or noise, be trapped; and what its ways to time cost."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatout import api
from flatout.ground.errors import FlatoutError
from flatout.testing.wrong_treatments import (
    MODULE,
    NUM_SWITCHED,
    SAFETIES,
    WRONG,
    name_of,
    nothing,
    plant,
)
from flatout.tuner import verdict
from flatout.tuner.numbers import Numbers
from flatout.tuner.treatment import Dose, all_treatments
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trials import TrialPlan, Trials
from flatout.tuner.verdict import FEWEST_PAIRS, MOST_PAIRS, Gain

HERE = Path(__file__).resolve().parent
PLAN = TrialPlan(warmup=20, blocks=5, block_steps=20, limit_s=300.0)
PEER_LOSS = 0.05  # by how much of the loss profine lets the last one differ
PEER_GAIN = 1.03
IN_RUN_S = 30.0

Item = dict[str, Any]


class WrongTrials(Trials):
    """Trials in processes that know the planted treatments."""

    child = MODULE


@contextmanager
def trials_of(*arguments: str) -> Iterator[WrongTrials]:
    plant()
    with here(), WrongTrials(["job.py", *arguments], module=False, plan=PLAN) as trials:
        yield trials


@contextmanager
def here() -> Iterator[None]:
    """In the folder of the job."""
    before = Path.cwd()
    os.chdir(HERE)
    try:
        yield
    finally:
        os.chdir(before)


# -- planted wrong treatments


def wrong_items() -> dict[str, Callable[[], Item]]:
    names = [name_of(install, safety) for install in (*WRONG, nothing) for safety in SAFETIES]
    return {name: lambda name=name: judge(name) for name in names}  # type: ignore[misc]


@functools.cache
def numbers() -> Numbers:
    """The job against itself, once for all."""
    plant()
    trials = WrongTrials(["job.py"], module=False, plan=PLAN)
    atexit.register(trials.__exit__)
    return Numbers(trials, [trials.run([]) for _ in range(FEWEST_PAIRS)])


def judge(name: str) -> Item:
    """The numbers of one planted treatment, by our rules and by a peer's: the last loss within 5 %."""
    dose = Dose(name=name, value=True)
    with here():
        treated = numbers().trials.run([dose])
        judged = numbers().judge(all_treatments()[name], [], dose)
    one, other = numbers().plain.losses[-1:], treated.losses[-1:]
    peer = not one or not other or abs(other[0] - one[0]) <= PEER_LOSS * abs(one[0])
    must_pass = name.startswith("nothing")
    return {
        "answer": judged.answer,
        "reason": judged.reason,
        "right": judged.is_right == must_pass,
        "peer_passes": peer,
        "is_wrong": not must_pass,
    }


# -- traps


def trap_items() -> dict[str, Callable[[], Item]]:
    return {
        "crashed baseline": lambda: refused("--crash", says="ValueError"),
        "no samples left": lambda: refused("--steps", "12", says="12 steps"),
        "other warm-up": other_warm_up,
    }


def refused(*arguments: str, says: str) -> Item:
    """A tuning that has to be refused, with its reason."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(HERE / "job.py", name)
        os.chdir(name)
        try:
            api.tune_script(["job.py", *arguments], only=["threads=1"], seconds=20.0)
            said = "it was tuned"
        except FlatoutError as error:
            said = str(error).replace(name, "FOLDER")
        finally:
            os.chdir(before)
    return {"answer": said, "right": says in said}


def other_warm_up() -> Item:
    """Losses of a run whose blocks begin later must not be taken for those of the same steps."""
    with trials_of() as trials:
        plain = trials.run([])
        later = trials.run([], warmup=PLAN.warmup + 5, blocks=PLAN.blocks - 1, block_steps=PLAN.block_steps)
    shifted = TrialResult(
        ended="measured", blocks_s=later.blocks_s, losses=later.losses[10:], num_steps=later.num_steps
    )
    said = verdict.failure(later, like=plain) or verdict.differs_exactly(plain, later)
    cut = verdict.failure(shifted, like=plain)
    return {"answer": f"{said}; {cut}", "right": said is not None and cut is not None}


# -- noise


def noise_items(comparisons: int) -> dict[str, Callable[[], Item]]:
    """Runs of nothing: switched arms are a comparison each, and runs stand in pairs with those after them."""
    num_switched = -(-comparisons // NUM_SWITCHED)
    num_runs = comparisons + 2 * (FEWEST_PAIRS + MOST_PAIRS)
    return {
        **{f"in one run {number}": switched_noise for number in range(num_switched)},
        **{f"run {number}": plain_run for number in range(num_runs)},
    }


def switched_noise() -> Item:
    doses = tuple(
        Dose(name=f"switched nothing {number}", value=True) for number in range(1, NUM_SWITCHED + 1)
    )
    with trials_of() as trials:
        found = trials.run([], arms=doses, seconds=IN_RUN_S)
    gains, _noise = verdict.gains_of_arms(found.arms)
    return {
        "ended": found.ended,
        "gains": {label: [gain.ratio, gain.low, gain.high] for label, gain in gains.items()},
        "kept": sum(gain.is_kept for gain in gains.values()),
        "comparisons": len(gains),
    }


def plain_run() -> Item:
    with trials_of() as trials:
        found = trials.run([])
    return {"ended": found.ended, "blocks_s": found.blocks_s}


def noise_summary(items: dict[str, Item]) -> Item:
    """How often noise would have been kept, by our rules and by a peer's, on the same trials."""
    switched = [item for name, item in items.items() if name.startswith("in one run")]
    runs = [
        TrialResult(ended="measured", blocks_s=tuple(item["blocks_s"]))
        for name, item in items.items()
        if name.startswith("run ") and item["blocks_s"]
    ]
    verdicts = [gain for start in range(len(runs)) if (gain := settle(runs[start:])) is not None]
    medians = [statistics.median(run.blocks_s) for run in runs]
    ratios = [one / other for one, other in itertools.pairwise(medians)]
    return {
        "in_one_run": {
            "comparisons": sum(item["comparisons"] for item in switched),
            "kept": sum(item["kept"] for item in switched),
        },
        "pairs_of_runs": {
            "comparisons": len(verdicts),
            "kept": sum(gain.is_kept for gain in verdicts),
            "undecided": sum(not gain.is_settled for gain in verdicts),
        },
        "peer": {
            "comparisons": len(ratios),
            "kept_if_faster": sum(ratio > 1 for ratio in ratios),
            "kept_if_3_percent_faster": sum(ratio > PEER_GAIN for ratio in ratios),
        },
        "spread_of_runs": statistics.stdev(ratios) if len(ratios) > 1 else None,
    }


def settle(runs: Sequence[TrialResult]) -> Gain | None:
    """The verdict over consecutive runs A B, B A, ...; None where they end before it is settled.

    The first runs are the job against itself.
    """
    own, runs = runs[: 2 * FEWEST_PAIRS], runs[2 * FEWEST_PAIRS :]
    if len(own) < 2 * FEWEST_PAIRS:
        return None
    spread = verdict.spread_of(list(zip(own[::2], own[1::2], strict=True)))
    pairs: list[tuple[TrialResult, TrialResult]] = []
    for number in range(MOST_PAIRS):
        if 2 * number + 1 >= len(runs):
            return None
        one, other = runs[2 * number], runs[2 * number + 1]
        pairs.append((one, other) if number % 2 == 0 else (other, one))
        gain = verdict.gain_of(pairs, least_spread=spread)
        if gain.is_settled:
            return gain
    return gain


# -- cost


def cost_items() -> dict[str, Callable[[], Item]]:
    return {"in one run": cost_in_one_run, "pairs of runs": cost_in_pairs}


DOSES = (
    Dose(name="no-debug-calls", value=True),  # gains, where anomalies are looked for
    Dose(name="garbage-every", value=100),
    Dose(name="matmul-precision", value="highest"),  # as it is
    Dose(name="threads", value=1),
)


def cost_in_one_run() -> Item:
    began_s = time.monotonic()
    with trials_of("--anomalies") as trials:
        found = trials.run([], arms=DOSES, seconds=IN_RUN_S * 2)
    gains, _noise = verdict.gains_of_arms(found.arms)
    return _cost(gains, began_s, num_runs=1)


def cost_in_pairs() -> Item:
    began_s, num_runs = time.monotonic(), 0
    gains: dict[str, Gain] = {}
    with trials_of("--anomalies") as trials:
        for dose in DOSES:
            pairs: list[tuple[TrialResult, TrialResult]] = []
            while not pairs or not (gains[str(dose)].is_settled or len(pairs) >= MOST_PAIRS):
                order = [[], [dose]] if len(pairs) % 2 == 0 else [[dose], []]
                found = [trials.run(doses) for doses in order]
                for run in found:
                    if reason := verdict.failure(run):
                        raise RuntimeError(reason)
                pairs.append((found[0], found[1]) if len(pairs) % 2 == 0 else (found[1], found[0]))
                gains[str(dose)] = verdict.gain_of(pairs)
        num_runs = trials.num_run
    return _cost(gains, began_s, num_runs=num_runs)


def _cost(gains: dict[str, Gain], began_s: float, *, num_runs: int) -> Item:
    return {
        "seconds_per_decision": (time.monotonic() - began_s) / max(1, len(gains)),
        "num_runs": num_runs,
        "answers": {
            name: "kept" if gain.is_kept else "no gain" if gain.is_none else "undecided"
            for name, gain in gains.items()
        },
        "gains": {name: [gain.ratio, gain.low, gain.high] for name, gain in gains.items()},
    }
