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

The operator itself is `flatout.multiplex.products.linear.linear`, and the shortest way to tokens is
`flatout.multiplex.decode.generator.generate`: a function cannot be offered here under the name of its module.

Names are resolved on first use, so that importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.multiplex.decode.generator import Generator as Generator
    from flatout.multiplex.decode.requests import Completion as Completion
    from flatout.multiplex.decode.requests import Request as Request
    from flatout.multiplex.decode.sampling import Sampling as Sampling
    from flatout.multiplex.factors import Factors as Factors
    from flatout.multiplex.models.decoder import Decoder as Decoder
    from flatout.multiplex.models.decoder import Projection as Projection
    from flatout.multiplex.models.families import read_decoder as read_decoder
    from flatout.multiplex.noise.draws import FullNoise as FullNoise
    from flatout.multiplex.noise.draws import draw_factors as draw_factors
    from flatout.multiplex.noise.draws import draw_full as draw_full
    from flatout.multiplex.noise.draws import normals as normals
    from flatout.multiplex.rows import Rows as Rows
    from flatout.multiplex.rows import RowTables as RowTables
    from flatout.multiplex.swap import install as install
    from flatout.multiplex.swap import multiplexed as multiplexed
    from flatout.multiplex.vectors import steered as steered

_HOMES = {
    "Completion": "decode.requests",
    "Decoder": "models.decoder",
    "Factors": "factors",
    "FullNoise": "noise.draws",
    "Generator": "decode.generator",
    "Projection": "models.decoder",
    "Request": "decode.requests",
    "RowTables": "rows",
    "Rows": "rows",
    "Sampling": "decode.sampling",
    "draw_factors": "noise.draws",
    "draw_full": "noise.draws",
    "install": "swap",
    "multiplexed": "swap",
    "normals": "noise.draws",
    "read_decoder": "models.families",
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
