"""Normal numbers that every process and every device draws alike.

Noise here is a pure function of (seed, epoch, parameter, side, pair, element): nothing is stored or sent, a
member's noise is drawn again where its update is needed, and a shard draws only its part.  That holds only if
every device gives the same bits, and the logarithms and cosines of Box-Muller do not.  So the way from a
random word to a normal number is a table: each Philox counter gives eight 16-bit uniforms, and entry u of
65,536 is the normal quantile at (u + 1/2) / 65536, scaled to variance 1.  The largest value is 4.3 standard
deviations.

The int8 table holds the quantiles times 32, rounded and clamped to 127; `UNIT` times such a number has
variance 1.  Integers up to 256 are exact in bfloat16, so int8 noise is not an approximation: it is another
distribution of variance 1, in half the bytes.

Counter: (element // 8, pair, epoch, domain).  Key: a hash of the seed, the parameter's name and the side.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flatout.ground.errors import BadInput
from flatout.multiplex.factors import Factors
from flatout.multiplex.kernels import HAS_TRITON
from flatout.multiplex.noise.philox import WORD, philox, stream_key

Side = Literal["shrink", "expand", "full"]

ENTRIES = 1 << 16
PER_COUNTER = 8
NORMALS, UNIFORMS = 0, 1  # domains: the counter's last word, so that the two kinds never share a counter
TILE = 1 << 15  # counters at once on a CPU: what they need stays in the second-level cache
DEVICE_TILE = 1 << 20


def _tables() -> tuple[Tensor, Tensor]:
    """Make the float32 and the int8 table; the lower half mirrors the upper."""
    normal = NormalDist()
    upper = [normal.inv_cdf((entry + 0.5) / ENTRIES) for entry in range(ENTRIES // 2, ENTRIES)]
    deviation = math.sqrt(math.fsum(value * value for value in upper) / len(upper))
    exact = torch.tensor(upper, dtype=torch.float64)
    floats = (exact / deviation).to(torch.float32)
    integers = (exact * 32).round().clamp(max=127).to(torch.int8)
    return torch.cat([-floats.flip(0), floats]), torch.cat([-integers.flip(0), integers])


_FLOATS, _INTEGERS = _tables()
UNIT = 1 / math.sqrt(_INTEGERS.double().square().mean().item())


@functools.cache
def table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the 65,536 values that noise of this type takes."""
    if dtype == torch.int8:
        return _INTEGERS.to(device)
    if dtype in (torch.float32, torch.bfloat16):
        return _FLOATS.to(dtype).to(device)
    raise BadInput(f"no noise of type {dtype}", hint="use torch.int8, torch.bfloat16 or torch.float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseStream:
    """All numbers of one (seed, epoch, parameter, side); pairs and elements say which part is meant."""

    key: tuple[int, int]
    epoch: int


def normals(
    *,
    seed: int,
    epoch: int,
    parameter: str,
    side: Side,
    pairs: range | Tensor,
    count: int,
    first: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Draw elements [first, first + count) of the noise of each pair, [pairs, count].

    Int8 numbers have the standard deviation 1 / `UNIT`; the other types have 1.
    """
    _check_epoch(epoch)
    if first < 0 or count < 0 or first + count > PER_COUNTER << 32:
        raise BadInput(f"elements {first} to {first + count} of {parameter} cannot be counted in 35 bits")
    device = torch.device(device)
    numbers = _pair_numbers(pairs, device)
    if out is None:
        out = torch.empty(len(numbers), count, dtype=dtype, device=device)
    elif out.shape != (len(numbers), count) or out.dtype != dtype or out.device.type != device.type:
        raise BadInput(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}",
            hint=f"give {dtype} ({len(numbers)}, {count}) on {device}",
        )
    stream = NoiseStream(key=stream_key(seed, parameter, side), epoch=epoch)
    if out.numel():
        _fill(out, stream=stream, pairs=numbers, first=first)
    return out


def uniforms(*, seed: int, keys: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
    """Draw one float32 in [0, 1) for each (seed, key, position), of the broadcast shape, for sampling.

    Keys are 63-bit and positions 32-bit integers.  Nothing here waits for the device.  `stream` is the
    seed's `uniform_key` made beforehand: with it a compiler sees one graph, and the same one for every seed.
    """
    where, position = torch.broadcast_tensors(keys.long(), positions.long())
    domain = torch.full_like(where, UNIFORMS)
    counter = (position & WORD, where & WORD, (where >> 32) & WORD, domain)
    key = stream_key(seed, "uniforms") if stream is None else stream.unbind()
    word = philox(counter, key=key)[0]
    share: Tensor = (word >> 8).to(torch.float32)
    return share * 2.0**-24  # 24 bits: every value is exact, and 1 is not reached


def uniform_key(seed: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Return the key of a seed's uniform numbers as a tensor: no compiler can follow its hash."""
    return torch.tensor(stream_key(seed, "uniforms"), dtype=torch.int64, device=device)


def draw_factors(
    parameter: str,
    *,
    out_width: int,
    in_width: int,
    seed: int,
    epoch: int,
    pairs: range | Tensor,
    rank: int,
    sigma: float,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.int8,
) -> Factors:
    """Draw low-rank noise of one weight [out_width, in_width]: variant i is the noise of pairs[i].

    Its product has the variance sigma**2 in every entry, whatever the rank.
    """
    if rank < 1:
        raise BadInput(f"rank {rank} of {parameter}", hint="the smallest rank is 1")
    sides: dict[Side, int] = {"shrink": in_width, "expand": out_width}
    drawn = {
        side: normals(
            seed=seed,
            epoch=epoch,
            parameter=parameter,
            side=side,
            pairs=pairs,
            count=rank * width,
            device=device,
            dtype=dtype,
        ).view(-1, rank, width)
        for side, width in sides.items()
    }
    scale = sigma / math.sqrt(rank) * unit(dtype) ** 2
    return Factors(drawn["shrink"], drawn["expand"], scale)


class Refill:
    """Draws into the same factors repeatedly, for any pairs at any epoch.

    On a GPU the factors of a whole model are drawn in one launch.  `factors` are by parameter, contiguous.
    """

    def __init__(self, factors: Mapping[str, Factors], *, seed: int) -> None:
        self._factors, self._seed = factors, seed
        sides = [side.flatten(1) for each in factors.values() for side in (each.shrink, each.expand)]
        self._parts: Tensor | None = None
        self._largest = max((side.shape[1] for side in sides), default=0)
        if HAS_TRITON and sides and sides[0].device.type == "cuda":
            from flatout.multiplex.kernels.noise import part_table

            names: tuple[Side, Side] = ("shrink", "expand")
            keys = [stream_key(seed, parameter, side) for parameter in factors for side in names]
            self._parts = part_table(sides, keys)

    def __call__(self, *, epoch: int, pairs: range) -> None:
        """Redraw variant i of every factor as the noise of pairs[i]; further variants stay as they are."""
        _check_epoch(epoch)
        if self._parts is not None:
            from flatout.multiplex.kernels.noise import fill_all

            values = table(next(iter(self._factors.values())).shrink.dtype, self._parts.device)
            fill_all(self._parts, values=values, epoch=epoch, pairs=pairs, largest=self._largest)
            return
        for parameter, whole in self._factors.items():
            sides: dict[Side, Tensor] = {"shrink": whole.shrink, "expand": whole.expand}
            for side, drawn in sides.items():
                out = drawn[: len(pairs)].flatten(1)
                normals(
                    seed=self._seed,
                    epoch=epoch,
                    parameter=parameter,
                    side=side,
                    pairs=pairs,
                    count=out.shape[1],
                    device=out.device,
                    dtype=out.dtype,
                    out=out,
                )


@dataclass(frozen=True, slots=True)
class FullNoise:
    """Variant v of a vector p is p + scale * values[v]; `values` is [variants, width]."""

    values: Tensor
    scale: float


def draw_full(
    parameter: str,
    *,
    width: int,
    seed: int,
    epoch: int,
    pairs: range | Tensor,
    sigma: float,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> FullNoise:
    """Draw the noise of a vector; every element has its own number of variance sigma**2."""
    values = normals(
        seed=seed,
        epoch=epoch,
        parameter=parameter,
        side="full",
        pairs=pairs,
        count=width,
        device=device,
        dtype=dtype,
    )
    return FullNoise(values, sigma * unit(dtype))


def _check_epoch(epoch: int) -> None:
    if not 0 <= epoch <= WORD:
        raise BadInput(f"epoch {epoch} is not a 32-bit number", hint="give 0 to 2**32 - 1")


def unit(dtype: torch.dtype) -> float:
    """Return the factor that gives a number of this type the variance 1."""
    return UNIT if dtype == torch.int8 else 1.0


def _pair_numbers(pairs: range | Tensor, device: torch.device) -> Tensor:
    """Return pairs as integers on the device; a tensor is not checked, which would wait for it."""
    if isinstance(pairs, Tensor):
        return pairs.to(device=device, dtype=torch.int64)
    if len(pairs) and not 0 <= min(pairs[0], pairs[-1]) <= max(pairs[0], pairs[-1]) <= WORD:
        raise BadInput(f"pairs {pairs} are not 32-bit numbers", hint="give 0 to 2**32 - 1")
    return torch.arange(pairs.start, pairs.stop, pairs.step, dtype=torch.int64, device=device)


def _fill(out: Tensor, *, stream: NoiseStream, pairs: Tensor, first: int) -> None:
    """Draw with what serves the device best; all three give the same bits."""
    if out.device.type == "cpu":
        fill_with_numpy(out, stream=stream, pairs=pairs, first=first)
    elif out.device.type == "cuda" and HAS_TRITON:
        from flatout.multiplex.kernels.noise import fill_with_triton

        values = table(out.dtype, out.device)
        fill_with_triton(out, values=values, key=stream.key, epoch=stream.epoch, pairs=pairs, first=first)
    else:
        fill_with_torch(out, stream=stream, pairs=pairs, first=first)


def fill_with_numpy(out: Tensor, *, stream: NoiseStream, pairs: Tensor, first: int) -> None:
    """Draw on the CPU, where numpy's integers take two thirds of the time of torch's."""
    carrier = {1: torch.int8, 2: torch.int16, 4: torch.int32}[out.element_size()]  # numpy has no bfloat16
    values = table(out.dtype, torch.device("cpu")).view(carrier).numpy()
    drawn = out.view(carrier).numpy()
    numbers = pairs.numpy().astype(np.uint64)
    for rows, blocks in _tiles(out.shape, first=first, tile=TILE):
        lengths = (rows.stop - rows.start, blocks.stop - blocks.start)
        block, pair = np.broadcast_arrays(
            np.arange(blocks.start, blocks.stop, dtype=np.uint64)[None, :], numbers[rows, None]
        )
        epoch, domain = (np.full(lengths, word, dtype=np.uint64) for word in (stream.epoch, NORMALS))
        words = np.empty((*lengths, 4), dtype="<u4")
        for place, word in enumerate(philox((block, pair, epoch, domain), key=stream.key)):
            words[..., place] = word
        entries = words.view("<u2").reshape(lengths[0], -1)
        columns, inside = _columns(blocks, first=first, count=out.shape[1])
        drawn[rows, columns] = np.take(values, entries[:, inside])


def fill_with_torch(out: Tensor, *, stream: NoiseStream, pairs: Tensor, first: int) -> None:
    """Draw on any device, with whole operators."""
    values = table(out.dtype, out.device)
    for rows, blocks in _tiles(out.shape, first=first, tile=DEVICE_TILE):
        steps = torch.arange(blocks.start, blocks.stop, dtype=torch.int64, device=out.device)
        block, pair = torch.broadcast_tensors(steps[None, :], pairs[rows, None])
        epoch, domain = (torch.full_like(block, word) for word in (stream.epoch, NORMALS))
        words = philox((block, pair, epoch, domain), key=stream.key)
        halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
        entries = torch.stack(halves, dim=-1).flatten(1)
        columns, inside = _columns(blocks, first=first, count=out.shape[1])
        out[rows, columns] = values[entries[:, inside]]


def _tiles(shape: torch.Size, *, first: int, tile: int) -> list[tuple[slice, slice]]:
    """Cut the counters of a [pairs, count] draw into (pairs, blocks) of at most `tile` counters."""
    num_pairs, count = shape
    start, stop = first // PER_COUNTER, -(-(first + count) // PER_COUNTER)
    width = min(stop - start, tile)
    height = max(1, tile // width)
    return [
        (slice(row, min(row + height, num_pairs)), slice(block, min(block + width, stop)))
        for row in range(0, num_pairs, height)
        for block in range(start, stop, width)
    ]


def _columns(blocks: slice, *, first: int, count: int) -> tuple[slice, slice]:
    """Return where the elements of `blocks` lie in the output, and which of them are wanted."""
    start, stop = blocks.start * PER_COUNTER, blocks.stop * PER_COUNTER
    low, high = max(start, first), min(stop, first + count)
    return slice(low - first, high - first), slice(low - start, high - start)
