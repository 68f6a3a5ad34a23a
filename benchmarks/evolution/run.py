"""A whole population in one forward against plain inference and against swapping weights per member.

    python benchmarks/evolution/run.py            # a GPU: published shapes; without one a small model
    python benchmarks/evolution/run.py --models qwen3-4b --rows 1024 --ranks 1 4 --save DIR

One *epoch* of an arm is `rows` texts of `--new` tokens after a prompt; ours draws its noise before and
updates the weights after.  Arms of one model alternate in one process, and ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from arms import Load, Plain, Population, Swap, wait  # noqa: E402
from interleaved import ResultFile, cpu_name, ratio  # noqa: E402
from limits import alone_s, peak_s  # noqa: E402
from shapes import SHAPES, build  # noqa: E402

import flatout  # noqa: E402
from flatout.measure.device.kernels import KernelRecorder  # noqa: E402
from flatout.multiplex.models.decoder import Decoder  # noqa: E402

Keep = Callable[[], None]


def timed(arm: Any, decoder: Decoder) -> tuple[float, int]:
    wait(decoder)
    start = time.perf_counter()
    tokens = arm.epoch()
    wait(decoder)
    return time.perf_counter() - start, tokens


def race(decoder: Decoder, arms: dict[Any, Any], *, rounds: int) -> dict[Any, dict[str, Any]]:
    """Rounds over all arms; the first, which compiles and captures, is not counted."""
    seconds: dict[Any, list[float]] = {name: [] for name in arms}
    tokens: dict[Any, int] = {}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            taken, tokens[name] = timed(arm, decoder)
            if number:
                seconds[name].append(taken)
    base = [taken / tokens["plain"] for taken in seconds["plain"]]
    return {  # keyed like `arms`
        name: {
            "tokens_per_s": tokens[name] * rounds / sum(seconds[name]),
            "of_plain": ratio(base, [taken / tokens[name] for taken in seconds[name]]),
            "seconds": seconds[name],
        }
        for name in arms
    }


def measure(
    decoder: Decoder, load: Load, options: argparse.Namespace, *, entry: dict[str, Any], keep: Keep
) -> None:
    """Every rank and number of prompts per member; `together` arms are raced at once, and plain with them."""
    cuda = decoder.device.type == "cuda"
    wishes = [
        (rank, per_member)
        for rank in options.ranks
        for per_member in options.prompts_per_member
        if load.rows // per_member >= 2
    ]
    limits = {}
    if cuda:
        limits = {"plain_of_limit": peak_s(decoder, load), "plain_of_products_alone": alone_s(decoder, load)}
    plain = Plain(decoder, load)
    for start in range(0, len(wishes), options.together):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        ours = {
            wish: Population(decoder, load, rank=wish[0], per_member=wish[1])
            for wish in wishes[start : start + options.together]
        }
        found = race(decoder, {"plain": plain, **ours}, rounds=options.rounds)
        for (rank, per_member), arm in ours.items():
            updates = sorted(arm.update_s)
            plain_s = load.rows * load.new / found["plain"]["tokens_per_s"]
            row = {
                "rank": rank,
                "prompts_per_member": per_member,
                "members": arm.members,
                "plain_tokens_per_s": found["plain"]["tokens_per_s"],
                "tokens_per_s": found[rank, per_member]["tokens_per_s"],
                "of_plain": found[rank, per_member]["of_plain"],
                "update_s": updates[len(updates) // 2],
                "noise_s": arm.noise_s(),
                "peak_bytes": torch.cuda.max_memory_allocated() if cuda and len(ours) == 1 else None,
                **{name: limit / plain_s for name, limit in limits.items()},
            }
            if options.kernels:
                row["kernels_ms"] = kernels_ms(arm, decoder)
            entry["arms"].append(row)
            show(load, row)
            keep()
        if options.kernels and "plain_kernels_ms" not in entry:
            entry["plain_kernels_ms"] = kernels_ms(plain, decoder)
            keep()
        del ours, arm
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def kernels_ms(arm: Any, decoder: Decoder) -> dict[str, float]:
    """The costliest kernels of an epoch (operators, on a CPU), in milliseconds by name."""
    recorder = KernelRecorder(decoder.device.type)
    recorder.start()
    arm.epoch()
    found = recorder.stop(1, step_s=0.0, has_optimizer=False)
    return {kernel.name[:80]: 1e3 * kernel.total_s for kernel in found.top}


def peers(decoder: Decoder, name: str, load: Load) -> dict[str, Any]:
    """On a GPU: Hugging Face's generate at 256 rows, and a step with LoRA per member by batched products."""
    from peers import batched_products, hugging_face

    found: dict[str, Any] = {}
    few = Load(rows=256, prompt=load.prompt, new=64, mode=load.mode)
    plain = Plain(decoder, few)
    timed(plain, decoder)
    taken, tokens = timed(plain, decoder)
    del plain
    theirs = hugging_face(SHAPES[name], rows=256, prompt=load.prompt, new=64)
    found["at_256_rows"] = {"plain_tokens_per_s": tokens / taken, "hugging_face_tokens_per_s": theirs}
    print(
        f"    256 rows: plain {tokens / taken:,.0f}, Hugging Face generate {theirs:,.0f} tokens/s", flush=True
    )
    found["batched_products"] = batched_products(decoder, load)
    for one in found["batched_products"]:
        print(
            f"    step with batched products, rank {one['rank']}: {one['of_plain']:.3f} of plain", flush=True
        )
    return found


