"""What a short real run measured of a job, and how it corrects an estimate.

A trace knows every tensor, but not what libraries take besides: workspaces that depend on the kernel a
library picks, and the CUDA context.  A probe runs the job for real at one or two small batches.  What the
estimate missed at every one of them is missed at any batch, and is added.  Nothing is extrapolated: libraries
choose their kernels again at every size and segments have fixed sizes, so the difference between two probes
says nothing about a batch eight times as large.  And nothing is subtracted: a run may hold less than the job
will hold later, for example under a gradient scaler that skips the first steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.memory.predict.estimate import MemoryEstimate
from flatout.memory.predict.samples import BATCH


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedBatch:
    """A few real steps at one batch size."""

    batch_size: int
    num_steps: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    micro_batch_s: float | None = None  # forward and backward, with its share of the optimizer's step


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """What was measured of one job on one GPU."""

    device: str
    torch_version: str
    other_sizes: dict[str, int]  # without the batch size
    num_parameters: int
    num_trainable: int
    context_bytes: int | None
    probes: tuple[ProbedBatch, ...]
    context_missing: str | None = None  # why there are no context_bytes

    def __post_init__(self) -> None:
        batches = [probe.batch_size for probe in self.probes]
        errors = []
        if len(batches) not in (1, 2):
            errors.append(f"a probe result holds one or two batches, not {len(batches)}")
        if len(set(batches)) < len(batches):
            errors.append(f"its probes have the same batch size: {batches}")
        if BATCH in self.other_sizes:
            errors.append(f"{BATCH} is each probe's own")
        if errors:
            raise BadInput("; ".join(errors))

    @property
    def context(self) -> Decision[int] | None:
        """The CUDA context, for a `Forecaster`."""
        if self.context_bytes is None:
            return None
        reason = f"the context of a real run on {self.device} with torch {self.torch_version}"
        return Decision(value=self.context_bytes, reason=reason, source="measured")


def correct(
    estimate: MemoryEstimate, result: ProbeResult, *, at_probes: Sequence[MemoryEstimate]
) -> MemoryEstimate:
    """Correct `estimate` by what the estimates `at_probes`, made at the probes' own sizes, missed.

    At a probed batch the result is what was measured, and at a larger one never below it.  Allocated bytes
    that the trace did not have are counted under "workspaces" and keep the sum of the components; where the
    trace had too many, the components are left as traced.
    """
    _check_match(estimate, result, at_probes)
    batches = [probe.batch_size for probe in result.probes]
    ordered = sorted(at_probes, key=lambda each: batches.index(each.sizes[BATCH]))

    def corrected(peak: str) -> int:
        return _corrected(
            getattr(estimate, peak),
            [getattr(probe, peak) for probe in result.probes],
            [getattr(each, peak) for each in ordered],
            batches=batches,
            to=estimate.sizes[BATCH],
        )

    allocated, reserved = corrected("peak_allocated_bytes"), corrected("peak_reserved_bytes")
    reserved = max(reserved, allocated)
    context = result.context_bytes if result.context_bytes is not None else estimate.context_bytes
    components = dict(estimate.by_component)
    more = allocated - estimate.peak_allocated_bytes
    components["workspaces"] = components.get("workspaces", 0) + max(0, more)
    reason = f"a probe on {result.device} at {BATCH} {' and '.join(map(str, batches))}"
    return dataclasses.replace(
        estimate,
        device=result.device,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        context_bytes=context,
        process_bytes=None if context is None else reserved + context,
        by_component=components,
        workspaces=Decision(
            value=(*estimate.workspaces.value, *((more,) if more > 0 else ())),
            reason=reason,
            source="measured",
        ),
    )


def _corrected(
    estimated: int,
    measured: Sequence[int],
    estimated_there: Sequence[int],
    *,
    batches: Sequence[int],
    to: int,
) -> int:
    floors = [real for real, batch_size in zip(measured, batches, strict=True) if batch_size <= to]
    if to in batches:
        return max(floors)
    missed = min(real - found for real, found in zip(measured, estimated_there, strict=True))
    return max([estimated + max(0, missed), *floors])


def _check_match(estimate: MemoryEstimate, result: ProbeResult, at_probes: Sequence[MemoryEstimate]) -> None:
    probed = sorted(probe.batch_size for probe in result.probes)
    estimated = sorted(each.sizes[BATCH] for each in at_probes)
    if probed != estimated:
        raise BadInput(f"the probes have {BATCH} {probed}, the estimates at them {estimated}")
    for each in (estimate, *at_probes):
        others = {name: size for name, size in each.sizes.items() if name != BATCH}
        if others != result.other_sizes:
            raise BadInput(
                f"the probe ran at {result.other_sizes}, the estimate is for {others}",
                hint="probe at these sizes",
            )
        if (each.num_parameters, each.num_trainable) != (result.num_parameters, result.num_trainable):
            raise BadInput(
                f"the probe ran a model with {result.num_parameters} parameters "
                f"({result.num_trainable} trainable), the estimate of one with {each.num_parameters} "
                f"({each.num_trainable})",
                hint="probe this model",
            )
