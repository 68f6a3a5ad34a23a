"""Many variants of one model in one batch.

    from flatout.multiplex import Factors, Generator, Request

    generator = Generator(model, slots=64, max_tokens=512, factors=factors)
    generator.generate([Request(prompt=prompt, variant=3)], max_new_tokens=100)

Rows, RowTables             which variant each row of a batch runs
Factors                     low-rank variants of one linear map
draw_factors, draw_full     variants drawn as noise, the same on every device; `normals` are their numbers
multiplexed, install        any module's linear maps as another variant for each row, and put back
steered                     a vector for each row added at a layer
Generator, Request          generation by slots that run different variants
read_decoder, Decoder       a Hugging Face model as products over its own storage

The operator itself is `flatout.multiplex.linear.linear`, and the shortest way to tokens is
`flatout.multiplex.generate.generate`: a function cannot be offered here under the name of its module.

Names are resolved on first use, so that importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.multiplex.decoder import Decoder as Decoder
    from flatout.multiplex.decoder import Projection as Projection
    from flatout.multiplex.factors import Factors as Factors
    from flatout.multiplex.families import read_decoder as read_decoder
    from flatout.multiplex.generate import Generator as Generator
    from flatout.multiplex.noise import FullNoise as FullNoise
    from flatout.multiplex.noise import draw_factors as draw_factors
    from flatout.multiplex.noise import draw_full as draw_full
    from flatout.multiplex.noise import normals as normals
    from flatout.multiplex.requests import Completion as Completion
    from flatout.multiplex.requests import Request as Request
    from flatout.multiplex.rows import Rows as Rows
    from flatout.multiplex.rows import RowTables as RowTables
    from flatout.multiplex.sampling import Sampling as Sampling
    from flatout.multiplex.swap import install as install
    from flatout.multiplex.swap import multiplexed as multiplexed
    from flatout.multiplex.vectors import steered as steered

_HOMES = {
    "Completion": "requests",
    "Decoder": "decoder",
    "Factors": "factors",
    "FullNoise": "noise",
    "Generator": "generate",
    "Projection": "decoder",
    "Request": "requests",
    "RowTables": "rows",
    "Rows": "rows",
    "Sampling": "sampling",
    "draw_factors": "noise",
    "draw_full": "noise",
    "install": "swap",
    "multiplexed": "swap",
    "normals": "noise",
    "read_decoder": "families",
    "steered": "vectors",
}

__all__ = [
    "Completion",
    "Decoder",
    "Factors",
    "FullNoise",
    "Generator",
    "Projection",
    "Request",
    "RowTables",
    "Rows",
    "Sampling",
    "draw_factors",
    "draw_full",
    "install",
    "multiplexed",
    "normals",
    "read_decoder",
    "steered",
]


if not TYPE_CHECKING:  # a checker that saw this would take every misspelt name for an object

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
