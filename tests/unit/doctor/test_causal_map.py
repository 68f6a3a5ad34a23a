from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.causal_map import causal_map, flat
from flatout.doctor.examine import Diagnosis, examine
from flatout.measure.evidence import StackPath, Stacks


def knocked_out(made, speedup, *, line, last_line, **changes):
    return made.counterfactual("knock-out", speedup, line=line, last_line=last_line, **changes)


def test_the_largest_block_comes_first_and_holds_those_inside_it(made):
    arms = (
        knocked_out(made, 1.1, line=50, last_line=52),
        knocked_out(made, 1.5, line=12, last_line=14),
        knocked_out(made, 2.0, line=10, last_line=20),
        knocked_out(made, 1.2, line=13, last_line=13),
        made.counterfactual("cached", 3.0),
    )
    listed = flat(causal_map(made.evidence(counterfactuals=arms)))
    assert [(depth, block.where) for depth, block in listed] == [
        (0, "train.py:10-20"),
        (1, "train.py:12-14"),
        (2, "train.py:13"),
        (0, "train.py:50-52"),
    ]
    first = listed[0][1]
    assert (first.step_s, first.freed_share) == (pytest.approx(0.05), pytest.approx(0.5))
    assert (first.speedup_low, first.speedup_high) == (pytest.approx(1.98), pytest.approx(2.02))


def test_a_block_lies_inside_the_statement_that_calls_it(made):
    call, loop = made.place(40), made.place(75, file="model.py")
    outer = knocked_out(made, 3.0, line=40, last_line=40)
    inner = knocked_out(made, 2.5, line=70, last_line=80, place=dataclasses.replace(loop, line=70))
    paths = (StackPath(phase="forward", places=(call, loop), samples=50),)
    stacks = Stacks(num_steps=2, samples_by_phase={"forward": 50}, paths=paths)
    job = made.evidence(counterfactuals=(inner, outer), stacks=stacks)
    assert [(depth, block.where) for depth, block in flat(causal_map(job))] == [
        (0, "train.py:40"),
        (1, "model.py:70-80"),
    ]
    apart = dataclasses.replace(job, stacks=None)
    assert [depth for depth, _block in flat(causal_map(apart))] == [0, 0]
    told = dataclasses.replace(inner, parent=outer.label)
    job = dataclasses.replace(apart, counterfactuals=(told, outer))
    assert [depth for depth, _block in flat(causal_map(job))] == [0, 1]


def test_a_block_measured_on_cached_batches_is_told_of_the_real_step(made):
    cached = made.counterfactual("cached", 2.0)
    arm = knocked_out(made, 5.0, line=30, last_line=30, baseline="cached", baseline_step_s=0.05, step_s=0.01)
    (block,) = causal_map(made.evidence(counterfactuals=(cached, arm)))
    assert block.step_s == pytest.approx(0.06)
    assert block.speedup == pytest.approx(0.1 / 0.06)


def test_nothing_knocked_out_is_no_map(made):
    assert causal_map(made.evidence()) == ()


def test_the_map_is_in_the_json(made):
    job = made.evidence(counterfactuals=(knocked_out(made, 2.0, line=10, last_line=20),))
    (block,) = Diagnosis(evidence=job, findings=examine(job)).to_json()["map"]
    assert (block["place"]["line"], block["last_line"], block["blocks"]) == (10, 20, [])


def test_in_brief_a_block_gives_way_to_the_one_inside_it_that_costs_the_same(made):
    arms = (
        knocked_out(made, 4.0, line=10, last_line=40),
        knocked_out(made, 3.9, line=12, last_line=30),
        knocked_out(made, 1.2, line=14, last_line=15),
    )
    blocks = causal_map(made.evidence(counterfactuals=arms))
    assert [block.where for _depth, block in flat(blocks)] == [
        "train.py:10-40",
        "train.py:12-30",
        "train.py:14-15",
    ]
    assert [(depth, block.where) for depth, block in flat(blocks, brief=True)] == [
        (0, "train.py:12-30"),
        (1, "train.py:14-15"),
    ]
