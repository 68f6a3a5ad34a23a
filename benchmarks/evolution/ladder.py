"""From one member and one prompt at a time to a whole population in one forward, a change at a time.

    python benchmarks/evolution/ladder.py                 # a GPU: SmolLM2-135M's shape; else a tiny model
    python benchmarks/evolution/ladder.py --models qwen2.5-1.5b --population 512 --save DIR

original      a member's weights are written, its prompts answered one after another by transformers'
              `generate`, the weights restored
+ batching    the same with all prompts of the member in one `generate`
+ AMP         the same under autocast to bfloat16
+ compile     the same with a static cache, the steps after the prompt compiled by `generate` itself
one forward   Eggroll: all members in one batch, noise and update included

Every arm answers `--prompts` prompts of `--prompt` tokens with `--new` tokens per member, greedily: one
member or all of them, and again until `--seconds` of the round are over, since NVML looks only a few times
a second.  *Samples* are completions that were made.  A rung that takes longer than `--limit` seconds a round,
compiling included, is named and left out.
Utilisation is the mean share of time in which NVML saw a kernel (a low bar: one small kernel clears it), on
a CPU the share of the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from interleaved import ResultFile, cpu_name, ratio  # noqa: E402
from shapes import SHAPES, Shape, transformers_model  # noqa: E402

import flatout  # noqa: E402
from flatout.evolution import Eggroll  # noqa: E402
from flatout.ground.errors import FlatoutError  # noqa: E402

SIGMA = 1e-3
BASE, OURS = "original", "one forward"


class OverLimit(BaseException):
    """A rung ran past its limit; no `except Exception` on its way, as compilers have them, may swallow it."""


FAILURES = (
    *(FlatoutError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError),
    OverLimit,
)


class OneByOne:
    """A member at a time: its weights are written, its prompts answered, the weights restored."""

    def __init__(
        self,
        model: Any,
        prompts: torch.Tensor,
        options: argparse.Namespace,
        *,
        batched: bool = True,
        amp: bool = False,
        compiled: bool = False,
    ) -> None:
        self.model, self.options, self.amp = model, options, amp
        self.batches = [prompts] if batched else list(prompts.split(1))
        self.weights = [
            each.weight for each in model.model.layers.modules() if isinstance(each, torch.nn.Linear)
        ]
        self.saved = [weight.clone() for weight in self.weights]
        self.extra: dict[str, Any] = {}
        if compiled:
            self.extra = {"cache_implementation": "static", "compile_config": compiling(model.device.type)}
            # A static cache has one dtype; under autocast rotated keys would be fp32, values bf16.
            model.model.rotary_emb.register_forward_hook(as_bf16)

    @torch.no_grad()
    def epoch(self) -> int:
        for weight in self.weights:
            left, right = (
                torch.randn(size, 1, device=weight.device, dtype=weight.dtype) for size in weight.shape
            )
            weight.addmm_(left, right.T, alpha=SIGMA)
        device = self.model.device.type
        with torch.autocast(device, dtype=torch.bfloat16) if self.amp else contextlib.nullcontext():
            for batch in self.batches:
                self.model.generate(
                    batch,
                    attention_mask=torch.ones_like(batch),
                    max_new_tokens=self.options.new,
                    min_new_tokens=self.options.new,
                    do_sample=False,
                    **self.extra,
                )
        for weight, saved in zip(self.weights, self.saved, strict=True):
            weight.copy_(saved)
        return sum(len(batch) for batch in self.batches)


def compiling(kind: str) -> Any:
    """How `generate` compiles its steps: as it does by itself on a GPU, and also on a CPU."""
    from transformers import CompileConfig

    config = CompileConfig(mode="reduce-overhead" if kind == "cuda" else "default", dynamic=False)
    config._compile_all_devices = True
    return config


def as_bf16(_module: Any, _inputs: Any, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(each.bfloat16() for each in outputs)


class OneForward:
    """Ours: every member's prompts in one batch, the noise drawn before and the weights updated after."""

    def __init__(self, model: Any, prompts: torch.Tensor, options: argparse.Namespace) -> None:
        self.prompts, self.options = [tuple(row) for row in prompts.tolist()], options
        self.es = Eggroll(model, population=options.population, sigma=SIGMA, lr=SIGMA)

    def epoch(self) -> int:
        done = self.es.generate(self.prompts, max_new_tokens=self.options.new, eos=(), mode=self.options.mode)
        rewards = torch.tensor([[float(one.tokens[-1] % 7) for one in row] for row in done])
        self.es.tell(rewards, cosine=False)
        return rewards.numel()


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise OverLimit in a block that takes longer."""

    def ring(_number: int, _frame: object) -> None:
        raise OverLimit(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def watched(device: torch.device, shares: list[float]) -> Iterator[None]:
    """Add the mean utilisation of a block: of the GPU as NVML samples it, or of this process's cores."""
    if device.type != "cuda":
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        spent_s = time.process_time() - cpu_s
        shares.append(spent_s / (time.perf_counter() - wall_s) / len(os.sched_getaffinity(0)))
        return
    seen, stop = [], threading.Event()

    def look() -> None:
        while not stop.wait(0.05):
            seen.append(torch.cuda.utilization() / 100)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        if seen:
            shares.append(statistics.mean(seen))


