"""What the shapes of a batch decide: where tokens lie, and by which products adapters correct them.

It is made once for all batches of the same shapes.

Maps that share their input have a second choice.  Batched products do the least arithmetic, but need three
launches where dense ones need one (`multiplex.products.trained`); up to some ten thousand tokens the GPU
finishes either before the host has launched the next, so the fewest launches win.  A recorded step launches
nothing and keeps the least arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.token_blocks import Frame, Shapes, frame
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.multiplex.products.ranges import DENSE_RANKS, Path, Products, choose_path, products_of
from flatout.multiplex.products.trained import Dropout

LAUNCH_BOUND_TOKENS = 16_384  # of a pass, up to which its launches outlast its kernels: assumed


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapePlan:
    """What shapes alone decide; a CUDA graph must keep it alive."""

    frame: Frame
    products: Products | None = None
    siblings: Products | None = None  # of maps that share their input, where that saves launches
    path: Decision[Path] | None = None
    dropout: Dropout | None = None


def plan_for_shapes(
    shapes: Shapes,
    *,
    bank: AdapterBank | None,
    device: torch.device,
    dtype: torch.dtype,
    path: Path | None = None,
) -> ShapePlan:
    """Prepare everything for blocks of these shapes; `path` is the kind of products, None chooses."""
    made = frame(shapes, device=device)
    if bank is None:
        return ShapePlan(frame=made)
    for shape in shapes:
        if not 0 <= shape.adapter < len(bank):
            raise BadInput(
                f"a block names adapter {shape.adapter}; the bank holds {len(bank)}",
                hint="adapters are numbered from 0",
            )
    if not bank.rank:
        return ShapePlan(frame=made, dropout=_dropout(made, bank))
    decision = choose_path(made.ranges, device=device, dtype=dtype, rank=bank.rank)

    def products(kind: Path) -> Products:
        return products_of(
            kind,
            made.ranges,
            ranks=tuple(spec.rank for spec in bank.specs),
            scales=bank.scales,
            rank=bank.rank,
            dtype=dtype,
            device=device,
        )

    saves_launches = (
        path is None
        and decision.value == "batched"
        and 1 < len(made.ranges) <= DENSE_RANKS // bank.rank
        and made.num_tokens <= LAUNCH_BOUND_TOKENS
    )
    return ShapePlan(
        frame=made,
        products=products(path or decision.value),
        siblings=products("dense") if saves_launches else None,
        path=decision,
        dropout=_dropout(made, bank),
    )


def _dropout(made: Frame, bank: AdapterBank) -> Dropout | None:
    kept = [1.0 - bank.specs[one.variant].dropout for one in made.ranges]
    if all(keep == 1.0 for keep in kept):
        return None
    if len(set(kept)) == 1:
        return Dropout(keep=kept[0], keep_of_tokens=None)
    keep_of_tokens = torch.empty(made.num_tokens, 1, device=bank.device)
    for one, keep in zip(made.ranges, kept, strict=True):
        keep_of_tokens[one.start : one.stop] = keep
    return Dropout(keep=None, keep_of_tokens=keep_of_tokens)
