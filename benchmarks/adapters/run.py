"""Five adapters in one pass against one after another, against PEFT, and against the loop people write.

    python benchmarks/adapters/run.py --seconds 140 --save DIR      # a GPU: RoBERTa-base and MiniLM shapes
    python benchmarks/adapters/run.py                               # without one: a small model
    python benchmarks/adapters/run.py --shape minilm --model FOLDER # real weights of that shape

Arms of one size alternate in one process, and ratios are taken round by round.  A row is printed when it is
known; an arm that fails is named, and the rest goes on.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import ladder as ladder_arms  # noqa: E402
from arms import Fused, Peft, Recorded, Sequential, batches  # noqa: E402
from cached import phase_two  # noqa: E402
from interleaved import ResultFile, cpu_name, ratio  # noqa: E402
from limits import reachable, step_bytes, step_flops, wait  # noqa: E402
from models import RANKS, SHAPES, build  # noqa: E402

import flatout  # noqa: E402
from flatout.ground.errors import FlatoutError  # noqa: E402

FAILURES = (RuntimeError, ImportError, ValueError, TypeError, FlatoutError)
WARM_UP = 3
ROUND_S = 0.03  # an arm runs about this long in a round
MOST_ROUNDS = 30


def race(arms: Mapping[str, Callable[[], object]], *, seconds: float, device: str) -> dict[str, list[float]]:
    """Seconds of a step of every arm in every round; at least three rounds, then until the time is over."""
    steps: dict[str, int] = {}
    for name, arm in arms.items():
        try:
            for _ in range(WARM_UP):
                arm()
            steps[name] = max(1, min(20, int(ROUND_S / timed(arm, steps=1, device=device))))
        except FAILURES as error:
            fail(name, error)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    for number in range(MOST_ROUNDS):
        if number >= 3 and time.perf_counter() > end:
            break
        for name in list(steps):
            try:
                taken[name].append(timed(arms[name], steps=steps[name], device=device))
            except FAILURES as error:
                fail(name, error)
                del steps[name], taken[name]
    return taken


def timed(arm: Callable[[], object], *, steps: int, device: str) -> float:
    """Seconds of a step; the host may run ahead within a round, as it does in training."""
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        arm()
    wait(device)
    return (time.perf_counter() - start) / steps


def fail(name: str, error: BaseException) -> None:
    print(f"    {name} failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}", flush=True)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def made(makers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The arms that can be made."""
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except FAILURES as error:
            fail(name, error)
    return found


def sizes(model: Any, options: argparse.Namespace, *, seconds: float, peaks: Mapping[str, Any]) -> list[Any]:
    """Fused, sequential and PEFT at every number of tokens per task."""
    device = options.device
    makers: dict[str, Callable[[], Any]] = {
        "fused": lambda: Fused(model, graph="off"),
        "sequential": lambda: Sequential(model),
        "peft": lambda: Peft(model),
    }
    if device != "cpu":
        makers["fused graph"] = lambda: Fused(model, graph="on")
    arms = made(makers)
    rows = []
    for tokens in options.tokens:
        given = batches(tokens=tokens, vocabulary=model.config.vocab_size, device=device)
        own = dict(arms)
        if device != "cpu" and tokens <= 2048:
            own |= made({"sequential graph": lambda given=given: Recorded(Sequential(model), given)})
        bound = {name: (lambda arm=arm, given=given: arm(given)) for name, arm in own.items()}
        taken = race(bound, seconds=seconds / len(options.tokens), device=device)
        row = {"tokens": tokens, **row_of(taken, base="sequential")}
        best = min((row["ms"].get(name, float("inf")) for name in ("fused", "fused graph")), default=0.0)
        row["limit"] = limit_of(model, tokens=tokens, length=given[0].block.length, ms=best, peaks=peaks)
        rows.append(row)
        show(f"{tokens:>6} tokens per task", row)
        if "fused graph" in arms and (decision := arms["fused graph"].step.decision).value != "graph":
            print(f"    fused graph runs {decision}", flush=True)
        del own, bound
        release(device)
    return rows


def row_of(taken: Mapping[str, list[float]], *, base: str) -> dict[str, Any]:
    """Milliseconds of every arm, and how many times as fast as `base` it is."""
    return {
        "ms": {name: 1e3 * median(values) for name, values in taken.items()},
        "of_base": {name: ratio(taken[base], values) for name, values in taken.items() if base in taken},
        "base": base,
    }


def show(title: str, row: Mapping[str, Any]) -> None:
    parts = []
    for name, ms in row["ms"].items():
        times = row["of_base"].get(name)
        text = f"{name} {ms:.2f} ms"
        if times is not None and name != row["base"]:
            text += f" ({times['ratio']:.2f}x [{times['low']:.2f}, {times['high']:.2f}])"
        parts.append(text)
    limit = row.get("limit")
    end = "" if limit is None else f"; limit {limit['ms']:.2f} ms, reached {limit['share']:.2f}"
    print(f"    {title}: {', '.join(parts)}{end}", flush=True)


