"""How long trials run: steps of a run, seconds of blocks in one run, and how many runs fit at once.

Everything follows from the evidence of the diagnosis: how long a step takes, how many the job has, and what
the machine offers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flatout.measure.evidence import Evidence
from flatout.measure.run.step_blocks.schedule import steps_per_block
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trial.switched import MOST_ROUNDS
from flatout.tuner.trials import TrialPlan

BLOCK_S, MOST_BLOCK_STEPS = 0.4, 50
FEWEST_WARMUP = 8
LONG_STEP_S = 0.5  # above it few steps suffice: one step replaces a block of short ones
WAITS = 0.03  # of the step: a job that waits less for its loader runs at its own pace
BLOCKS_PER_ROUND = 1.6  # in an arm's blocks: half a baseline block, and some longer ones
LEAST_LIMIT_S, HANGS = 180.0, 4.0  # a large model takes a minute or two to compile
USABLE, PEAK_FACTOR, CONTEXT_BYTES, CORES_EACH = 0.85, 1.25, 1 << 30, 2  # for trials beside each other


def length_of(evidence: Evidence) -> int | None:
    """Return the steps of a job that was diagnosed to its end; None if it was cut off."""
    ran_out = evidence.job.ended == "finished" and evidence.steps
    return evidence.steps[-1].index if ran_out else None


def plan_for(evidence: Evidence) -> TrialPlan:
    """Choose how many steps a trial of a diagnosed job runs."""
    step_s, wait_s = evidence.step_s or 0.0, evidence.phase_s("wait") or 0.0
    plan = plan_of(step_s, most_steps=length_of(evidence), epoch_steps=steps_of(evidence))
    plan = replace(plan, seen_steps=evidence.steps[-1].index if evidence.steps else 0)
    workers = [each.num_workers or 0 for each in evidence.loaders if each.trains]
    return plan.past_queue(max(workers)) if workers and wait_s >= WAITS * step_s else plan


def plan_of(step_s: float, *, most_steps: int | None = None, epoch_steps: int | None = None) -> TrialPlan:
    """Choose how many steps a trial runs, by how long one takes and how many the job has."""
    block_steps = min(MOST_BLOCK_STEPS, max(2, round(BLOCK_S / step_s)))
    plan = TrialPlan(warmup=max(FEWEST_WARMUP, block_steps), blocks=5, block_steps=block_steps)
    if step_s >= LONG_STEP_S:
        plan = TrialPlan(warmup=3, blocks=3, block_steps=1)
    elif most_steps is not None and plan.num_steps > most_steps:
        warmup = min(plan.warmup, max(3, most_steps // 5))
        block_steps = max(2, (most_steps - warmup - 1) // plan.blocks)
        plan = replace(plan, warmup=warmup, block_steps=block_steps)
    limit_s = HANGS * plan.num_steps * step_s + LEAST_LIMIT_S
    return replace(plan, limit_s=limit_s, most_steps=most_steps, epoch_steps=epoch_steps)


def at_once(evidence: Evidence, runs: Sequence[TrialResult]) -> int:
    """Return how many trials have room beside each other on a GPU, by their peak or that of the diagnosis."""
    gpu, memory = evidence.gpu, evidence.memory
    known = [run.peak_bytes for run in runs] or [memory.peak_bytes if memory is not None else None]
    peak = max(each or 0 for each in known)
    if gpu is None or not gpu.memory_bytes or not peak or evidence.job.world_size > 1:
        return 1
    fit = int(USABLE * gpu.memory_bytes / (PEAK_FACTOR * peak + CONTEXT_BYTES))
    return max(1, min(fit, round(evidence.host.cores or 1) // CORES_EACH))


def seconds_for(num_arms: int, step_s: float) -> float:
    """Return the longest time that blocks of this many arms take in one run."""
    return BLOCKS_PER_ROUND * num_arms * MOST_ROUNDS * steps_per_block(step_s) * step_s


def steps_of(evidence: Evidence) -> int | None:
    """Return the steps of an epoch; None if no loader knows them."""
    loaders = [loader for loader in evidence.loaders if loader.trains and loader.num_batches]
    per_step = max((step.num_batches for step in evidence.steps), default=1)
    return (loaders[0].num_batches or 0) // max(1, per_step) or None if loaders else None