def arms_of(shape: Shape, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The arms in the order of the ladder; all but the last have fp32 weights, as the original had."""
    kind = device.type
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, shape.vocabulary, (options.prompts, options.prompt), generator=generator).to(
        device
    )
    whole = transformers_model(shape, device=kind, dtype=torch.float32)
    arms: dict[str, Any] = {
        BASE: OneByOne(whole, prompts, options, batched=False),
        "+ batching": OneByOne(whole, prompts, options),
        "+ AMP": OneByOne(whole, prompts, options, amp=True),
    }
    if options.compile:
        own = transformers_model(shape, device=kind, dtype=torch.float32)
        arms["+ compile"] = OneByOne(own, prompts, options, amp=True, compiled=True)
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    arms[OURS] = OneForward(transformers_model(shape, device=kind, dtype=dtype), prompts, options)
    return arms


def climb(
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    keep: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Rounds over all arms in turn; the first, which compiles and captures, is not counted.

    An arm that fails or takes too long is named, and the others go on; what is known is kept after each arm.
    """
    arms = arms_of(SHAPES[name], options, device)
    rounds: dict[str, list[float]] = {arm: [] for arm in arms}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}  # a sample
    shares: dict[str, list[float]] = {arm: [] for arm in arms}
    failed: dict[str, str] = {}
    for number in range(options.rounds + 1):
        for arm, run in arms.items():
            if arm in failed:
                continue
            used: list[float] = []
            _wait(device)
            start = time.perf_counter()
            try:
                with limited(options.limit), watched(device, used):
                    samples = run.epoch()
                    _wait(device)
                    while number and time.perf_counter() - start < options.seconds:
                        samples += run.epoch()
                        _wait(device)
            except FAILURES as error:
                failed[arm] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                continue
            taken = time.perf_counter() - start
            print(f"    round {number}, {arm}: {taken:.1f} s", file=sys.stderr, flush=True)
            if number:
                rounds[arm].append(taken)
                seconds[arm].append(taken / samples)
                shares[arm] += used
            known = [each for each in arms if seconds[each] or each in failed]
            keep([row_of(each, rounds, seconds, shares, failed.get(each)) for each in known])


def row_of(
    arm: str,
    rounds: Mapping[str, list[float]],
    seconds: Mapping[str, list[float]],
    shares: Mapping[str, list[float]],
    failed: str | None,
) -> dict[str, Any]:
    if failed is not None:
        return {"arm": arm, "failed": failed}
    taken, used, base = seconds[arm], shares[arm], seconds[BASE]
    both = min(len(taken), len(base))
    return {
        "arm": arm,
        "samples_per_s": 1 / statistics.median(taken),
        "times_the_original": ratio(base[:both], taken[:both]) if both else None,
        "utilisation_share": statistics.mean(used) if used else None,
        "round_s": statistics.median(rounds[arm]),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def show(row: dict[str, Any]) -> None:
    if "failed" in row:
        print(f"    {row['arm']:<12} failed: {row['failed']}", flush=True)
        return
    share, times = row["utilisation_share"], row["times_the_original"]
    used = "n/a" if share is None else f"{share:.0%}"
    gain = "" if times is None else f"  {times['ratio']:>8.2f}x [{times['low']:.2f}, {times['high']:.2f}]"
    print(
        f"    {row['arm']:<12} {row['samples_per_s']:>12,.1f} samples/s{gain}"
        f"  utilisation {used} of rounds of {row['round_s']:.1f} s",
        flush=True,
    )


def parse() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"] if cuda else ["tiny"])
    parser.add_argument("--population", type=int, default=512 if cuda else 16)
    parser.add_argument("--prompts", type=int, default=8 if cuda else 4)
    parser.add_argument("--prompt", type=int, default=32 if cuda else 8)
    parser.add_argument("--new", type=int, default=64 if cuda else 8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=4.0 if cuda else 0.0, help="a round of an arm takes at least so long"
    )
    parser.add_argument("--limit", type=float, default=60, help="seconds a rung may take a round")
    parser.add_argument(
        "--mode", default="auto", help="of the one forward: auto, fused, graph, compiled, eager"
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--save", type=Path, default=None, metavar="DIR")
    return parser.parse_args()


def main() -> None:
    options = parse()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    told = ("population", "prompts", "prompt", "new", "rounds", "seconds", "limit", "mode")
    result: dict[str, Any] = {
        "benchmark": "evolution-ladder",
        "hardware": torch.cuda.get_device_name() if cuda else cpu_name(),
        "torch": str(torch.__version__),
        "flatout": flatout.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "threads": torch.get_num_threads(),
        **{name: getattr(options, name) for name in told},
        "models": [],
    }
    file = ResultFile(options.save, subject=f"ladder-{'-'.join(options.models)}", result=result)
    for name in options.models:
        print(f"{name}, {options.population} members x {options.prompts} prompts", flush=True)
        found: dict[str, Any] = {"model": name, "arms": []}
        result["models"].append(found)

        def keep(rows: list[dict[str, Any]], found: dict[str, Any] = found) -> None:
            found["arms"] = rows
            file.write()

        climb(name, options, device, keep)
        for row in found["arms"]:
            show(row)
        gc.collect()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
