from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.doctor.examine import examine
from flatout.doctor.rules.waits.costly_block import detect
from flatout.measure.evidence import InnerCalls, StackPath, Stacks


def looping(made, *, speedup=4.0, roofline_s=1e-4, phase="forward", loops=(30,), **changes):
    """A job whose model spends most of its time in line 31, in a loop that begins at line 30."""
    step, line = made.place(9), made.place(31, function="Model.forward")
    stacks = Stacks(
        num_steps=4,
        samples_by_phase={phase: 80, "backward": 20},
        paths=(
            StackPath(phase=phase, places=(step, line), samples=70),
            StackPath(phase=phase, places=(step,), samples=10),
            StackPath(phase="backward", places=(step,), samples=20),
        ),
        loops={str(line): loops, str(step): (8,)},
    )
    block = made.counterfactual("knock-out", speedup, line=29, last_line=33, roofline_s=roofline_s)
    return made.evidence(stacks=stacks, counterfactuals=(block,), **changes)


def test_a_loop_of_the_model_that_is_not_its_arithmetic_is_found_where_it_begins(made):
    (finding,) = detect(looping(made))
    assert (finding.code, finding.place) == ("FO207", made.place(30, function="Model.forward"))
    assert finding.share == pytest.approx(0.75)
    assert finding.ceiling.speedup == pytest.approx(0.1 / (0.025 + 1e-4))


def test_a_loop_has_the_ceiling_of_its_own_block_and_not_of_the_function_around_it(made):
    """Seen on attention written as a loop: 70x for the loop, measured without the whole model."""
    job = looping(made, speedup=70.0)
    loop = made.counterfactual("knock-out", 4.0, line=30, last_line=33, roofline_s=1e-4)
    inside = made.counterfactual("knock-out", 3.0, line=31, last_line=31, roofline_s=1e-4)
    for blocks in ((*job.counterfactuals, loop, inside), (inside, loop, *job.counterfactuals)):
        (finding,) = detect(replace(job, counterfactuals=blocks))
        assert (finding.place.line, finding.ceiling.arm) == (30, loop.label)
        assert finding.share == pytest.approx(0.75)


@pytest.mark.parametrize(
    "changes",
    [
        {"speedup": 1.2},
        {"roofline_s": 0.02},  # a fifth of the step is arithmetic
        {"roofline_s": None},
        {"loops": ()},  # no loop
        {"loops": (8,)},  # the training loop
        {"phase": "wait"},
    ],
)
def test_look_alikes(made, changes):
    assert detect(looping(made, **changes)) == []


@pytest.mark.parametrize(("library", "names"), [(None, False), ("numpy", False), ("tqdm/std", True)])
def test_progress_bars_are_named_where_the_block_draws_one(made, library, names):
    job = looping(made)
    paths = tuple(replace(path, library=library if path.samples == 70 else None) for path in job.stacks.paths)
    (finding,) = examine(replace(job, stacks=replace(job.stacks, paths=paths)))
    assert (finding.code, finding.tune == ("progress-bars",)) == ("FO207", names)


def test_what_another_rule_knows_the_cause_of_is_left_to_it(made):
    job = looping(made, sites=(made.site("row", line=31, host_s=0.1),))
    assert [finding.code for finding in examine(job)] == ["FO302"]


def test_a_function_that_a_loop_of_the_step_calls_is_found_at_the_loop(made):
    """A rollout: some of its time lies in the model, some between the phases."""
    main, rollout, act = made.place(9), made.place(20, function="rollout"), made.place(31, function="act")
    stacks = Stacks(
        num_steps=4,
        samples_by_phase={"rest": 60, "forward": 20, "backward": 20},
        paths=(
            StackPath(phase="rest", places=(main, rollout, act), samples=60),
            StackPath(phase="forward", places=(main, rollout, act), samples=20),
            StackPath(phase="backward", places=(made.place(10),), samples=20),
        ),
        loops={str(main): (8,), str(made.place(10)): (8,), str(rollout): (19,)},
    )
    whole = made.counterfactual("knock-out", 9.0, line=30, last_line=33, roofline_s=1e-6)
    part = made.counterfactual("knock-out", 1.4, line=31, last_line=31, roofline_s=1e-6)
    job = made.evidence(stacks=stacks, counterfactuals=(part, whole))
    (finding,) = detect(job)
    assert (finding.place, finding.ceiling.arm) == (made.place(19, function="rollout"), whole.label)


def test_a_loop_around_a_line_that_another_rule_names_is_left_to_it(made):
    """A game: the loop calls the model on one row, and the model's own block is what was left out."""
    main, act, forward = made.place(9), made.place(21), made.place(51, function="Model.forward")
    stacks = Stacks(
        num_steps=4,
        samples_by_phase={"forward": 80, "backward": 20},
        paths=(
            StackPath(phase="forward", places=(main, act, forward), samples=80),
            StackPath(phase="backward", places=(made.place(10),), samples=20),
        ),
        loops={str(main): (8,), str(made.place(10)): (8,), str(act): (20,), str(forward): ()},
    )
    whole = made.counterfactual("knock-out", 4.0, line=50, last_line=52, roofline_s=1e-6)
    call = made.counterfactual("knock-out", 3.0, line=21, last_line=21)
    calls = made.module_call(rows=1, place=act, calls_per_step=32.0, host_s=0.1)
    inner = InnerCalls(module="Model", place=act, calls_per_step=32.0, num_modules=1, rows_differ=False)
    job = made.evidence(
        stacks=stacks, counterfactuals=(whole, call), module_calls=(calls,), inner_calls=(inner,)
    )
    assert [finding.place for finding in detect(job)] == [made.place(20)]
    assert [finding.code for finding in examine(job)] == ["FO304"]


def over_layers(made, *, calls_per_step, num_modules):
    line = made.place(31, function="Model.forward")
    calls = InnerCalls(
        module="Block", place=line, calls_per_step=calls_per_step, num_modules=num_modules, rows_differ=False
    )
    return looping(made, inner_calls=(calls,))


def test_a_loop_over_layers_is_the_model_itself(made):
    assert detect(over_layers(made, calls_per_step=6.0, num_modules=6)) == []
    assert detect(over_layers(made, calls_per_step=60.0, num_modules=6)) != []  # and each of them in a loop


def test_a_loop_whose_time_lies_in_other_modules_forward_is_one_over_layers(made):
    job = looping(made)
    step, line = made.place(9), made.place(31, function="Model.forward")
    inner = made.place(51, function="Block.forward")
    paths = (StackPath(phase="forward", places=(step, line, inner), samples=70), *job.stacks.paths[1:])
    assert detect(replace(job, stacks=replace(job.stacks, paths=paths))) == []
