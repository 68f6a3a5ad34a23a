"""Evidence in, ranked Findings out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.doctor.causal_map import MapBlock, causal_map, encloses
from flatout.doctor.ceilings import OF_LINES, for_the_job, is_proven
from flatout.doctor.finding import Finding, Sight
from flatout.doctor.rule import all_rules
from flatout.doctor.rules.loading.rows_one_by_one_from_memory import explains_rows
from flatout.doctor.rules.loading.slow_samples import explains_samples
from flatout.doctor.rules.loops.launch_bound_step import explains_launches
from flatout.doctor.rules.waits.costly_block import explains
from flatout.doctor.rules.waits.device_round_trip import explains_read
from flatout.doctor.rules.waits.garbage_collector_pauses import explains_pauses
from flatout.doctor.sentences import say_bound, show_ceiling
from flatout.ground.codec import encode
from flatout.ground.units import UNKNOWN
from flatout.measure.evidence import Evidence

# Arms that change the whole step: two causes that one of them proves have two fixes.
WHOLE_STEP = (
    *("cached", "half", "workers", "whole-batches", "autocast", "tf32", "staged", "trimmed"),
    "uncompiled",
)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Diagnosis:
    """Evidence and the doctor's conclusions from it; printing it shows the findings."""

    evidence: Evidence
    findings: tuple[Finding, ...]
    evidence_path: Path | None = None
    script_exit_code: int | None = None

    @property
    def map(self) -> tuple[MapBlock, ...]:
        """What the step would take without each block of the user's code."""
        return causal_map(self.evidence)

    def __repr__(self) -> str:
        """Show the findings in a notebook, instead of a thousand steps."""
        lines = [say_bound(self.evidence)]
        for finding in self.findings:
            lines += [
                "",
                f"{finding.code} {finding.name}  {finding.place or UNKNOWN}  {show_ceiling(finding.ceiling)}",
                f"  {finding.message}",
                f"  fix: {finding.fix}",
            ]
        return "\n".join(lines if self.findings else [*lines, "No findings."])

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "flatout-diagnosis",
            "version": 1,
            "findings": encode(self.findings),
            "map": encode(self.map),
            "evidence": self.evidence.to_json(),
        }


def examine(evidence: Evidence) -> tuple[Finding, ...]:
    """Apply every rule; return one finding per cause, the one that frees most of the job first."""
    findings = [
        replace(finding, tune=rule.tune_of(finding, evidence))
        for rule in all_rules()
        for finding in rule.detect(evidence)
        if is_proven(finding.ceiling) or not rule.needs_proof
    ]
    unexplained = [
        finding for finding in findings if not any(_explains(finding, other, evidence) for other in findings)
    ]
    of_the_job = [_for_the_job(finding, evidence) for finding in unexplained]
    return tuple(sorted(_by_cause(of_the_job, evidence), key=_rank))


def _explains(finding: Finding, other: Finding, evidence: Evidence) -> bool:
    """Return whether `other` names the cause, while `finding` only names the place."""
    return (
        explains(finding, other, evidence)
        or explains_samples(finding, other)
        or explains_rows(finding, other)
        or explains_read(finding, other)
        or explains_launches(finding, other)
        or explains_pauses(finding, other)
        or (finding.code in _explained_by(other.code) and _is_at(finding, other, evidence))
    )


def _explained_by(code: str) -> tuple[str, ...]:
    return next((rule.explains for rule in all_rules() if rule.code == code), ())


def _is_at(one: Finding, other: Finding, evidence: Evidence) -> bool:
    """Return whether two findings name the same line, or `other` a loop around it."""
    if one.place is None or other.place is None:
        return one.place is other.place
    loops = evidence.stacks.loops.get(str(one.place), ()) if evidence.stacks is not None else ()
    return one.place.file == other.place.file and other.place.line in (one.place.line, *loops)


def _for_the_job(finding: Finding, evidence: Evidence) -> Finding:
    if finding.ceiling is None:
        return finding
    return replace(finding, ceiling=for_the_job(evidence, finding.ceiling))


def _by_cause(findings: Sequence[Finding], evidence: Evidence) -> list[Finding]:
    """Merge findings that one arm proves, or one arm inside another; list the others beside the first."""
    groups: list[list[Finding]] = []
    for finding in sorted(findings, key=_rank):
        same = next((group for group in groups if _is_same_cause(group[0], finding, evidence)), None)
        if same is None:
            groups.append([finding])
        else:
            same.append(finding)
    return [_led(group) for group in groups]


def _led(group: Sequence[Finding]) -> Finding:
    first, *others = sorted(group, key=lambda finding: (-_freed(finding), -(finding.share or 0.0)))
    sights = {
        (other.code, other.place): Sight(
            code=other.code, name=other.name, place=other.place, share=other.share
        )
        for other in reversed(others)  # the largest of each line
    }
    sights.pop((first.code, first.place), None)
    return replace(first, also=tuple(reversed(sights.values())))


def _is_same_cause(one: Finding, other: Finding, evidence: Evidence) -> bool:
    first, second = _arm(one), _arm(other)
    if one.code == other.code and one.place is not None and one.place == other.place:
        return True  # a loader that is rebuilt with another batch size, for example
    if one.ceiling is None and other.ceiling is None:  # nothing distinguishes two sights of one line
        return one.place is not None and one.place == other.place and _of_lines(one) and _of_lines(other)
    if first is None or second is None:
        return False
    if first == second:
        return True
    arms = {found.label: found for found in evidence.counterfactuals if found.place is not None}
    if first not in arms or second not in arms:
        return False
    paths = evidence.stacks.paths if evidence.stacks is not None else ()
    return encloses(arms[first], arms[second], paths) or encloses(arms[second], arms[first], paths)


def _of_lines(finding: Finding) -> bool:
    """Return whether an arm that removes lines proves the finding's rule."""
    return any(finding.code == rule.code and set(rule.arms) & set(OF_LINES) for rule in all_rules())


def _arm(finding: Finding) -> str | None:
    """Return the label of the arm that proves a finding, if that arm covers this cause alone."""
    ceiling = finding.ceiling
    return None if ceiling is None or ceiling.kind in WHOLE_STEP else ceiling.arm


def _freed(finding: Finding) -> float:
    ceiling = finding.ceiling
    return 1 - 1 / (ceiling.job_speedup or ceiling.speedup) if ceiling else finding.share or 0.0


def _rank(finding: Finding) -> tuple[float, str, str, int]:
    place = finding.place
    return (-_freed(finding), finding.code, place.file if place else "", place.line if place else 0)
