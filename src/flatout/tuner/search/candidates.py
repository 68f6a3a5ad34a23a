"""What to try on a job, and in which order.

Treatments propose values for the job; patches fit the lines that findings name.  The largest possible gain
goes first, as blocks of one run showed it or the diagnosis measured it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from flatout.doctor.examine import examine
from flatout.measure.evidence import Evidence
from flatout.tuner.treatment import Case, Dose, Treatment, Value, all_treatments, treatment_of
from flatout.tuner.trial.switched import LEAST_GAIN
from flatout.tuner.verdict import Gain

MOST_SOURCE = 4 << 20
HIDES = 1.3  # a cause worth as much hides what others gain
FOUND = 1.2  # a cause that was found, without a measured ceiling, goes before what shows no sign

NO_LINE = "the diagnosis found no line for it; give it more time if one should be there"

Candidate = tuple[Treatment, Sequence[Value]]
Reasons = list[tuple[Dose, str]]  # doses that are not tried, and why


def find_treatments(
    evidence: Evidence, command: Sequence[str], *, only: Mapping[str, Value], allow_lossy: bool
) -> tuple[list[Candidate], Reasons]:
    """Return the treatments that suit a job, or `only` some; and those left out, with the reason."""
    case = Case(evidence=evidence, source=source_of(evidence, command))
    found: list[Candidate] = []
    left_out: Reasons = []
    for treatment in all_treatments().values():
        if only and treatment.name not in only:
            continue
        asked = only.get(treatment.name, True)
        values = list(treatment.propose(case)) if asked is True else [asked]
        if treatment.safety == "lossy" and values and not allow_lossy:
            reason = "it changes the numbers; --allow-lossy tries it"
            left_out.append((Dose(name=treatment.name, value=values[0]), reason))
        elif values:
            found.append((treatment, values))
        elif only:
            reason = f"nothing in this job calls for it: --only {treatment.name}=VALUE tries it anyway"
            left_out.append((Dose(name=treatment.name, value=True), reason))
    return found, left_out


def find_patches(
    evidence: Evidence, command: Sequence[str], *, only: Mapping[str, Value]
) -> tuple[list[Candidate], Reasons]:
    """Return patches for the lines that findings name, or `only` some; and what cannot be rewritten."""
    from flatout.tuner.patches.patch import all_patches, find_sites

    wanted = {name: value for name, value in only.items() if name in all_patches()}
    if only and not wanted:
        return [], []
    can, cannot = find_sites(user_files(evidence, command), examine(evidence), folder=Path.cwd(), only=wanted)
    doses = [Dose(name=site.patch, value=str(site)) for site in can]
    left_out = [(Dose(name=site.patch, value=str(site)), reason) for site, reason in cannot]
    placed = {site.patch for site in (*can, *(site for site, _ in cannot))}
    left_out += [(Dose(name=name, value=True), NO_LINE) for name in sorted(wanted.keys() - placed)]
    return [(treatment_of(dose), [dose.value]) for dose in doses], left_out


def by_ceiling(
    candidates: Sequence[Candidate],
    *,
    in_run: Mapping[str, Gain],
    ceilings: Mapping[str, float],
    found: Collection[str] = (),
) -> list[Candidate]:
    """Sort by the possible gain: as blocks of one run showed it, by the ceilings of rules, or what is likely.

    `found` are the rules with a finding.  Among equals, treatments that suit any job go last.
    """

    def rank(candidate: Candidate) -> tuple[float, bool, int]:
        treatment, values = candidate
        labels = [str(Dose(name=treatment.name, value=value)) for value in values]
        shown = [in_run[label].ratio for label in labels if label in in_run]
        known = shown or [ceilings[rule] for rule in treatment.rules if rule in ceilings]
        if shown and max(shown) < LEAST_GAIN:  # last: other faults may hide its gain
            known = [0.0]
        class_ = ("exact", "reordered", "lossy").index(treatment.safety)
        likely = treatment.likely if set(found).isdisjoint(treatment.rules) else FOUND
        return -max(known, default=likely), treatment.suits_any, class_

    return sorted(candidates, key=rank)


def switchable(candidates: Sequence[Candidate]) -> list[Dose]:
    """Return the doses that can be measured in blocks of one run."""
    return [
        Dose(name=treatment.name, value=value)
        for treatment, values in candidates
        for value in values
        if treatment.switch is not None
    ]


def best_first(treatment: Treatment, values: Sequence[Value], *, in_run: Mapping[str, Gain]) -> list[Dose]:
    """Sort the doses of a treatment by what blocks of one run showed, if they did."""
    doses = [Dose(name=treatment.name, value=value) for value in values]
    return sorted(doses, key=lambda dose: -in_run[str(dose)].ratio if str(dose) in in_run else 0.0)


def hides_others(treatment: Treatment, ceilings: Mapping[str, float]) -> bool:
    """Return whether the cause that a treatment removes may hide what others gain."""
    return max((ceilings[rule] for rule in treatment.rules if rule in ceilings), default=1.0) >= HIDES


def why_not_together(doses: Sequence[Dose]) -> str | None:
    """Return why patches cannot be applied together, or None."""
    if all(dose.name in all_treatments() for dose in doses):
        return None
    from flatout.tuner.patches.patch import patched_texts, sites_of
    from flatout.tuner.patches.source import Refused

    try:
        patched_texts(sites_of(doses), folder=Path.cwd())
    except Refused as refusal:
        return str(refusal)
    return None


def ceilings_of(evidence: Evidence) -> dict[str, float]:
    """Return the largest measured ceiling of each rule with a finding, by rule name."""
    found: dict[str, float] = {}
    for finding in examine(evidence):
        if finding.ceiling is not None:
            found[finding.name] = max(found.get(finding.name, 1.0), finding.ceiling.speedup)
    return found


def found_in(evidence: Evidence) -> frozenset[str]:
    """Return the names of the rules with a finding."""
    return frozenset(finding.name for finding in examine(evidence))


def user_files(evidence: Evidence, command: Sequence[str]) -> list[str]:
    """Return the script, and the user's files that the evidence names."""
    paths = {name: Path(os.getcwd(), name) for name in sorted({*evidence.sources, command[0]})}
    return [name for name, path in paths.items() if path.is_file() and path.stat().st_size <= MOST_SOURCE]


def source_of(evidence: Evidence, command: Sequence[str]) -> str:
    """Return the text of the script and these files."""
    paths = [Path(os.getcwd(), name) for name in user_files(evidence, command)]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
