"""Alternate runs of two sources and count their steps, or compare one source with a saved result.

Times of two machines cannot be compared.  So a result from elsewhere is compared by counts alone, and a
prescription by the ratio of its treatments, measured here in alternating runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.ground import OnProgress, ignore
from flatout.ground.documents import DocumentKind, read_document
from flatout.ground.errors import BadInput
from flatout.ground.script.command import check_command
from flatout.ground.units import show_ratio
from flatout.tuner import verdict
from flatout.tuner.check.answer import (
    CheckVerdict,
    CountChange,
    Slowdown,
    changes,
    grown,
    judge,
    judge_gain,
    reason_of,
    slowdown_of,
)
from flatout.tuner.check.trees import Tree, base_tree, working_tree
from flatout.tuner.results.prescription import load_prescription
from flatout.tuner.search.plan import plan_of
from flatout.tuner.treatment import Dose
from flatout.tuner.trial.counts import Counts
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trials import TrialPlan, Trials, hint_of
from flatout.tuner.verdict import Gain

CHECK = DocumentKind(
    format="flatout-check", version=1, what="the result of a check", hint="flatout check --json prints one"
)
TOLERANCE, PAIRS = 0.05, 8
COUNTED = TrialPlan(warmup=5, blocks=1, block_steps=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What a check found; None if it was not measured."""

    answer: CheckVerdict
    reason: str
    base: str
    slowdown: Slowdown | None = None
    smallest: float | None = None  # share of the step: the smallest change that could have been seen
    gain: Gain | None = None  # of a prescription's treatments, here
    same_losses: bool | None = None
    base_counts: Counts | None = None
    head_counts: Counts | None = None
    changes: tuple[CountChange, ...] = ()
    num_runs: int = 0
    flatout: str = __version__


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """How a check measures."""

    module: bool = False
    tolerance: float = TOLERANCE
    pairs: int = PAIRS  # at most
    on_progress: OnProgress = ignore


def check_sources(base: str, command: Sequence[str], options: CheckOptions) -> Checked:
    """Compare the source here with that of a revision or a folder."""
    with base_tree(base, command) as old:
        trees = (old, working_tree(command))
        for tree in trees:
            with tree.entered():
                check_command(tree.command, module=options.module)
        before, now = (_Side(tree, options) for tree in trees)
        with before.trials, now.trials:
            pairs, counted = _alternate(
                before, now, options, lambda gain: judge(slowdown_of(gain), tolerance=options.tolerance)
            )
    slowdown = slowdown_of(verdict.gain_of(pairs))
    answer = judge(slowdown, tolerance=options.tolerance)
    return Checked(
        answer=answer,
        reason=reason_of(answer, slowdown, tolerance=options.tolerance),
        base=old.name,
        slowdown=slowdown,
        smallest=slowdown.smallest,
        same_losses=pairs[0][0].losses == pairs[0][1].losses,
        base_counts=counted[0],
        head_counts=counted[1],
        changes=changes(*counted),
        num_runs=before.trials.num_run + now.trials.num_run,
    )


def check_against(saved: Path, command: Sequence[str], options: CheckOptions) -> Checked:
    """Compare the source here with a saved check, by counts, or with a prescription, by its gain."""
    check_command(command, module=options.module)
    if saved.suffix == ".toml":
        return _hold_gain(saved, command, options)
    before = read_document(saved, Checked, CHECK).head_counts
    side = _Side(working_tree(command), options)
    with side.trials:
        options.on_progress("counting a few steps")
        now = side.count().counts
    found = changes(before, now)
    answer: CheckVerdict = "ok"
    reason = "its counts did not grow; times were not compared"
    if now is None or before is None:
        answer, reason = "cannot tell", "one of the two runs its own profiler, so nothing was counted"
    elif more := grown(found):
        answer, reason = "slower", f"its counts grew: {'; '.join(more)}"
    return Checked(
        answer=answer,
        reason=reason,
        base=str(saved),
        base_counts=before,
        head_counts=now,
        changes=found,
        num_runs=1,
    )


def _hold_gain(saved: Path, command: Sequence[str], options: CheckOptions) -> Checked:
    """Check whether the treatments of a prescription still gain here what was proven."""
    prescription = load_prescription(saved)
    proof = prescription.proof
    if proof is None or not prescription.treatments:
        raise BadInput(f"{saved} holds no proven gain", hint="flatout tune writes one")
    needed = proof.low / (1 + options.tolerance)
    here = working_tree(command)
    plain, treated = (_Side(here, options, doses=doses) for doses in ((), prescription.doses()))
    with plain.trials, treated.trials:
        pairs, counted = _alternate(plain, treated, options, lambda gain: judge_gain(gain, needed=needed))
    gain = verdict.gain_of(pairs)
    return Checked(
        answer=judge_gain(gain, needed=needed),
        reason=f"the treatments gain {show_ratio(gain.ratio)} [{gain.low:.2f}, {gain.high:.2f}] here; "
        f"{show_ratio(proof.ratio)} [{proof.low:.2f}, {proof.high:.2f}] was proven, and "
        f"{needed:.2f}× is required",
        base=str(saved),
        gain=gain,
        smallest=slowdown_of(gain).smallest,
        base_counts=counted[0],
        head_counts=counted[1],
        changes=changes(*counted),
        num_runs=plain.trials.num_run + treated.trials.num_run,
    )


class _Side:
    """One source, under some treatments, and its trials."""

    def __init__(self, tree: Tree, options: CheckOptions, *, doses: Sequence[Dose] = ()) -> None:
        self.tree, self.doses = tree, tuple(doses)
        self.trials = Trials(tree.command, module=options.module, plan=COUNTED)

    def run(self, **changes: Any) -> TrialResult:
        with self.tree.entered():
            found = self.trials.run(self.doses, **changes)
        if reason := verdict.failure(found):
            raise BadInput(
                f"{self.tree.name} cannot be measured: {reason}",
                hint=hint_of(found, self.trials.plan),
            )
        return found

    def count(self) -> TrialResult:
        return self.run(counts=True, checked=())  # sums of gradients would be counted too


def _alternate(
    one: _Side, other: _Side, options: CheckOptions, answer_of: Callable[[Gain], CheckVerdict]
) -> tuple[list[tuple[TrialResult, TrialResult]], tuple[Counts | None, Counts | None]]:
    """Count a few steps of both, then run pairs in turn until the answer is settled."""
    options.on_progress("counting a few steps of both")
    first, second = one.count(), other.count()
    one.trials.plan = other.trials.plan = plan_of(min(*first.blocks_s, *second.blocks_s))
    pairs: list[tuple[TrialResult, TrialResult]] = []
    while len(pairs) < options.pairs:
        options.on_progress(f"pair {len(pairs) + 1} of at most {options.pairs}")
        if len(pairs) % 2:
            late, early = other.run(timed=True), one.run(timed=True)
        else:
            early, late = one.run(timed=True), other.run(timed=True)
        pairs.append((early, late))
        if answer_of(verdict.gain_of(pairs)) != "cannot tell":
            break
    return pairs, (first.counts, second.counts)
