"""Install a torch-function mode on the running thread from inside a hook, and remove it again.

The mode stack belongs to the thread, so a mode pushed inside a hook stays after the hook returns.  It goes
below every mode the script has entered, because their exit pops the top blindly, and just above the context
of `torch.set_default_device`, which must stay at the bottom.  Removal is by identity.
"""

from __future__ import annotations

from typing import Any

from flatout.measure.patches import Patches


def insert_mode(mode: Any) -> None:
    from torch.overrides import _push_mode
    from torch.utils._device import DeviceContext

    modes = _take_all()
    # `with torch.device(...)` pushes a DeviceContext too, but without __enter__, and pops it from the top
    entered = bool(modes) and isinstance(modes[0], DeviceContext) and hasattr(modes[0], "old_device")
    bottom = 1 if entered else 0
    for each in [*modes[:bottom], mode, *modes[bottom:]]:
        _push_mode(each)


def remove_mode(mode: Any) -> bool:
    """Remove a mode; return False if it was no longer on the stack."""
    from torch.overrides import _push_mode

    modes = _take_all()
    for each in modes:
        if each is not mode:
            _push_mode(each)
    return any(each is mode for each in modes)


def has_mode(mode: Any) -> bool:
    from torch.overrides import _get_current_function_mode_stack

    return any(each is mode for each in _get_current_function_mode_stack())


def keep_in_backward(mode: Any, patches: Patches) -> None:
    """Keep a mode active inside backward until `patches` are undone.

    Tensor.backward is itself a torch function: the engine runs inside the mode's handler, where the
    mode is off, so hooks, custom Functions and recomputation would go unseen.
    """
    import torch
    from torch.autograd import graph

    for owner in (torch.autograd, graph):
        engine = getattr(owner, "_engine_run_backward", None)
        if engine is None:
            continue

        def run(*args: Any, _engine: Any = engine, **kwargs: Any) -> Any:
            if has_mode(mode):
                return _engine(*args, **kwargs)
            insert_mode(mode)
            try:
                return _engine(*args, **kwargs)
            finally:
                remove_mode(mode)

        patches.replace(owner, "_engine_run_backward", run)


def _take_all() -> list[Any]:
    from torch._C import _len_torch_function_stack
    from torch.overrides import _pop_mode

    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