def swaps(
    decoder: Decoder, load: Load, options: argparse.Namespace, *, entry: dict[str, Any], keep: Keep
) -> None:
    """Tokens per second when each member's weights are written, used for its rows and restored."""
    for per_member in options.swap_prompts:
        arm = Swap(decoder, load, per_member=per_member, rank=1, timed=options.swap_members)
        timed(arm, decoder)
        taken, tokens = timed(arm, decoder)
        entry["swap"].append({"prompts_per_member": per_member, "tokens_per_s": tokens / taken})
        keep()
        print(f"    swap, {per_member} prompts per member: {tokens / taken:,.0f} tokens/s", flush=True)
        del arm
        gc.collect()


def show(load: Load, row: dict[str, Any]) -> None:
    share = row["of_plain"]
    limit = ""
    if row.get("plain_of_limit") is not None:
        limit = f", plain {row['plain_of_limit']:.3f} of its limit"
        limit += f", {row['plain_of_products_alone']:.3f} with its products as they run alone"
    peak = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / 2**30:.1f} GiB"
    print(
        f"    rows {load.rows}, rank {row['rank']}, {row['prompts_per_member']} prompts per member: "
        f"{row['tokens_per_s']:,.0f} tokens/s, {share['ratio']:.3f} of plain "
        f"[{share['low']:.3f}, {share['high']:.3f}] (noise {1e3 * row['noise_s']:.0f} ms, "
        f"update {1e3 * row['update_s']:.0f} ms{limit}{peak})",
        flush=True,
    )


def parse() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["qwen2.5-1.5b", "smollm2-135m"] if cuda else ["small"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1024] if cuda else [64])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 4])
    parser.add_argument(
        "--prompts-per-member", nargs="+", type=int, default=[1, 4, 16, 64, 256] if cuda else [1, 8]
    )
    parser.add_argument("--prompt", type=int, default=32 if cuda else 8)
    parser.add_argument("--new", type=int, default=256 if cuda else 16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", default="auto", help="auto, fused, graph, compiled or eager")
    parser.add_argument("--swap-prompts", nargs="*", type=int, default=[1, 8, 64, 256] if cuda else [1, 8])
    parser.add_argument("--swap-members", type=int, default=2, help="members timed per swap arm")
    parser.add_argument(
        "--together", type=int, default=1, help="arms that are raced at once (each has a cache)"
    )
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--kernels", action="store_true", help="also the kernels of an epoch of each arm")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--save", type=Path, default=None, metavar="DIR")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    cuda = torch.cuda.is_available()
    result: dict[str, Any] = {
        "benchmark": "evolution",
        "hardware": torch.cuda.get_device_name() if cuda else cpu_name(),
        "torch": str(torch.__version__),
        "flatout": flatout.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "prompt": options.prompt,
        "new": options.new,
        "rounds": options.rounds,
        "mode": options.mode,
        "threads": torch.get_num_threads(),
        "models": [],
    }
    file = ResultFile(options.save, subject=f"evolution-{'-'.join(options.models)}", result=result)
    for name in options.models:
        dtype = torch.bfloat16 if cuda else torch.float32
        decoder = build(SHAPES[name], device="cuda" if cuda else "cpu", dtype=dtype)
        for rows in options.rows:
            load = Load(rows=rows, prompt=options.prompt, new=options.new, mode=options.mode)
            print(f"{name}, {rows} rows, {options.prompt} + {options.new} tokens", flush=True)
            entry: dict[str, Any] = {"model": name, "rows": rows, "arms": [], "swap": []}
            result["models"].append(entry)
            with torch.no_grad():
                measure(decoder, load, options, entry=entry, keep=file.write)
                if rows == options.rows[0]:
                    if cuda and options.peers:
                        entry.update(peers(decoder, name, load))
                    swaps(decoder, load, options, entry=entry, keep=file.write)
        del decoder
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    print(json.dumps(result))
    file.write()


if __name__ == "__main__":
    main()
