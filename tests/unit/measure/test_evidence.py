from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flatout.measure import evidence as module
from flatout.measure.evidence import (
    EVIDENCE_VERSION,
    Compilation,
    Counterfactual,
    Evidence,
    OperatorCalls,
    Place,
    Roofline,
    Step,
)
from flatout.measure.evidence_file import decode_evidence
from tests.support import doctor as builders
from tests.support.sick_job import SICK

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    float: st.floats(allow_nan=False, allow_infinity=False),
    int: st.integers(-(2**63), 2**63),
    str: st.text(max_size=8),
    bool: st.booleans(),
}


def a(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type, built from its hints, so that a field that is added is covered too."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{field.name: a(hints[field.name]) for field in dataclasses.fields(kind)})
    if origin is tuple:
        return st.lists(a(arguments[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), a(arguments[1]), max_size=2)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if arguments:
        return st.one_of(*(st.none() if each is type(None) else a(each) for each in arguments))
    return PLAIN[kind]


documents = a(Evidence).map(lambda made: dataclasses.replace(made, version=EVIDENCE_VERSION))


@given(evidence=documents)
def test_any_evidence_survives_json(evidence: Evidence) -> None:
    text = json.dumps(evidence.to_json(), allow_nan=False)
    assert decode_evidence(json.loads(text), name="e.json") == evidence


def test_the_built_document_fills_every_field_that_may_be_empty() -> None:
    """Otherwise the round trip above would prove little about it."""
    made = builders.evidence(
        ranks=builders.ranks(),
        network=SICK.network,
        meets_in=("forward",),
        operator_calls=(OperatorCalls(caller="AdamW.step", place=None, calls_per_step=9.0),),
        compilation=Compilation(functions=(), breaks=(), num_steps=9, steps_s=0.5),
        garbage=SICK.garbage,
        threads=SICK.threads,
        training=SICK.training,
        inner_calls=SICK.inner_calls,
        optimizers=SICK.optimizers,
        roofline=Roofline(flops=1e9, num_bytes=1e8, compute_s=0.1, memory_s=0.05),
    )
    empty = [field.name for field in dataclasses.fields(made) if not getattr(made, field.name)]
    assert empty == []


def test_every_noun_of_the_document_is_frozen_and_keyword_only() -> None:
    nouns = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    ]
    assert len(nouns) >= 20
    for noun in nouns:
        assert noun.__dataclass_params__.frozen, noun  # type: ignore[attr-defined]
        assert all(field.kw_only for field in dataclasses.fields(noun)), noun
        assert hasattr(noun, "__slots__"), noun


def test_the_step_is_the_mean_of_the_kept_real_steps() -> None:
    def step(index: int, arm: Any, step_s: float, kept: bool = True) -> Step:
        phases_s = {"forward": step_s / 2}
        return Step(index=index, arm=arm, block=0, step_s=step_s, phases_s=phases_s, kept=kept)

    made = builders.evidence(
        steps=(
            step(0, "warmup", 9.0),
            step(1, "real", 1.0),
            step(2, "real", 3.0),
            step(3, "real", 50.0, False),
        )
    )
    assert made.step_s == 2.0
    assert made.phase_s("forward") == 1.0
    assert made.phase_s("backward") == 0.0
    assert [each.index for each in made.kept("real")] == [1, 2]
    assert builders.evidence(steps=(step(0, "warmup", 9.0),)).step_s == 9.0


def test_without_steps_the_step_is_unknown() -> None:
    assert builders.bare_evidence().step_s is None
    assert builders.bare_evidence().phase_s("forward") is None


def test_counterfactuals_are_found_by_name() -> None:
    made = builders.evidence()
    cached = made.counterfactual("cached")
    assert isinstance(cached, Counterfactual)
    assert cached.kind == "cached"
    assert builders.bare_evidence().counterfactual("half") is None


def test_a_place_reads_like_a_compiler_message() -> None:
    assert str(Place(file="pkg/train.py", line=7, function="main")) == "pkg/train.py:7"
