"""What others answer to the same question on the same machine without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from benchmarks.memory.configuration import Configuration
from flatout.memory.jobs.step import make_parts, run_step


def four_times_parameters(configuration: Configuration) -> dict[str, Any]:
    """The rule of thumb: weights, gradients and two moments of Adam, all in fp32."""
    with torch.device("meta"):
        model = configuration.job.make_model()
    return {"allocated": 16 * sum(parameter.numel() for parameter in model.parameters())}


def accelerate_estimate(configuration: Configuration) -> dict[str, Any]:
    """`accelerate estimate-memory`, its column «Training using Adam», on the empty model."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        model = configuration.job.make_model()
    names = {"fp16": "float16", "bf16": "bfloat16", "pure-bf16": "bfloat16"}
    total_bytes, _ = calculate_maximum_sizes(model)
    if configuration.recipe.mode != "train":
        return {"allocated": total_bytes // (2 if configuration.recipe.precision == "pure-bf16" else 1)}
    usage = estimate_training_usage(total_bytes, names.get(configuration.recipe.precision, "float32"))
    return {"allocated": max(usage.values())}


def mem_tracker(configuration: Configuration) -> dict[str, Any]:
    """PyTorch's MemTracker over two steps on fake CPU tensors; it knows nothing of reserved bytes."""
    from torch.distributed._tools.mem_tracker import MemTracker

    job, recipe = configuration.job, configuration.recipe
    with torch.device("meta"):
        model = job.make_model()
    with FakeTensorMode(allow_non_fake_inputs=True):
        half = torch.bfloat16 if recipe.precision == "pure-bf16" else None
        _place_on_fake_cpu(model, dtype=half)
        placed = dataclasses.replace(job, make_model=lambda: model)
        as_it_is = dataclasses.replace(recipe, precision="fp32") if half else recipe
        with patch.object(type(model), "to", lambda self, *args, **kwargs: self):  # it fails on fake tensors
            parts = make_parts(placed, as_it_is, device="cpu")
        parts.scaler = None  # it asks a tensor for its value, which a fake one does not have
        batch = job.make_batch(**job.sizes)
        tracker = MemTracker()
        inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        tracker.track_external(parts.model, *([parts.optimizer] if parts.optimizer else []), *inputs)
        with tracker:
            for _ in range(2):
                run_step(
                    parts, job, as_it_is, batch, device="cpu", mark=lambda phase: _let_again(tracker, phase)
                )
        peak = tracker.get_tracker_snapshot("peak")
    return {"allocated": peak[torch.device("cpu")]["Total"]}


def _let_again(tracker: Any, phase: str) -> None:
    """It refuses a second forward of a module unless its statistics are dropped; the peak is kept."""
    if phase == "forward":
        tracker.reset_mod_stats()


def _place_on_fake_cpu(model: nn.Module, *, dtype: torch.dtype | None) -> None:
    """Parameters and buffers of the meta device become CPU tensors without data; what is tied stays tied."""
    placed: dict[Any, Any] = {}

    def place(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in placed:
                    placed[parameter] = nn.Parameter(place(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = placed[parameter]
                if isinstance(module, nn.RNNBase):
                    setattr(module, name, placed[parameter])
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = place(buffer)


PEERS = {
    "4 x parameters": four_times_parameters,
    "accelerate": accelerate_estimate,
    "MemTracker": mem_tracker,
}
