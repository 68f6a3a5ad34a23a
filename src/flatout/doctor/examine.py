"""Evidence in, ranked Findings out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.doctor.ceilings import for_the_job
from flatout.doctor.finding import Finding
from flatout.doctor.readings import bound, show_ceiling
from flatout.doctor.rule import all_rules
from flatout.doctor.rules.costly_block import explains
from flatout.ground.codec import encode
from flatout.ground.units import UNKNOWN
from flatout.measure.evidence import Evidence


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Diagnosis:
    """Evidence and what the doctor concludes from it; printed, it is its findings in words."""

    evidence: Evidence
    findings: tuple[Finding, ...]
    evidence_path: Path | None = None
    script_exit_code: int | None = None

    def __repr__(self) -> str:
        """What a notebook shows: of a thousand steps, what they come to."""
        lines = [bound(self.evidence)]
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
            "evidence": self.evidence.to_json(),
        }


def examine(evidence: Evidence) -> tuple[Finding, ...]:
    """Every rule's findings, the one that would free most of the job first."""
    findings = [finding for rule in all_rules() for finding in rule.detect(evidence)]
    unexplained = [
        finding for finding in findings if not any(explains(finding, other, evidence) for other in findings)
    ]
    return tuple(sorted((_for_the_job(finding, evidence) for finding in unexplained), key=_rank))


def _for_the_job(finding: Finding, evidence: Evidence) -> Finding:
    if finding.ceiling is None:
        return finding
    return replace(finding, ceiling=for_the_job(evidence, finding.ceiling))


def _rank(finding: Finding) -> tuple[float, str, str, int]:
    ceiling = finding.ceiling
    saved = 1 - 1 / (ceiling.job_speedup or ceiling.speedup) if ceiling else finding.share or 0.0
    place = finding.place
    return (-saved, finding.code, place.file if place else "", place.line if place else 0)
