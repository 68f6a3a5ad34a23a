"""The product's answers for a configuration: without a GPU, corrected by probes, and the largest batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.memory.configuration import Configuration

if TYPE_CHECKING:
    from flatout.memory.predict.estimate import MemoryEstimate
    from flatout.memory.probe.probe_results import ProbeResult

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
    from flatout.memory.predict.forecast import estimate_job

    found = estimate_job(
        configuration.job, configuration.recipe, sizes=configuration.job.sizes, device=DEVICE
    )
    return _peaks(found)


def estimate_with_probe(configuration: Configuration, row: dict[str, Any]) -> dict[str, Any]:
    """As `flatout plan --profile` answers, from the probes of a measured row; beside it as without them.

    A job measured at a batch of 1 has no smaller batch to probe: its estimate is the plain one.
    """
    from flatout.memory.predict.forecast import Forecaster
    from flatout.memory.probe.probe_results import correct

    forecaster = Forecaster(configuration.job, device=DEVICE)
    full = forecaster.estimate(configuration.recipe)
    at_probes = [
        forecaster.estimate(configuration.recipe, sizes={"batch_size": probe["batch_size"]})
        for probe in row["probes"]
    ]
    better = correct(full, result_of(configuration, row), at_probes=at_probes) if at_probes else full
    return {
        **_peaks(better),
        "without_probe": _peaks(full),
        "at_probes": [{"batch_size": found.sizes["batch_size"], **_peaks(found)} for found in at_probes],
    }


def _peaks(found: MemoryEstimate) -> dict[str, int]:
    return {"allocated": found.peak_allocated_bytes, "reserved": found.peak_reserved_bytes}


def result_of(configuration: Configuration, row: dict[str, Any]) -> ProbeResult:
    """The probes of a measured row as the product keeps them."""
    from flatout.memory.probe.probe_results import ProbedBatch, ProbeResult

    names = ("batch_size", "peak_allocated_bytes", "peak_reserved_bytes")
    return ProbeResult(
        device=DEVICE,
        torch_version="measured",
        other_sizes={name: size for name, size in configuration.job.sizes.items() if name != "batch_size"},
        num_parameters=row["num_parameters"],
        num_trainable=row["num_trainable"],
        context_bytes=None,
        probes=tuple(
            ProbedBatch(num_steps=2, **{name: probe[name] for name in names}) for probe in row["probes"]
        ),
    )


def predict_largest(configuration: Configuration) -> dict[str, Any]:
    """The largest batches under the cap: without a flush, to rely on with flushes, with nothing kept free."""
    from flatout.memory.predict.forecast import Forecaster

    assert configuration.cap_bytes is not None
    forecaster = Forecaster(configuration.job, device=DEVICE)
    found = forecaster.largest_batch(configuration.recipe, cap_bytes=configuration.cap_bytes)
    return {
        "safe": found.safe,
        "tight": found.tight,
        "limit": found.limit,
        "num_flushes": found.num_flushes,
        "reserved_bytes": found.reserved_bytes,
    }
