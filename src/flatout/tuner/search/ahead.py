"""What a tuning will most likely ask next, so that idle nodes of a cluster can run it ahead.

Most treatments gain nothing.  One will most likely be kept if blocks of one run showed its gain, or if the
diagnosis measured a large ceiling for its cause; what follows is then asked on top of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flatout.tuner.search.candidates import Candidate, best_first, hides_others, switchable, why_not_together
from flatout.tuner.search.times import Times, one_pair
from flatout.tuner.treatment import Dose, all_treatments, treatment_of
from flatout.tuner.trials import Unit
from flatout.tuner.verdict import FEWEST_PAIRS, Gain

LIKELY_PAIRS = 2  # pairs that a treatment most likely needs: most gain nothing, and two show it

# The options of a trial whose numbers are compared; None if they are not known yet.
ChangesFor = Callable[[Sequence[Dose]], dict[str, Any] | None]


def likely_units(
    left: Sequence[Candidate],
    *,
    kept: Sequence[Dose],
    times: Times,
    changes_for: ChangesFor,
    ceilings: Mapping[str, float],
) -> list[Unit]:
    """Return the trials of the most likely course of a tuning, the next ones first."""
    base, is_timed, units = list(kept), False, list[Unit]()
    shown_on: list[Dose] | None = times.in_run_on
    shown: Mapping[str, Gain] | None = times.in_run  # None: the run that shows it is one of these units
    for place, (treatment, values) in enumerate(left):
        hides = hides_others(treatment, ceilings)
        is_first = (
            hides or treatment.name not in all_treatments()
        )  # before what can be switched, as patches are
        doses = switchable(left[place:])
        if doses and shown_on != base and (treatment.switch is not None or not is_first):
            in_run = times.switched_units(doses, base)
            units += in_run
            shown_on, shown = list(base), None if in_run else {}
        if treatment.safety == "lossy" or (treatment.switch is not None and shown is None):
            continue
        gains = shown or {}
        for dose in best_first(treatment, values, in_run=gains):
            gain, doses = gains.get(str(dose)), [*base, dose]
            if (gain is not None and not gain.is_kept) or why_not_together(doses):
                continue
            if (changes := changes_for(doses)) is not None:
                units.append(((tuple(doses), changes),))
            if gain is None:
                units += [one_pair(base, doses, number) for number in range(LIKELY_PAIRS)]
            if gain is not None or hides:
                base, is_timed = doses, gain is None
                break
    return units + closing_units(base, leave_out=base[:-1], times=times, is_timed=is_timed)


def closing_units(
    kept: Sequence[Dose], *, leave_out: Sequence[Dose], times: Times, is_timed: bool = False
) -> list[Unit]:
    """Return the trials at the end: some kept treatments are left out once, then everything is timed.

    The pairs of a single treatment count.
    """
    if not kept:
        return []
    known = LIKELY_PAIRS if is_timed and len(kept) == 1 else len(times.pairs_of_one(kept))
    units: list[Unit] = []
    for dose in leave_out:
        others = [each for each in kept if each != dose]
        in_run = times.switched_units([dose], others) if treatment_of(dose).switch is not None else []
        units += in_run or [one_pair(others, kept, number) for number in range(LIKELY_PAIRS)]
    return units + [one_pair([], kept, number) for number in range(known, FEWEST_PAIRS)]
