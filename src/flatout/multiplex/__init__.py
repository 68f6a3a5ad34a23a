"""Many variants of one model in one batch.

    from flatout.multiplex import Factors, Generator, Request

    generator = Generator(model, slots=64, max_tokens=512, factors=factors)
    generator.generate([Request(prompt=prompt, variant=3)], max_new_tokens=100)

rows            Rows, RowTables, VariantRange: which variant each row or range of tokens runs
factors         Factors: low-rank variants of one linear map
products/       linear, and the products over ranges of tokens that train factors
swap            multiplexed, install: any module's linear maps as another variant for each row
vectors         steered: a vector for each row added at a layer
noise/          draw_factors, draw_full, normals: variants drawn as noise, the same on every device
models/         read_decoder, Decoder: a Hugging Face model as products over its own storage
decode/         Generator, Request, generate: generation by slots that run different variants
kernels/        Triton kernels of all of these; only GPUs import them

Names are resolved on first use, so that importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.ground.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from flatout.multiplex.decode.generator import Generator as Generator
    from flatout.multiplex.decode.generator import generate as generate
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
    from flatout.multiplex.products.linear import linear as linear
    from flatout.multiplex.rows import Rows as Rows
    from flatout.multiplex.rows import RowTables as RowTables
    from flatout.multiplex.rows import VariantRange as VariantRange
    from flatout.multiplex.swap import install as install
    from flatout.multiplex.swap import multiplexed as multiplexed
    from flatout.multiplex.vectors import steered as steered
else:
    __all__, __getattr__, __dir__ = _lazy_names(__name__)
