from __future__ import annotations

import pytest

from flatout.doctor.rules.memory.needless_checkpointing import detect


def job(made, *arms, op="checkpoint"):
    return made.evidence(sites=(made.site("call", op=op, calls_per_step=6.0),), counterfactuals=arms)


def test_fires_where_kept_activations_were_measured_to_gain(made):
    (finding,) = detect(job(made, made.counterfactual("no-checkpointing", 1.25)))
    assert (finding.code, finding.place.line) == ("FO504", 30)
    assert finding.message.startswith("6 parts of the model")
    assert finding.ceiling.speedup == pytest.approx(1.25)


def test_checkpoints_that_memory_may_need_are_left_alone(made):
    assert detect(job(made)) == []


def test_look_alikes(made):
    assert detect(job(made, made.counterfactual("no-checkpointing", 1.0))) == []
    assert detect(job(made, made.counterfactual("no-checkpointing", 1.25), op="synchronize")) == []
