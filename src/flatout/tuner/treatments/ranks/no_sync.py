"""Sum the gradients of several micro-batches on each rank, and exchange them once.

DistributedDataParallel exchanges gradients in every backward pass.  Under accumulation only the last one
before the optimizer's step has to.  The measurement gives the number of backward passes per step; if a step
comes earlier, at the end of an epoch, the remaining gradients are exchanged before it, and before gradients
are clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.step_hooks import around_steps
from flatout.tuner.treatment import Case, Treatment, Value

# A model that uses parameters conditionally would wait for gradients that never come; a closure computes them
# inside the step; a scaler skips steps on one rank and not on another.
REFUSED = ("find_unused_parameters", "no_sync(", "static_graph", "closure", "GradScaler")


def propose(case: Case) -> list[Value]:
    """Propose it if several processes train, and all steps have the same number of backward passes, not 1."""
    evidence = case.evidence
    backwards = {step.num_backwards for step in evidence.kept("real")}
    if evidence.job.world_size < 2 or len(backwards) != 1 or "DistributedDataParallel" not in case.source:
        return []
    if any(word in case.source for word in REFUSED):
        return []
    (number,) = backwards
    return [number] if number > 1 else []


def install(patches: Patches, value: Value) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    real_forward, every = DistributedDataParallel.forward, int(value)
    num_backwards: dict[int, int] = {}  # of each model, since the last step
    models: dict[int, Any] = {}

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training and torch.is_grad_enabled() and not model.find_unused_parameters:
            models[id(model)] = model
            done = num_backwards.get(id(model), 0)
            model.require_backward_grad_sync = (done + 1) % every == 0
            num_backwards[id(model)] = done + 1
        return real_forward(model, *args, **kwargs)  # type: ignore[no-untyped-call]

    def complete() -> None:
        for key, model in models.items():
            if num_backwards.get(key, 0) % every:
                _exchange(model)
            num_backwards[key] = 0

    patches.replace(DistributedDataParallel, "forward", forward)
    around_steps(patches, before=lambda _optimizer: complete())
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        patches.replace(torch.nn.utils, name, _after(complete, getattr(torch.nn.utils, name)))


def _after(complete: Callable[[], None], real: Callable[..., Any]) -> Callable[..., Any]:
    def clip(*args: Any, **kwargs: Any) -> Any:
        complete()
        return real(*args, **kwargs)

    return clip


def _exchange(model: Any) -> None:
    """Average the gradients that no backward pass has exchanged, as it would have."""
    import torch.distributed as dist

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=model.process_group)
            parameter.grad.div_(dist.get_world_size(model.process_group))


TREATMENT = Treatment(propose, install, "exchange gradients once per optimizer step", safety="reordered")
