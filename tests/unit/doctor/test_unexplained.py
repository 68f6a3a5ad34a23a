"""Time that no rule explains is said with where it is, and little time is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flatout.doctor.unexplained import unexplained
from flatout.measure import PHASES
from flatout.measure.evidence import Evidence, Roofline, StackPath, Stacks
from flatout.measure.evidence_file import load_evidence
from tests.support import doctor as builders

ROOT = Path(__file__).resolve().parents[3]


def with_rest(rest: float, *, of_loss: int = 0, gpu: bool = False) -> Evidence:
    """A job between its phases for `rest` of its step; `of_loss` of 100 looks found it in the loss."""
    made = (builders.evidence if gpu else builders.cpu_evidence)(counterfactuals=())
    phases = dict.fromkeys(PHASES, 0.0) | {"rest": rest, "forward": 1.0 - rest}
    steps = tuple(replace(step, step_s=1.0, phases_s=phases) for step in made.steps)
    paths = (
        StackPath(phase="rest", places=(builders.SYNC_LINE,), samples=100 - of_loss),
        StackPath(phase="rest", places=(builders.CREATE_LINE,), samples=of_loss),
    )
    stacks = Stacks(
        num_steps=2, samples_by_phase={"rest": 100}, paths=paths, differentiable=(builders.CREATE_LINE,)
    )
    return replace(made, steps=steps, stacks=stacks, episodes=())


def test_time_between_the_phases_is_named_by_its_line() -> None:
    words = unexplained(with_rest(0.9))
    assert words is not None
    assert words.startswith("90 % of the step lies outside the model and the optimizer")
    assert f"{builders.SYNC_LINE} (90 % of the step)" in words


def test_little_time_and_the_lines_of_the_loss_are_nothing_to_explain() -> None:
    assert unexplained(with_rest(0.09)) is None
    assert unexplained(with_rest(0.2, of_loss=95)) is None


def test_a_treatment_that_pays_is_said_though_no_rule_speaks_of_it() -> None:
    made = replace(builders.counterfactuals()[0], kind="trimmed", label="trimmed", speedup=1.9)
    paying = replace(with_rest(0.05), counterfactuals=(replace(made, speedup_low=1.7, speedup_high=2.2),))
    assert unexplained(paying) == "with batches cut to their longest row the step is 1.90× as fast, measured."
    chance = replace(made, speedup_low=1.05, speedup_high=2.2)
    assert unexplained(replace(paying, counterfactuals=(chance,))) is None


def test_a_loss_that_takes_most_of_the_step_is_named() -> None:
    words = unexplained(with_rest(0.9, of_loss=95))
    assert words is not None
    assert f"{builders.CREATE_LINE} (86 % of the step)" in words


def test_a_forward_that_the_script_calls_itself_is_the_model() -> None:
    made = with_rest(0.9, of_loss=95)
    forward = replace(builders.CREATE_LINE, function="Layer.forward")
    assert made.stacks is not None
    rest, loss = made.stacks.paths
    stacks = replace(made.stacks, paths=(rest, replace(loss, places=(forward,))), differentiable=(forward,))
    assert unexplained(replace(made, stacks=stacks)) is None


def test_time_between_the_steps_is_named_though_no_line_holds_much_of_it() -> None:
    episodes = tuple(
        replace(builders.evidence().episodes[0], place=place, per_step_s=0.06)
        for place in (builders.SYNC_LINE, builders.LOADER_LINE)
    )
    words = unexplained(replace(with_rest(0.0), episodes=episodes))
    assert words is not None
    assert words.startswith("11 % of the job lies outside its steps")
    assert f"{builders.SYNC_LINE} (5 %)" in words
    assert unexplained(replace(with_rest(0.0), episodes=episodes[:1])) is None


def test_on_a_gpu_only_its_idle_time_counts() -> None:
    evidence = with_rest(0.9, gpu=True)
    assert evidence.kernels is not None
    for busy, said in ((0.95, False), (0.4, True)):
        words = unexplained(replace(evidence, kernels=replace(evidence.kernels, busy_share=busy)))
        assert (words is not None and "the GPU is idle for 60 % of the step" in words) == said


RECORDED = sorted((ROOT / "tests" / "planted").glob("*/evidence/*.json.gz"))


def test_nothing_costs_time_is_said_of_no_recorded_job_that_loses_a_tenth() -> None:
    assert len(RECORDED) > 20
    for path in RECORDED:
        evidence = load_evidence(path)
        if unexplained(evidence) is None:
            busy = evidence.kernels.busy_share if evidence.kernels is not None else None
            assert busy is not None, path  # each was recorded on a GPU
            assert 1 - busy < 0.1, path
            cached = evidence.counterfactual("cached")
            assert cached is None or cached.speedup_low <= 1.05, path


def test_a_gpu_of_which_no_kernel_was_seen_is_not_called_busy() -> None:
    evidence = builders.evidence(kernels=None, counterfactuals=(), episodes=())
    assert unexplained(evidence) is not None


def test_a_step_of_many_small_operators_is_far_from_the_roofline() -> None:
    step_s = builders.cpu_evidence().step_s or 0.0
    many = replace(builders.kernels(), busy_share=None, num_kernels=step_s / 10e-6)
    far = Roofline(flops=1.0, num_bytes=1.0, compute_s=0.02 * step_s, memory_s=0.01 * step_s)
    evidence = builders.cpu_evidence(kernels=many, roofline=far)
    words = unexplained(evidence) or ""
    assert words.startswith("the step runs at 2 % of the roofline: it calls ")
    assert words.endswith("operators, one every 10.0 µs, and each does little work.")
    near = replace(far, compute_s=0.2 * step_s)
    assert unexplained(replace(evidence, roofline=near)) is None
    few = replace(many, num_kernels=step_s / 1e-3)
    assert unexplained(replace(evidence, kernels=few)) is None
