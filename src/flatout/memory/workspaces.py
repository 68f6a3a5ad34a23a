"""Memory that a library takes for the time of one operation: attention, convolutions, recurrent layers."""

from __future__ import annotations

from typing import Any

import torch

from flatout.memory import attention

aten = torch.ops.aten


class Workspaces:
    """Bytes that an operation takes beside its results."""

    def of(self, func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        if func in ATTENTION_BACKWARD:
            return attention.backward_workspace(func, args)
        return ()


ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}
