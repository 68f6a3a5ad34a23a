"""The product's answers for a configuration: without a GPU, corrected by probes, and the largest batch."""

from __future__ import annotations

from typing import Any

from benchmarks.memory.configuration import Configuration

DEVICE = "H200"


def versions() -> dict[str, str]:
    import peft
    import torch
    import transformers

    import flatout

    return {
        "flatout": flatout.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def estimate(configuration: Configuration) -> dict[str, Any]:
    from flatout.memory.forecast import estimate_job

    found = estimate_job(
        configuration.job, configuration.recipe, sizes=configuration.job.sizes, device=DEVICE
    )
    return {"allocated": found.peak_allocated_bytes, "reserved": found.peak_reserved_bytes}


def estimate_with_probe(configuration: Configuration, probes: list[dict[str, Any]]) -> dict[str, Any]:
    """What the trace misses at the probes' batches, carried on in a straight line to the full batch."""
    from flatout.memory.forecast import estimate_job

    full = estimate(configuration)
    missed: dict[str, list[float]] = {"allocated": [], "reserved": []}
    for probe in probes:
        sizes = configuration.sizes(batch_size=probe["batch_size"])
        found = estimate_job(configuration.job, configuration.recipe, sizes=sizes, device=DEVICE)
        missed["allocated"].append(probe["peak_allocated_bytes"] - found.peak_allocated_bytes)
        missed["reserved"].append(probe["peak_reserved_bytes"] - found.peak_reserved_bytes)
    batches = [probe["batch_size"] for probe in probes]
    return {
        quantity: full[quantity] + carried_on(batches, misses, to=configuration.batch_size)
        for quantity, misses in missed.items()
    }


def carried_on(batches: list[int], misses: list[float], *, to: int) -> float:
    """The line through two points, the constant through one, nothing without any."""
    if not batches:
        return 0.0
    if len(batches) == 1:
        return misses[0]
    slope = (misses[1] - misses[0]) / (batches[1] - batches[0])
    return misses[0] + slope * (to - batches[0])


def predict_largest(configuration: Configuration) -> dict[str, Any]:
    """The largest batch under the cap without a flush of the allocator's cache, and with flushes."""
    from flatout.memory.forecast import largest_batch

    assert configuration.cap_bytes is not None
    found = largest_batch(
        configuration.job,
        configuration.recipe,
        sizes=configuration.job.sizes,
        device=DEVICE,
        cap_bytes=configuration.cap_bytes,
    )
    return {"safe": found.safe, "limit": found.limit, "reserved_bytes": found.reserved_bytes}
