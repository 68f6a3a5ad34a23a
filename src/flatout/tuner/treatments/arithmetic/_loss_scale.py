"""Scale the loss for a script that does not.

Gradients of float16 activations are often too small for the format.  The loss is multiplied before the
backward pass, and each parameter's gradient is divided as it arrives, before it is added to others: a script
that clips, sums or logs gradients sees the values it expects.  A step whose gradients are not finite is
skipped, by removing them, and the scale is halved.
"""

from __future__ import annotations

from typing import Any

from flatout.measure.lines.live_objects import live_objects, with_subclasses
from flatout.measure.patches import Patches
from flatout.tuner.step_hooks import around_steps

FIRST, LEAST, MOST = 2.0**13, 1.0, 2.0**24
GROW_AFTER = 2000  # steps without a skipped one


class LossScale:
    """The scale of one process, and its history."""

    def __init__(self) -> None:
        self.scale = FIRST
        self.num_skipped = 0
        self._good_steps = 0
        self._scaling = False  # inside a scaled backward pass
        self._hooked: set[int] = set()

    def install(self, patches: Patches) -> None:
        import torch

        real_backward, real_add = torch.autograd.backward, torch.optim.Optimizer.add_param_group

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            given: list[Any] = [None] * len(roots)
            if grad_tensors is not None:
                given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
            scaled = [self._gradient_of(root, each) for root, each in zip(roots, given, strict=True)]
            self._scaling = True
            try:
                return real_backward(roots, scaled, *args, **kwargs)
            finally:
                self._scaling = False

        def add_param_group(optimizer: Any, param_group: Any) -> None:
            real_add(optimizer, param_group)
            self._watch(optimizer, patches)

        for optimizer in live_objects(with_subclasses(torch.optim.Optimizer)):
            self._watch(optimizer, patches)  # of a running job

        patches.replace(torch.autograd, "backward", backward)
        patches.replace(torch.optim.Optimizer, "add_param_group", add_param_group)
        around_steps(patches, before=self._before_step)

    def _gradient_of(self, root: Any, given: Any) -> Any:
        import torch

        return torch.full_like(root, self.scale) if given is None else given * self.scale

    def _watch(self, optimizer: Any, patches: Patches) -> None:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                patches.on_undo(parameter.register_hook(self._unscale).remove)

    def _unscale(self, gradient: Any) -> Any:
        return gradient / self.scale if self._scaling else gradient

    def _before_step(self, optimizer: Any) -> None:
        import torch

        trained = [
            each for group in optimizer.param_groups for each in group["params"] if each.grad is not None
        ]
        if not trained:
            return
        norms = torch._foreach_norm([each.grad for each in trained])
        if torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().all():
            self._good_steps += 1
            if self._good_steps >= GROW_AFTER:
                self.scale, self._good_steps = min(2 * self.scale, MOST), 0
            return
        self.num_skipped += 1
        self.scale, self._good_steps = max(self.scale / 2, LEAST), 0
        for parameter in trained:
            parameter.grad = None
