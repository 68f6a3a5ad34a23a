"""Which tiles the hand-written step is fastest with, by rank: sizes that change its speed and nothing else.

    python benchmarks/evolution/tiles.py --model qwen2.5-1.5b --ranks 4 16 --save DIR      # a GPU

A whole decode step, recorded as a graph, replays in turn with plain inference and with the best step so far.
One change is tried at a time, from the sizes that `tiles_for` gives on; a change that wins stays.
The smallest time of a step's replays counts, so that a GPU that others use too can answer.  `apart` is the
distance of its logits from those of the first, relative to their length.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from interleaved import ResultFile  # noqa: E402
from shapes import SHAPES, build  # noqa: E402

import flatout  # noqa: E402
from flatout.engines.evolution.eggroll import Eggroll  # noqa: E402
from flatout.multiplex.decode.steppers import SlotState  # noqa: E402
from flatout.multiplex.factors import Factors  # noqa: E402
from flatout.multiplex.kernels.step import DecodeStep, Tiles, tiles_for  # noqa: E402
from flatout.multiplex.models.decoder import Decoder  # noqa: E402
from flatout.multiplex.rows import Rows  # noqa: E402

REPLAYS = 20
# What is tried one after the other, from the sizes of `tiles_for` on.
TRIED: list[dict[str, Any]] = [
    {"gate_along": True},
    {"ahead": True},
    {"attend_along": True},
]


class Step:
    """A decode step in a CUDA graph, in the middle of the text."""

    def __init__(self, decoder: Decoder, state: SlotState, factors: dict[str, Factors], tiles: Tiles) -> None:
        self._step = DecodeStep(decoder, state, factors=factors, tiles=tiles, tile=2)
        self.state = state
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()

    def _run(self) -> None:
        self._step.best(self._step.decode(self.state.token, self.state.position))

    def logits(self) -> Tensor:
        self.graph.replay()
        return self._step.logits.float()

    def ms(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def search(decoder: Decoder, *, rank: int, rows: int, positions: int, keep: Any) -> None:
    """Try the sizes of one kernel after the other, and keep what is fastest."""
    state = SlotState.empty(decoder, slots=rows, max_tokens=positions, eos=[])
    state.position.fill_(positions // 2)
    pairs = Rows.grouped(rows // 2, size=2, antithetic=True)
    state.tables.write(torch.arange(rows, device=decoder.device), pairs)
    population = Eggroll(decoder, population=rows, rank=rank, sigma=1e-3, lr=1e-3)
    factors = population._noise.resident(variants=range(rows // 2), epoch=0, capacity=rows // 2)
    plain = Step(decoder, state, {}, tiles_for(0, 2, width=decoder.width))
    best_tiles = tiles_for(rank, 2, width=decoder.width)
    best = Step(decoder, state, factors, best_tiles)
    chosen = best.logits()
    keep(row_of(rank, "as chosen", best_tiles, *race(plain, best, best)))
    for changes in [*TRIED, *([{"gate_dot": False}] if best_tiles.gate_dot else [])]:
        tiles = dataclasses.replace(best_tiles, **changes)
        if tiles == best_tiles:
            continue
        tried = ", ".join(f"{name} {value}" for name, value in changes.items())
        began = time.perf_counter()
        try:
            other = Step(decoder, state, factors, tiles)
        except (RuntimeError, ValueError, TritonError) as error:  # sizes that do not fit
            keep({"rank": rank, "tried": tried, "tiles": str(tiles), "failed": str(error)[:200]})
            continue
        compiled_s = time.perf_counter() - began
        plain_ms, best_ms, ms = race(plain, best, other)
        row = row_of(rank, tried, tiles, plain_ms, best_ms, ms)
        row["compiled_s"] = compiled_s
        row["apart"] = float((other.logits() - chosen).norm() / chosen.norm())
        keep(row)
        if ms[0] < 0.998 * best_ms[0]:
            best, best_tiles = other, tiles
    keep(row_of(rank, "best", best_tiles, *race(plain, best, best)))


def race(*steps: Step) -> list[tuple[float, float]]:
    """The least and the median milliseconds of each."""
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(REPLAYS):
        for step, found in zip(steps, taken, strict=True):
            found.append(step.ms())
    return [(min(found), statistics.median(found)) for found in taken]


def row_of(
    rank: int,
    tried: str,
    tiles: Tiles,
    plain: tuple[float, float],
    best: tuple[float, float],
    own: tuple[float, float],
) -> dict[str, Any]:
    return {
        "rank": rank,
        "tried": tried,
        "tiles": dataclasses.asdict(tiles),
        "plain_ms": plain,
        "best_ms": best,
        "ms": own,
        "of_plain": plain[0] / own[0],
    }


def show(row: dict[str, Any]) -> None:
    if "failed" in row:
        print(f"  rank {row['rank']}, {row['tried']}: {row['tiles']} failed: {row['failed']}", flush=True)
        return
    sizes = ", ".join(f"{name} {value}" for name, value in row["tiles"].items())
    print(
        f"  rank {row['rank']}, {row['tried']}: {row['ms'][0]:.3f} ms (median {row['ms'][1]:.3f}), best"
        f" so far {row['best_ms'][0]:.3f}, plain {row['plain_ms'][0]:.3f}:"
        f" {row['of_plain']:.3f} of plain; logits apart {row.get('apart', 0.0):.1e}; {sizes}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-1.5b", choices=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 4])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--positions", type=int, default=288)
    parser.add_argument("--save", type=Path, default=None, metavar="DIR")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "evolution-tiles",
        "hardware": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "flatout": flatout.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": options.model,
        "slots": options.rows,
        "positions": options.positions,
        "replays": REPLAYS,
        "rows": [],
    }
    file = ResultFile(options.save, subject=f"tiles-{options.model}", result=result)

    def keep(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        show(row)
        file.write()

    decoder = build(SHAPES[options.model], device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for rank in options.ranks:
            search(decoder, rank=rank, rows=options.rows, positions=options.positions, keep=keep)
            torch.cuda.empty_cache()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
