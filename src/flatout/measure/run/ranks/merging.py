"""Merge the evidence of all ranks: the slowest rank's, with a summary of each of the others.

All ranks wait for the slowest, so its findings are the job's.  The others keep a few hundred bytes each, so
the evidence of a thousand ranks is still one small file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from flatout.measure import PHASES
from flatout.measure.evidence import Evidence, Rank
from flatout.measure.statistics import FEWEST_STEPS, mean_interval

MEETING = ("backward", "optimizer")  # phases in which ranks meet in any case


def rank_summary(evidence: Evidence) -> Rank:
    kernels, network = evidence.kernels, evidence.network
    low_s, high_s = _own_interval(evidence)
    return Rank(
        rank=evidence.job.rank,
        step_s=evidence.step_s,
        phases_s={phase: evidence.phase_s(phase) or 0.0 for phase in PHASES},
        ended=evidence.job.ended,
        host=evidence.job.host,
        node=evidence.job.node,
        communication_share=None if kernels is None else _share(kernels.communication_s, kernels.step_s),
        exposed_share=None if kernels is None else _share(kernels.exposed_s, kernels.step_s),
        link=None if network is None else network.link,
        link_bytes_per_s=None if network is None else network.link_bytes_per_s,
        meets_in=evidence.meets_in,
        own_low_s=low_s,
        own_high_s=high_s,
    )


def _own_interval(evidence: Evidence) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a rank's mean time per step in phases without collectives."""
    alone = [phase for phase in PHASES if phase not in (*MEETING, *evidence.meets_in)]
    steps = evidence.kept("real") or evidence.kept("warmup")
    own_s = [sum(step.phases_s.get(phase, 0.0) for phase in alone) for step in steps]
    if len(own_s) < FEWEST_STEPS:
        return None, None
    return mean_interval(own_s)


def _share(seconds: float | None, step_s: float) -> float | None:
    return None if seconds is None or step_s <= 0 else min(1.0, seconds / step_s)


def slowest_of(ranks: Iterable[Rank]) -> Rank:
    """Return the rank with the most time of its own: waiting for the others shows in backward."""
    return max(ranks, key=lambda rank: (rank.step_s or 0.0) - rank.phases_s.get("backward", 0.0))


def merge(own: Evidence, slowest: Evidence, ranks: Sequence[Rank], *, world_size: int) -> Evidence:
    """Merge into one Evidence: `own` is rank 0's, `slowest` that of the slowest of `ranks`."""
    missing = list(own.missing)
    if len(ranks) < world_size:
        missing.append(
            f"ranks: evidence of {len(ranks)} of {world_size} ranks was found; nodes that torchrun did not "
            "start need --save FILE in a folder that all of them see"
        )
    return dataclasses.replace(
        slowest,
        job=dataclasses.replace(own.job, rank=slowest.job.rank, world_size=world_size),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
        missing=tuple(missing),
    )
