"""PyTorch's fake tensors with a cheaper cache key for the arguments of an operation.

PyTorch's fake tensors remember what an operation gave for arguments of the same shapes.  Much of the time of
a trace goes into describing these arguments, with everything that makes a tensor sparse, quantized or
symbolic.  Here a plain tensor is described by what a result can depend on; whatever is not plain is left to
PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flatout.memory.jobs.example_batch import refuse_nested

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class QuickFakeMode(FakeTensorMode):
    """A FakeTensorMode for tensors of known shapes."""

    def __deepcopy__(self, memo: Any) -> Self:
        """Return the mode itself: a tensor's copy belongs to the same mode.

        Modules that copy their layers (nn.Transformer) copy all attributes of a parameter, the mode among
        them; and a copy of a mode would free the storages twice that it remembers, which ends the process.
        """
        return self

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> NoReturn:
        """Refuse a jagged tensor: its size is a symbol, which no number equals."""
        refuse_nested()

    def _prep_args_for_hash(self, result: list[object], args: Any, *rest: Any) -> None:
        if isinstance(args, Mapping):
            result.append(tuple(args))
            args = tuple(args.values())
        result.append(type(args))
        result.append(len(args))
        for argument in args:
            if isinstance(argument, PLAIN):
                result.append(type(argument))  # 1 and 1.0 are equal, and give other dtypes
                result.append(argument)
            elif isinstance(argument, FakeTensor) and _is_plain(argument):
                result.append(_describe(argument))
            elif isinstance(argument, (list, tuple)):
                self._prep_args_for_hash(result, argument, *rest)
            else:
                super()._prep_args_for_hash(result, (argument,), *rest)


def _is_plain(fake: FakeTensor) -> bool:
    return (
        fake.constant is None
        and fake.layout is torch.strided
        and not fake.is_quantized
        and not fake._has_symbolic_sizes_strides
    )


def _describe(fake: Tensor) -> tuple[object, ...]:
    return (
        fake.dtype,
        fake.shape,
        fake.stride(),
        fake.storage_offset(),
        fake.untyped_storage().nbytes(),
        fake.fake_device,  # type: ignore[attr-defined]
        fake.requires_grad,
        fake.is_conj(),
        fake.is_neg(),
        fake.is_inference(),
    )
