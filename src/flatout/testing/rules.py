"""The contract of a rule, as a test class.

    from flatout.doctor.rule import read_rule
    from flatout.testing.rules import RuleContract
    from my_package import slow_print

    class TestRules(RuleContract):
        rules = (read_rule(slow_print),)
        evidence = load_evidence(Path("prints_every_step.json"))  # of flatout diagnose --save

pytest then holds the rules to what the doctor relies on: complete documentation, a finding in a job that has
the fault, none if nothing was measured, and findings that can be shown and saved for any Evidence at all
(hypothesis makes it up).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

from flatout.doctor.finding import Finding
from flatout.doctor.rule import SECTIONS, Rule
from flatout.ground.codec import decode, encode
from flatout.measure.evidence import Evidence, Host, Loader, ObservedJob

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

JOB = ObservedJob(
    command=(),
    folder="",
    started_at="",
    ended="measured",
    exit_code=None,
    error=None,
    device="cpu",
    device_name=None,
    python="",
    torch="",
    flatout="",
)
EMPTY = Evidence(job=JOB, host=Host(cores=None, memory_bytes=None))

BARE_LOADER = Loader(
    place=None,
    dataset="",
    num_workers=0,
    batch_size=None,
    pin_memory=False,
    persistent_workers=False,
    prefetch_factor=None,
    num_batches=None,
    trains=True,
)

# Names that rules look for; a random word would never meet one.
WORDS = (
    "",
    "9.0",
    "7.5",
    "x.y",
    "HtoD pageable",
    "__getitem__",
    "checkpoint",
    "detect_anomaly",
    "empty_cache",
    "float16",
    "for-loop",
    "foreach",
    "nonzero",
    "synchronize",
    "bf16",
    "collate",
    "cpu",
    "cuda",
    "float32",
    "forward",
    "fp32",
    "matmul",
    "numpy.concatenate",
    "tf32",
    "wait",
)


class RuleContract:
    """Subclass it, and name the rules and the Evidence of a job that has their faults."""

    rules: ClassVar[tuple[Rule, ...]]
    evidence: ClassVar[Evidence]
    num_examples: ClassVar[int] = 400

    def test_codes_and_names_are_unique_and_name_the_pattern(self) -> None:
        assert self.rules
        assert len({rule.code for rule in self.rules}) == len(self.rules)
        assert len({rule.name for rule in self.rules}) == len(self.rules)
        for rule in self.rules:
            assert re.fullmatch(r"[a-z]+(-[a-z]+)+", rule.name), rule.name

    def test_the_documentation_is_whole(self) -> None:
        for rule in self.rules:
            assert tuple(rule.sections) == SECTIONS
            assert 20 < len(rule.summary) <= 100, rule.summary
            assert rule.summary.startswith("Finds "), rule.summary
            safety = rule.sections["Fix safety"].split()[0].strip(":,")
            assert safety in ("Exact", "Reordered", "Lossy"), rule.name
            for text in rule.sections.values():
                assert text.rstrip("`").rstrip()[-1] in ".):" or text.endswith("```"), text

    def test_an_empty_job_has_no_findings(self) -> None:
        for rule in self.rules:
            assert rule.detect(EMPTY) == [], rule.name

    def test_a_job_of_which_nothing_optional_is_known_has_no_findings(self) -> None:
        for device in ("cpu", "cuda", "mps"):
            job = dataclasses.replace(JOB, device=device)
            for rule in self.rules:
                found = rule.detect(dataclasses.replace(EMPTY, job=job, loaders=(BARE_LOADER,)))
                assert found == [], rule.name

    def test_a_job_that_has_the_fault_makes_the_rule_speak(self) -> None:
        for rule in self.rules:
            findings = rule.detect(self.evidence)
            assert findings, rule.name
            for finding in findings:
                check(finding, rule)

    def test_any_evidence_gives_findings_that_can_be_shown_and_saved(self) -> None:
        """Replace any part of the faulty Evidence by anything of its type."""
        from hypothesis import HealthCheck, given, settings
        from hypothesis import strategies as st

        hints = typing.get_type_hints(Evidence)
        parts = {
            field.name: st.none() | any_of(hints[field.name]).map(lambda part: (part,))
            for field in dataclasses.fields(Evidence)
        }

        # A busy machine makes slow examples, and that is not a fault of the rule.
        @settings(max_examples=self.num_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.fixed_dictionaries(parts))
        def holds(changes: dict[str, tuple[Any] | None]) -> None:
            known = {name: part[0] for name, part in changes.items() if part}
            evidence = dataclasses.replace(self.evidence, **known)
            for rule in self.rules:
                findings = rule.detect(evidence)
                assert isinstance(findings, list), rule.name
                for finding in findings:
                    check(finding, rule)

        holds()


def check(finding: Finding, rule: Rule) -> None:
    """Check that a finding says what every finding says, in numbers that are numbers."""
    assert (finding.code, finding.name) == (rule.code, rule.name)
    assert finding.message
    assert finding.evidence
    assert finding.fix
    assert "nan" not in " ".join((finding.message, *finding.evidence)).lower().split()
    assert finding.share is None or 0 < finding.share <= 1
    if finding.ceiling is not None:
        assert finding.ceiling.speedup >= 1
        assert finding.ceiling.step_s >= 0
        assert math.isfinite(finding.ceiling.speedup)
    assert decode(Finding, json.loads(json.dumps(encode(finding), allow_nan=False))) == finding


def any_of(shape: Any) -> SearchStrategy[Any]:
    """Draw values of a type that the codec knows; seconds and shares are finite and not negative."""
    from hypothesis import strategies as st

    origin, arguments = typing.get_origin(shape), typing.get_args(shape)
    if origin in (Union, types.UnionType):
        return st.one_of([any_of(option) for option in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(any_of(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(any_of(arguments[0]), any_of(arguments[1]), max_size=3)
    if isinstance(shape, type) and dataclasses.is_dataclass(shape):
        hints = typing.get_type_hints(shape)
        return st.builds(
            shape, **{field.name: any_of(hints[field.name]) for field in dataclasses.fields(shape)}
        )
    plain: dict[Any, SearchStrategy[Any]] = {
        float: st.one_of(st.just(0.0), st.floats(min_value=1e-9, max_value=2.0), st.floats(8, 1e9)),
        int: st.integers(0, 64),
        str: st.sampled_from(WORDS),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return plain[shape]
