"""Evidence in, ranked Findings out."""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.rule import all_rules
from flatout.measure.evidence import Evidence


def examine(evidence: Evidence) -> tuple[Finding, ...]:
    """Every rule's findings, the one that would free most of the step first."""
    findings = [finding for rule in all_rules() for finding in rule.detect(evidence)]
    return tuple(sorted(findings, key=_rank))


def _rank(finding: Finding) -> tuple[float, str, str, int]:
    saved = 1 - 1 / finding.ceiling.speedup if finding.ceiling else finding.share or 0.0
    place = finding.place
    return (-saved, finding.code, place.file if place else "", place.line if place else 0)
