"""Calls before and after every optimizer step that may be added and removed during a step.

torch's own hooks may not: torch iterates its list while it calls them.  So this module installs one pair of
hooks for the whole process and keeps a list of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.measure.patches import Patches

StepHook = Callable[[Any], None]  # with the optimizer

_before: list[StepHook] = []
_after: list[StepHook] = []
_is_installed = False


def around_steps(patches: Patches, *, before: StepHook | None = None, after: StepHook | None = None) -> None:
    """Call `before` and `after` around each optimizer's step, until `patches` are undone."""
    _install()
    for calls, call in ((_before, before), (_after, after)):
        if call is not None:
            calls.append(call)
            patches.on_undo(lambda calls=calls, call=call: calls.remove(call))  # type: ignore[misc]


def _install() -> None:
    global _is_installed
    if _is_installed:
        return
    from torch.optim import optimizer as optimizers

    _is_installed = True
    optimizers.register_optimizer_step_pre_hook(lambda optimizer, *_: _call(_before, optimizer))
    optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: _call(_after, optimizer))


def _call(calls: list[StepHook], optimizer: Any) -> None:
    for call in list(calls):
        call(optimizer)
