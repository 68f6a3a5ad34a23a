"""LoRA per member by batched products: what a serving engine for many adapters does, in our engine's step.

The kernels between the products are plain; after every product two batched products add the correction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.multiplex.decode.steppers import SlotState
from flatout.multiplex.kernels import step as fused
from flatout.multiplex.models.decoder import Decoder, Projection


class BatchedProducts:
    """A decode step of `rows` rows, members in equal groups, in a CUDA graph; `step_ms` is its median."""

    def __init__(self, decoder: Decoder, *, rows: int, positions: int, per_member: int, rank: int) -> None:
        self.state = SlotState.empty(decoder, slots=rows, max_tokens=positions, eos=[])
        members = rows // per_member
        made = {"device": decoder.device, "dtype": decoder.dtype}
        self.factors = {
            name: (
                torch.randn(members, product.weight.shape[1], rank, **made) * 1e-3,
                torch.randn(members, rank, product.weight.shape[0], **made) * 1e-3,
            )
            for name, product in decoder.projections().items()
        }
        self.members = members
        self.step = fused.DecodeStep(decoder, self.state)

    def product(self, x: Tensor, projection: Projection, out: Tensor) -> None:
        torch.mm(x, projection.weight.T, out=out)
        if projection.name in self.factors:
            shrink, expand = self.factors[projection.name]
            grouped = out.view(self.members, -1, out.shape[1])
            coefficient = torch.bmm(x.view(self.members, -1, x.shape[1]), shrink)
            torch.baddbmm(grouped, coefficient, expand, out=grouped)

    def __call__(self) -> None:
        plain, fused._product = fused._product, self.product
        try:
            self.step.best(self.step.decode(self.state.token, self.state.position))
        finally:
            fused._product = plain
