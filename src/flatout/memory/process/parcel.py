"""A job as bytes for another process: the model, loss and batch of a script or a notebook.

cloudpickle sends what plain pickle refuses: lambdas, closures, and by value whatever `__main__` defines.  The
bytes go through a socket between two processes of one program and lie in no file; no pickle from elsewhere
is ever loaded.

A trace needs the sizes of weights and not their values, so large floating-point tensors travel without
their data and arrive as zeros, which take no memory as long as nobody writes them.  Integers and small
tensors keep their values: those may decide what a step does.  Every tensor arrives on the CPU, from where a
trace or a probe places it.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from flatout.ground.errors import BadInput
from flatout.memory.jobs.held_tensors import SMALL_BYTES


def pack(function: Callable[..., Any], args: tuple[Any, ...], *, with_values: bool = False) -> bytes:
    """Pack `(function, args)` for a Connection to send; `with_values` if the step is to run for real."""
    into = io.BytesIO()
    try:
        _Packer(into, with_values=with_values).dump((function, args))
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"the job cannot be sent to another process: {error}") from error
    return into.getvalue()


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, into: io.BytesIO, *, with_values: bool) -> None:
        super().__init__(into)
        self._with_values = with_values

    def reducer_override(self, value: Any) -> Any:
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
            return _reduce_tensor(value, with_values=self._with_values)
        return super().reducer_override(value)


def _reduce_tensor(tensor: Tensor, *, with_values: bool) -> tuple[Any, ...]:
    """Tell pickle how to make the tensor; its attributes come after it, since they may lead back to it."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    size, stride = tuple(plain.shape), plain.stride()
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if plain.numel() else 0
    is_large = span * plain.element_size() > SMALL_BYTES
    is_float = plain.is_floating_point() or plain.is_complex()
    if plain.is_meta or (is_large and is_float and not with_values):
        data = None
    else:
        data = bytearray(plain.as_strided((span,), (1,)).cpu().view(torch.uint8).numpy())
    device = "meta" if plain.is_meta else "cpu"
    is_parameter = isinstance(tensor, nn.Parameter)
    arguments = (plain.dtype, size, stride, device, data, is_parameter, tensor.requires_grad)
    return (_unpack_tensor, arguments, vars(tensor) or None, None, None, _add_attributes)


def _unpack_tensor(
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    device: str,
    data: bytearray | None,
    is_parameter: bool,
    requires_grad: bool,
) -> Tensor:
    made = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    if device == "cpu" and not made.numel():
        made = torch.empty_strided(size, stride, dtype=dtype)
    elif device == "cpu":
        buffer = data if data is not None else _make_zeros(made.untyped_storage().nbytes())
        made = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).as_strided(size, stride)
    return (
        nn.Parameter(made, requires_grad=requires_grad)
        if is_parameter
        else made.requires_grad_(requires_grad)
    )


def _make_zeros(num_bytes: int) -> mmap.mmap:
    """Make zeros that take no memory until they are touched."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _add_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)
