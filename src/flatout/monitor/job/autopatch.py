"""Report the steps of an unmodified script by watching its loaders and optimizers.

Every DataLoader hands its batches out in one method, and every optimizer calls torch's global hooks after
its step: two places are enough for the same figures as `flatout.watch(loader)`, but for the loss.  Batches
taken while gradients are off belong to an evaluation, which is no part of a step.  As soon as the script
watches itself, these patches are undone.

The caller passes torch in; nothing here imports it.
"""

from __future__ import annotations

import sys
from typing import Any

from flatout.measure.clock import ident
from flatout.measure.patches import Patches
from flatout.measure.run.steps import OPTIMIZER_STEP, Anchor
from flatout.monitor.job.reporter import Reporter


def install(torch: Any, reporter: Reporter) -> Patches:
    """Report for the job, until the patches are undone."""
    patches = Patches()
    _watch_loaders(torch, reporter, patches)
    _watch_optimizers(torch, reporter, patches)
    return patches


def _watch_loaders(torch: Any, reporter: Reporter, patches: Patches) -> None:
    batches = torch.utils.data.dataloader._BaseDataLoaderIter
    next_batch = batches.__next__
    owner = ident()
    is_waiting = False

    def __next__(self: Any) -> Any:
        nonlocal is_waiting
        if is_waiting or ident() != owner:
            return next_batch(self)
        if not torch.is_grad_enabled():
            reporter.pause()
            return next_batch(self)
        reporter.begin()
        reporter.before_wait()
        is_waiting, batch = True, None
        try:
            batch = next_batch(self)
            return batch
        finally:
            is_waiting = False
            reporter.after_wait(batch)

    patches.replace(batches, "__next__", __next__)


def _watch_optimizers(torch: Any, reporter: Reporter, patches: Patches) -> None:
    owner = ident()
    anchor = Anchor()

    def after(optimizer: Any, arguments: Any, options: Any) -> None:
        if ident() == owner and anchor.add((OPTIMIZER_STEP, id(optimizer)), type(optimizer).__name__):
            groups = optimizer.param_groups
            reporter.step(learning_rate=groups[0].get("lr") if groups else None)

    # torch.optim hides the module of this name behind itself.
    hooks = sys.modules[torch.optim.Optimizer.__module__]
    handle = hooks.register_optimizer_step_post_hook(after)
    patches.on_undo(handle.remove)
