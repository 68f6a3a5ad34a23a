"""Operations whose result has as many rows as the data says: `nonzero`, boolean indexing, `unique`.

Integers and booleans carry their real values through a trace, so most of these have a true answer.  If a mask
comes from floating point, the job may declare what share of it is true; by default all of it is, and all
values are assumed distinct, which gives the largest possible result.  The longest target decides what a CTC
loss keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from flatout.ground.units import show_share
from flatout.memory.trace import known_values

aten = torch.ops.aten
MASKED_SELECT = aten.masked_select.default
CTC = {aten._ctc_loss.Tensor, aten._ctc_loss.default}
UNIQUE = {aten.unique_consecutive.default, aten._unique2.default, aten.unique_dim.default}
SIZED_BY_VALUES = UNIQUE | {
    aten.nonzero.default,
    MASKED_SELECT,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
_declared = {"true_share": 1.0}


def declare(*, true_share: float) -> None:
    """Set how much of a mask that comes from floating point is true, for the rest of this process."""
    _declared["true_share"] = true_share


def depends_on_values(func: Any, args: Any) -> bool:
    if func in SIZED_BY_VALUES or func in CTC:
        return True
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return any(isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1])
    return False


def run(func: Any, args: Any, kwargs: Any, *, guess: Callable[[str, str], None]) -> Any:
    """Run `func`; the known values give the size of its result."""
    if func in CTC:
        return _ctc_loss(*args[:4])
    if func not in SIZED_BY_VALUES:
        indices = [_positions(index, func, guess=guess) for index in args[1]]
        flat = [part for parts in indices for part in parts]
        return func(args[0], flat, *args[2:], **kwargs)
    unknown = [
        leaf
        for leaf in tree_iter((args, kwargs))
        if isinstance(leaf, Tensor) and known_values.value_of(leaf) is None
    ]
    for tensor in unknown:
        _assume(tensor, func, guess=guess)
    real = known_values.real_result(func, args, kwargs)
    for tensor in unknown:
        if tensor.dtype.is_floating_point:  # its size is answered, its values stay unknown
            setattr(tensor, known_values.VALUE, None)
    device = args[0].device
    return tree_map(lambda leaf: _without_data(leaf, device) if isinstance(leaf, Tensor) else leaf, real)


def _ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any) -> Any:
    """Return a loss for each row, and what it keeps: each step by each target, with blanks between."""
    num_steps, batch_size = log_probs.shape[:2]
    lengths = known_values.value_of(target_lengths) if isinstance(target_lengths, Tensor) else target_lengths
    with _disable_current_modes():
        longest = targets.shape[-1] if lengths is None or not len(lengths) else int(max(lengths))
    kept = (batch_size, num_steps, 2 * longest + 1)
    return tuple(log_probs.new_empty(shape) for shape in ((batch_size,), kept))


def _assume(tensor: Tensor, func: Any, *, guess: Callable[[str, str], None]) -> None:
    """Give `tensor` the values that make the result largest."""
    differ = func in UNIQUE
    share = _declared["true_share"] if tensor.dtype is torch.bool else 1.0
    with _disable_current_modes():
        if differ and tensor.dtype is not torch.bool:
            values = torch.arange(tensor.numel()).to(tensor.dtype).reshape(tensor.shape)
        else:
            num_true = math.ceil(share * tensor.numel())
            values = (torch.arange(tensor.numel()) < num_true).to(tensor.dtype).reshape(tensor.shape)
    setattr(tensor, known_values.VALUE, values)
    if func is not MASKED_SELECT or tensor.dtype is torch.bool:
        taken = "every element taken as true"
        if share < 1:
            taken = f"{show_share(share)} of the elements taken as true, as declared"
        guess(str(func), "every element taken as different" if differ else taken)


def _positions(index: Any, func: Any, *, guess: Callable[[str, str], None]) -> list[Any]:
    """Turn a boolean mask into the index tensors that CUDA makes of it; return another index as it is."""
    if not isinstance(index, Tensor) or index.dtype is not torch.bool:
        return [index]
    if known_values.value_of(index) is None:
        _assume(index, func, guess=guess)
    found = run(aten.nonzero.default, (index,), {}, guess=guess)
    value = known_values.value_of(found)
    assert value is not None
    columns = [found.select(1, column) for column in range(index.dim())]
    for column, position in enumerate(columns):
        with _disable_current_modes():
            setattr(position, known_values.VALUE, value.select(1, column))
    return columns


def _without_data(real: Tensor, device: torch.device) -> Tensor:
    if real.dtype.is_floating_point:
        return torch.empty(tuple(real.shape), dtype=real.dtype, device=device)
    return known_values.with_value(real, device=device)
