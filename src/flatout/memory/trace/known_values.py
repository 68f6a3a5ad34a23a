"""Real values of integers, booleans and what follows from them, kept beside tensors that have no data.

Models branch on masks and index by tables: `mask.all()`, `nonzero`, `.tolist()` of lengths or of rates.
Masks are often turned into floating point and compared again, so what follows from them is computed in
floating point too.
These are small, so they are computed for real next to their fake counterparts, and such branches go the way
the real run goes.  Where a value comes from floating point there is none: choices among several (argmax,
top-k) are answered evenly, comparisons as true, every number is finite, and each such answer is noted as a
guess.  A single number that is drawn evenly from a range decides whether a layer is dropped
(`torch.rand([]) < share`): it counts as the upper end of its range, which drops the fewest layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_iter, tree_map

aten = torch.ops.aten
LARGEST = 1 << 25  # elements; larger tensors are not computed
UNWRITTEN = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
VALUE = "_flatout_value"
HISTOGRAM = aten.histc.default
NOT_A_NUMBER = {aten.isnan.default, aten.isinf.default}
UNIFORM = {aten.rand.default, aten.rand_like.default, aten.uniform_.default}
# the place of the indices among the results; None if they are the only one
CHOICES = {
    aten.topk.default: 1,
    aten.argmax.default: None,
    aten.argmin.default: None,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.multinomial.default: None,
    aten.max.dim: 1,
    aten.min.dim: 1,
}


def value_of(tensor: Tensor) -> Tensor | None:
    """Return the real value of `tensor`; None if it is unknown."""
    value = getattr(tensor, VALUE, None)
    if value is not None:
        return value  # type: ignore[no-any-return]
    if isinstance(tensor, FakeTensor):
        return None if tensor.constant is None else _on_host(tensor.constant)
    return _on_host(tensor)


def _on_host(real: Tensor) -> Tensor:
    """Return a value on the CPU, where values are computed; constants of a trace on CUDA may lie there."""
    if not real.is_cuda:
        return real
    with _disable_current_modes():
        return real.cpu()


def with_value(real: Tensor, *, device: torch.device | None = None) -> Tensor:
    """Make a tensor without data that has the value `real`."""
    fake = torch.empty(tuple(real.shape), dtype=real.dtype, device=device)
    setattr(fake, VALUE, real)
    return fake


def copy_with_value(fake: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return what `copy.deepcopy` gives for a tensor without data: its real values are copied for real."""
    with _disable_current_modes():
        for real in (getattr(fake, VALUE, None), getattr(fake, "constant", None)):
            if isinstance(real, Tensor) and not isinstance(real, FakeTensor):
                memo.setdefault(id(real), real.clone())
    with (
        warnings.catch_warnings()
    ):  # copying asks for the address, which torch calls a bug in the user's code
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        copied: Tensor = Tensor.__deepcopy__(fake, memo)  # type: ignore[no-untyped-call]
    return copied


def format_number(fake: Tensor, how: str) -> str:
    """Print a single number as a tensor with data prints: some models name their parts by it."""
    if fake.dim() or isinstance(fake, nn.Parameter) or _get_current_dispatch_mode() is None:
        return object.__format__(fake, how)
    return format(fake.detach().item(), how)


def follow(func: Any, args: Any, kwargs: Any, out: Any, *, guess: Callable[[str, str], None]) -> None:
    """Compute `func` for real if its inputs are known and its results are small."""
    outs = list(_tensors(out))
    if not outs:
        _follow_changes(func, args, kwargs)
        return
    if func in CHOICES and value_of(args[0]) is None:
        _choose_evenly(func, args, outs, guess=guess)
        return
    if func in NOT_A_NUMBER and value_of(args[0]) is None and _is_followed(outs[0]):
        with _disable_current_modes():
            setattr(outs[0], VALUE, torch.zeros(tuple(outs[0].shape), dtype=torch.bool))
        guess(str(func), "every number taken as finite")
        return
    if func in UNIFORM and outs[0].numel() == 1:
        _draw_highest(func, args, outs[0], guess=guess)
        return
    if torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket in UNWRITTEN:
        _forget(outs)
        return
    if any(not _is_followed(t) for t in outs):
        return
    ins = list(_tensors((args, kwargs)))
    if any(value_of(t) is None for t in ins):
        if func._schema.is_mutable:
            _forget(ins)  # written from an unknown value
        return
    real = _run_for_real(func, args, kwargs)
    for fake, value in zip(outs, _tensors(real), strict=False):
        if fake.shape == value.shape:
            setattr(fake, VALUE, value)


def _follow_changes(func: Any, args: Any, kwargs: Any) -> None:
    """Follow an operation that only changes its arguments, such as the step counters of an optimizer."""
    ins = list(_tensors((args, kwargs)))
    if not func._schema.is_mutable or not any(value_of(t) is not None for t in ins):
        return
    if all(value_of(t) is not None for t in ins):
        _run_for_real(func, args, kwargs)
    else:
        _forget(ins)


def _is_followed(tensor: Tensor) -> bool:
    return tensor.numel() <= LARGEST and not (tensor.dtype.is_complex or isinstance(tensor, nn.Parameter))


def _forget(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if getattr(tensor, VALUE, None) is not None:
            setattr(tensor, VALUE, None)


def real_result(func: Any, args: Any, kwargs: Any) -> Any | None:
    """Return the real result of an operation whose size depends on values; None if they are unknown."""
    if any(value_of(t) is None for t in _tensors((args, kwargs))):
        return None
    return _run_for_real(func, args, kwargs)


def _run_for_real(func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(kwargs)
    if "device" in named:
        named["device"] = torch.device("cpu")
    with _disable_current_modes():
        known, known_named = tree_map(_known, args), tree_map(_known, named)
        if func is HISTOGRAM and not known[0].is_floating_point():  # of integers on CUDA alone
            return func(known[0].double(), *known[1:], **known_named).to(known[0].dtype)
        return func(*known, **known_named)


def _known(leaf: Any) -> Any:
    return value_of(leaf) if isinstance(leaf, Tensor) else leaf


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def _choose_evenly(func: Any, args: Any, outs: list[Tensor], *, guess: Callable[[str, str], None]) -> None:
    """Give indices that use every choice equally often, as a balanced router would."""
    place = CHOICES[func]
    indices = outs[-1] if place is None else outs[place]
    if indices.numel() > LARGEST or indices.dtype.is_floating_point:
        return
    source = args[0]
    dim = _dimension(func, args)
    choices = source.shape[dim] if source.dim() else 1
    with _disable_current_modes():
        count = torch.arange(indices.numel(), dtype=indices.dtype).reshape(indices.shape)
        setattr(indices, VALUE, count % max(1, choices))
    guess(str(func), "every choice equally often")


def _draw_highest(func: Any, args: Any, drawn: Tensor, *, guess: Callable[[str, str], None]) -> None:
    """Draw the largest number below the end of the range, which is 1 unless `uniform_` names another."""
    end = args[2] if func is aten.uniform_.default and len(args) > 2 else 1.0
    with _disable_current_modes():
        limit = torch.full(tuple(drawn.shape), end, dtype=drawn.dtype)
        setattr(drawn, VALUE, torch.nextafter(limit, torch.full_like(limit, -torch.inf)))
    guess(str(func), "a number drawn evenly taken as the upper end of its range")


def _dimension(func: Any, args: Any) -> int:
    """Return the dimension along which `func` chooses: its argument `dim`, by default the last."""
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("dim") if "dim" in names else len(args)
    given = args[place] if place < len(args) else None
    return given if isinstance(given, int) else -1
