"""The contract of a rule, as a test class for whoever writes one.

    from flatout.doctor.rule import read_rule
    from flatout.testing.rules import RuleContract
    from my_package import slow_print

    class TestRules(RuleContract):
        rules = (read_rule(slow_print),)

pytest then holds the rules to what the doctor relies on: a whole documentation, no finding where nothing was
measured, and findings that can be shown and saved for any Evidence at all (hypothesis makes it up).
`SICK` is a job with many faults to start one's own tests from.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

from flatout.codec import decode, encode
from flatout.doctor.finding import Finding
from flatout.doctor.rule import SECTIONS, Rule
from flatout.measure.evidence import (
    Call,
    Copy,
    Counterfactual,
    EpochStart,
    Evidence,
    Gpu,
    GraphGrowth,
    Host,
    Job,
    Kernels,
    Lengths,
    Loader,
    Memory,
    ModuleCall,
    Place,
    Precision,
    Site,
    SiteKind,
    Spread,
    Step,
)

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

KINDS: tuple[SiteKind, ...] = ("create", "row", "cell", "sync")
COUNTERFACTUALS: tuple[Literal["cached", "half"], ...] = ("cached", "half")
JOB = Job(
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

HERE = Place(file="train.py", line=7, function="train")
BATCH = Spread(num=8, mean_s=0.05, median_s=0.05, p95_s=0.05, max_s=0.05)
LOADER = Loader(
    place=HERE,
    dataset="Samples",
    num_workers=0,
    batch_size=32,
    pin_memory=False,
    persistent_workers=False,
    prefetch_factor=None,
    num_batches=10,
    trains=True,
    collate_s=BATCH,
    lengths=Lengths(num_samples=320, mean=64.0, max=128, padded_share=0.5, bucketed_share=0.0),
    calls=(Call(function="numpy.pad", place=HERE, in_collate=True, calls_per_batch=32.0),),
)
# A job with many faults, so that what follows meets rules that have something to say.
SICK = dataclasses.replace(
    EMPTY,
    job=dataclasses.replace(JOB, device="cuda"),
    host=Host(cores=8.0, memory_bytes=2**34),
    gpu=Gpu(
        name="NVIDIA H200",
        memory_bytes=2**37,
        compute_capability="9.0",
        peak_flops={"fp32": 67e12, "tf32": 494e12, "bf16": 989e12},
    ),
    steps=(Step(index=0, arm="real", block=0, step_s=0.2, phases_s={"wait": 0.1, "forward": 0.1}, rows=32),),
    loaders=(
        LOADER,
        dataclasses.replace(
            LOADER, num_workers=2, trains=True, epochs=(EpochStart(iter_s=1.0, first_wait_s=1.0),) * 2
        ),
    ),
    sites=(
        *(
            Site(kind=kind, op="op", place=HERE, via=None, calls_per_step=32.0, device="cuda", host_s=0.05)
            for kind in KINDS
        ),
        Site(
            kind="copy",
            op="to",
            place=HERE,
            via=None,
            calls_per_step=2.0,
            device="cuda",
            bytes_per_step=2.0**24,
            pinned=False,
        ),
    ),
    module_calls=(
        ModuleCall(
            module="Model",
            place=HERE,
            calls_per_step=32.0,
            rows=1,
            training=True,
            has_parameters=True,
            host_s=0.1,
        ),
    ),
    attributed_step_s=0.4,
    kernels=Kernels(
        num_steps=3,
        step_s=0.3,
        busy_share=0.6,
        num_kernels=500.0,
        median_kernel_s=1e-5,
        gap_s=0.1,
        sync_gap_s=0.1,
        num_syncs=32.0,
        by_category_s={"matmul": 0.1},
        matmul_s_by_dtype={"fp32": 0.1},
        top=(),
        copies=(Copy(kind="HtoD pageable", calls_per_step=2.0, total_s=0.05),),
    ),
    memory=Memory(
        num_steps=4,
        peak_bytes=2**30,
        growth_bytes_per_step=2.0**20,
        graphs=(GraphGrowth(holder="losses", holder_place=HERE, nodes_per_step=40.0),),
    ),
    counterfactuals=tuple(
        Counterfactual(
            name=name,
            baseline="real",
            step_s=0.1,
            baseline_step_s=0.2,
            speedup=2.0,
            speedup_low=1.8,
            speedup_high=2.2,
            num_blocks=3,
            num_steps=12,
        )
        for name in COUNTERFACTUALS
    ),
    precision=Precision(parameter_dtypes=("float32",), autocast=None, tf32_matmul=False, bf16_supported=True),
)

# Names that rules look for; a random word would never meet one.
WORDS = (
    "",
    "9.0",
    "7.5",
    "x.y",
    "HtoD pageable",
    "__getitem__",
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
    """Subclass it, and name the rules."""

    rules: ClassVar[tuple[Rule, ...]]
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

    def test_findings_of_a_job_with_many_faults_can_be_shown_and_saved(self) -> None:
        for rule in self.rules:
            for finding in rule.detect(SICK):
                check(finding, rule)

    def test_any_evidence_gives_findings_that_can_be_shown_and_saved(self) -> None:
        """Faults everywhere, and any part of the Evidence replaced by anything of its type."""
        from hypothesis import given, settings
        from hypothesis import strategies as st

        hints = typing.get_type_hints(Evidence)
        parts = {
            field.name: st.none() | any_of(hints[field.name]).map(lambda part: (part,))
            for field in dataclasses.fields(Evidence)
        }

        @settings(max_examples=self.num_examples)
        @given(st.fixed_dictionaries(parts))
        def holds(changes: dict[str, tuple[Any] | None]) -> None:
            known = {name: part[0] for name, part in changes.items() if part}
            evidence = dataclasses.replace(SICK, **known)
            for rule in self.rules:
                findings = rule.detect(evidence)
                assert isinstance(findings, list), rule.name
                for finding in findings:
                    check(finding, rule)

        holds()


def check(finding: Finding, rule: Rule) -> None:
    """Whether a finding says what every finding says, in numbers that are numbers."""
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
    """Values of a type as the codec knows types; seconds and shares are finite and not negative."""
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