def limit_of(
    model: Any, *, tokens: int, length: int, ms: float, peaks: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The shortest that a fused step could take at what this device reaches, and the share of it."""
    if not 0 < ms < float("inf"):
        return None
    flops = step_flops(model, tokens=tokens, length=length)
    moved = step_bytes(model, tokens=tokens, element_bytes=next(model.parameters()).element_size())
    seconds = max(flops / peaks["product_flops_per_s"], moved / peaks["copy_bytes_per_s"])
    sheet = peaks["datasheet_flops_per_s"]
    return {
        "flops": flops,
        "bytes": moved,
        "ms": 1e3 * seconds,
        "share": 1e3 * seconds / ms,
        "flops_of_datasheet": None if sheet is None else flops / (ms / 1e3) / sheet,
    }


def paths(model: Any, options: argparse.Namespace, *, seconds: float) -> list[Any]:
    """The kinds of thin products against each other, recorded where that is possible."""
    graph: Any = "off" if options.device == "cpu" else "on"
    names: list[Any] = ["loop", "batched", "dense"] + ([] if options.device == "cpu" else ["grouped"])
    arms = made({name: (lambda name=name: Fused(model, graph=graph, path=name)) for name in names})
    rows = []
    chosen = options.tokens[:: max(1, len(options.tokens) // 3)]
    for tokens in chosen:
        given = batches(tokens=tokens, vocabulary=model.config.vocab_size, device=options.device)
        bound = {name: (lambda arm=arm, given=given: arm(given)) for name, arm in arms.items()}
        taken = race(bound, seconds=seconds / len(chosen), device=options.device)
        rows.append({"tokens": tokens, **row_of(taken, base="loop")})
        show(f"products, {tokens} tokens per task", rows[-1])
    return rows


def ladder(model: Any, options: argparse.Namespace, *, seconds: float) -> dict[str, Any]:
    """Every rung against the first."""
    cuda = options.device != "cpu"
    makers = ladder_arms.rungs(
        model,
        rows=16 if cuda else 4,
        padded=512 if cuda else 128,
        scale=1.0 if cuda else 0.25,
        device=options.device,
    )
    taken = race(made(makers), seconds=seconds, device=options.device)
    row = row_of(taken, base="as written")
    for name, ms in row["ms"].items():
        times = row["of_base"].get(name)
        print(f"    {name:<18} {ms:9.2f} ms" + (f"  {times['ratio']:8.1f}x" if times else ""), flush=True)
    return row


def profile(model: Any, options: argparse.Namespace) -> None:
    """Where a fused step's time goes on the device, by kernel."""
    arm = Fused(model, graph="off")
    given = batches(tokens=2048, vocabulary=model.config.vocab_size, device=options.device)
    for _ in range(3):
        arm(given)
    wait(options.device)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if options.device != "cpu":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as seen:
        arm(given)
        wait(options.device)
    by = "self_cpu_time_total" if options.device == "cpu" else "self_device_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=70), flush=True)


def release(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def parse() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=None, choices=list(SHAPES), help="which encoders")
    parser.add_argument("--model", type=Path, default=None, help="a folder with real weights of the shape")
    parser.add_argument("--tokens", nargs="+", type=int, default=None, help="tokens per task")
    parser.add_argument("--seconds", type=float, default=None, help="time for all races together")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", default=None, choices=PIECES, help="some pieces of each shape")
    parser.add_argument("--profile", action="store_true", help="kernels of a step at 2,048 tokens per task")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--save", type=Path, default=None, metavar="DIR")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    options.shape = options.shape or (["roberta-base", "minilm"] if cuda else ["small"])
    options.tokens = options.tokens or ([64, 256, 1024, 2048, 4096, 16384] if cuda else [16, 64, 256])
    options.seconds = options.seconds or (140.0 if cuda else 40.0)
    return options


PIECES = ["sizes", "ladder", "products", "cached"]
SHARES = {"sizes": 0.5, "ladder": 0.25, "products": 0.2, "cached": 0.05}


def one_shape(name: str, options: argparse.Namespace, peaks: Mapping[str, Any]) -> dict[str, Any]:
    """Every piece of one encoder."""
    cuda = options.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    model = build(name, folder=options.model, device=options.device, dtype=dtype)
    seconds = options.seconds / len(options.shape)
    found: dict[str, Any] = {"shape": name, "real_weights": options.model is not None, "ranks": RANKS}
    pieces: dict[str, Callable[[], Any]] = {
        "sizes": lambda: sizes(model, options, seconds=SHARES["sizes"] * seconds, peaks=peaks),
        "ladder": lambda: ladder(model, options, seconds=SHARES["ladder"] * seconds),
        "products": lambda: paths(model, options, seconds=SHARES["products"] * seconds),
        "cached": lambda: phase_two(
            model, rows=4096 if cuda else 128, length=64 if cuda else 32, epochs=5, device=options.device
        ),
    }
    for piece in options.only or PIECES:
        start = time.perf_counter()
        try:
            found[piece] = pieces[piece]()
        except FAILURES as error:
            fail(piece, error)
        if piece == "cached" and piece in found:
            print(f"    router on cached features, 5 epochs: {found[piece]['ratio']:.2f}x", flush=True)
        print(f"    ({piece}: {time.perf_counter() - start:.0f} s)", flush=True)
        release(options.device)
    if options.profile:
        profile(model, options)
    return found


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    cuda = options.device == "cuda"
    peaks = reachable(options.device, torch.bfloat16 if cuda else torch.float32)
    result: dict[str, Any] = {
        "benchmark": "adapters",
        "hardware": torch.cuda.get_device_name() if cuda else cpu_name(),
        "torch": str(torch.__version__),
        "flatout": flatout.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "threads": torch.get_num_threads(),
        "peaks": peaks,
        "shapes": [],
    }
    file = ResultFile(options.save, subject=f"adapters-{'-'.join(options.shape)}", result=result)
    print(f"one large product: {peaks['product_flops_per_s'] / 1e12:.1f} TFLOP/s", flush=True)
    print(f"one large copy: {peaks['copy_bytes_per_s'] / 1e12:.2f} TB/s", flush=True)
    for name in options.shape:
        print(name, flush=True)
        result["shapes"].append(one_shape(name, options, peaks))
        release(options.device)
        file.write()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
