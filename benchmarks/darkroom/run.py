"""The Darkroom job as written, as its author mended it, and in Flatout's forms: whole steps, side by side.

    python benchmarks/darkroom/run.py            # a GPU: 73 goals, batch 512; without one the small size
    python benchmarks/darkroom/run.py --size small --batch-size 16 --device cpu --seconds 60 --save

Blocks of steps of all arms alternate in one process, and ratios are taken round by round.  A slow arm
gets one step per round, a fast one as many as a third of a second holds.  Rounds go on until the seconds
are used up, three at least.  An arm that fails is left out with its error; an interrupt keeps what there is.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import arms  # noqa: E402
from arms import Arm, Job  # noqa: E402
from fast_data import MOST_ROWS, moments  # noqa: E402
from fast_model import MOST_TOKENS_BESIDE_ROWS  # noqa: E402
from histories import learning_histories, split_goals  # noqa: E402
from interleaved import ratio  # noqa: E402
from limit import limit_of_step  # noqa: E402
from model import DarkroomTransformer  # noqa: E402
from report import as_table  # noqa: E402
from train import SIZES  # noqa: E402

import flatout  # noqa: E402
from flatout.ground.errors import FlatoutError  # noqa: E402
from flatout.hardware.host import read_host  # noqa: E402
from flatout.measure.device.kernels import KernelRecorder  # noqa: E402

BLOCK_S = 0.33
LEAST_ROUNDS = 3
AFTER_ROUNDS_SHARE = 0.12  # of the seconds, for kernels and loss curves
LEVERS = {  # in the order of the ladder: same numbers first
    "cuda": ("causal", "answer_row", "fused", "graph", "compile", "bf16"),
    "cpu": ("causal", "answer_row", "fused"),
}
EXACT = ("causal", "answer_row", "fused", "graph")
ARM_FAILURES = (
    RuntimeError, ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError,
    TypeError, ValueError, FlatoutError,
)  # fmt: skip


class Run:
    """One run of the benchmark; `result` grows as it goes on, and is valid at any moment."""

    def __init__(self, job: Job, settings: argparse.Namespace, result: dict[str, Any]) -> None:
        self.job, self.settings, self.result = job, settings, result
        self.began = time.perf_counter()
        self.arms: dict[str, Arm] = {}
        self.block_steps: dict[str, int] = {}
        self.blocks: dict[str, list[float]] = {}  # mean step seconds, one per round
        self.errors: dict[str, str] = result["errors"]

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began

    def say(self, text: str) -> None:
        print(f"{self.elapsed_s:6.1f} s  {text}", file=sys.stderr, flush=True)

    def synchronize(self) -> None:
        if self.job.device.startswith("cuda"):
            torch.cuda.synchronize()

    def time_steps(self, step: Callable[[], None], num_steps: int) -> float:
        """Mean seconds of a step."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        self.synchronize()
        return (time.perf_counter() - start) / num_steps

    def attempt(self, name: str, work: Callable[..., None], *arguments: Any) -> bool:
        """Whether `work` was done; if not, why is in the result."""
        try:
            work(*arguments)
        except ARM_FAILURES as error:
            self.errors[name] = f"{type(error).__name__}: {error}"[:500]
            self.say(f"{name} failed: {self.errors[name]}")
            return False
        return True

    def set_up(self) -> None:
        """Build every arm and run it until it is warm; those that compile come last."""
        self.attempt("as_written", self.add, "as_written", arms.as_written, 1)
        self.attempt("seeds_fix", self.add, "seeds_fix", arms.seeds_fix, 2)
        ladder, alone = plan(self.settings.levers)
        self.result["ladder"], self.result["alone"] = ladder, alone
        names = dict.fromkeys([*ladder, *alone.values()])
        for name in sorted(names, key=lambda name: "compile" in name):
            if "compile" in name and self.elapsed_s > self.settings.seconds / 2:
                self.errors[name] = "left out: half of the seconds were used up before it was compiled"
                continue
            self.attempt(name, self.add, name, functools.partial(arms.ours, name=name), 8)

    def add(self, name: str, make: Callable[[Job], Arm], warm_up: int) -> None:
        arm = make(self.job)
        for _ in range(warm_up):
            arm.step()
        step_s = self.time_steps(arm.step, 1 if warm_up <= 2 else 3) if name != "as_written" else None
        block_s = min(BLOCK_S, self.settings.seconds / 300)
        self.block_steps[name] = max(1, min(300, round(block_s / step_s))) if step_s else 1
        self.arms[name] = arm
        self.blocks[name] = []
        self.say(f"{name}: {f'{step_s * 1e3:.2f} ms' if step_s else 'ready'}")

    def rounds(self) -> None:
        """Blocks of all arms, again and again, each round in another order."""
        until_s = self.settings.seconds * (1 - AFTER_ROUNDS_SHARE)
        cached = [name for name in self.cached_names() if name in self.arms]
        for name in cached:
            self.blocks[f"{name} cached"] = []
            self.attempt(f"{name} cached", self.arms[name].cached_step)
        longest_s = 0.0
        for number in range(1000):
            began_s = self.elapsed_s
            if number >= LEAST_ROUNDS and began_s + longest_s > until_s:
                break
            names = list(self.arms)
            turn = number * 5 % len(names)
            for name in names[turn:] + names[:turn]:
                if not self.attempt(name, self.block, name, name in cached):
                    del self.arms[name]
            longest_s = max(longest_s, self.elapsed_s - began_s)
            self.result["rounds"] = number + 1
            self.summarise()
            self.say(f"round {number + 1} took {self.elapsed_s - began_s:.1f} s")

    def block(self, name: str, cached: bool) -> None:
        arm, num_steps = self.arms[name], self.block_steps[name]
        plain_s = self.time_steps(arm.step, num_steps)
        if cached:
            self.blocks[f"{name} cached"].append(self.time_steps(arm.cached_step, num_steps))
        self.blocks[name].append(plain_s)

    def cached_names(self) -> list[str]:
        ladder = self.result["ladder"]
        return list(dict.fromkeys(["seeds_fix", ladder[0], exact_of(ladder), ladder[-1]]))

    def summarise(self) -> None:
        self.result["seconds_used"] = round(self.elapsed_s, 1)
        for name, blocks in self.blocks.items():
            if not blocks or name.endswith(" cached"):
                continue
            row: dict[str, Any] = {"blocks_s": blocks, "steps_per_block": self.block_steps[name]}
            row["step_s"] = sorted(blocks)[len(blocks) // 2]
            for reference in ("as_written", "seeds_fix"):
                if self.blocks.get(reference) and name != reference:
                    row[f"speedup_over_{reference}"] = paired_ratio(self.blocks[reference], blocks)
            if self.blocks.get(f"{name} cached"):
                row["step_over_cached"] = paired_ratio(blocks, self.blocks[f"{name} cached"])
            self.result["arms"][name] = row

    def kernels(self) -> None:
        """GPU busy share and the costliest kernels of a few arms; not of as_written, which has too many."""
        for name in self.cached_names():
            if name in self.arms:
                self.attempt(f"{name} kernels", self.record, name)

    def record(self, name: str) -> None:
        arm, num_steps = self.arms[name], 30
        device_type = "cuda" if self.job.device.startswith("cuda") else "cpu"
        if name == "seeds_fix" or device_type == "cpu":
            num_steps = 3
        arm.step()
        self.synchronize()
        recorder = KernelRecorder(device_type)
        recorder.start()
        for _ in range(num_steps):
            arm.step()
        self.synchronize()
        found = recorder.stop(num_steps, step_s=self.result["arms"][name]["step_s"])
        self.result["kernels"][name] = {
            "busy_share": found.busy_share,
            "num_kernels": found.num_kernels,
            "median_kernel_s": found.median_kernel_s,
            "num_syncs": found.num_syncs,
            "by_category_s": found.by_category_s,
            "top": [
                {"name": k.name[:120], "calls": k.calls_per_step, "s": k.total_s} for k in found.top[:12]
            ],
        }
        share = f"{found.busy_share:.3f}" if found.busy_share is not None else "n/a"
        self.say(f"{name}: busy {share}, {found.num_kernels:.0f} kernels a step")

    def curves(self) -> None:
        """Losses of the slow arms, and of the fast ones from the same weights on the same batches."""
        if "seeds_fix" in self.arms:
            slow = self.arms["seeds_fix"]
            while len(slow.losses) < self.settings.curve_steps and self.elapsed_s < self.settings.seconds:
                slow.step()
        ladder = self.result["ladder"]
        for reference in ("as_written", "seeds_fix"):
            if reference not in self.arms or not self.arms[reference].losses:
                continue
            slow = self.arms[reference]
            batches = slow.batches[: self.settings.curve_steps]
            curve: dict[str, Any] = {reference: slow.losses[: len(batches)]}
            self.result["curves"][reference] = curve
            eager = [ladder[0], eager_exact(ladder)]
            for name in dict.fromkeys([*eager, "gather+causal+answer_row+bf16"]):
                curve[name] = arms.replayed_losses(self.job, name, batches)
                gap = max(abs(a - b) for a, b in zip(curve[name], curve[reference], strict=True))
                self.say(f"{name} on the {len(batches)} batches of {reference}: loss within {gap:.2e}")
            if slow.first_gradient is not None:
                self.result["gradients"][reference] = self.gradient_gaps(slow, eager)

    def gradient_gaps(self, slow: Arm, names: list[str]) -> dict[str, float]:
        assert slow.first_gradient is not None
        gaps = {"largest": float(slow.first_gradient.abs().max())}
        for name in names:
            gradient = arms.gradient_of_ours(self.job, name, slow.batches[0])
            gaps[name] = float((gradient - slow.first_gradient).abs().max())
        return gaps


def paired_ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """The ratio over the rounds that both have: an arm that failed has fewer."""
    rounds = min(len(above), len(below))
    return ratio(above[:rounds], below[:rounds])


def plan(levers: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Names of the arms of the ladder, each with one lever more, and of each lever alone."""
    ladder = ["+".join(["gather", *levers[:count]]) for count in range(len(levers) + 1)]
    return ladder, {lever: f"gather+{lever}" for lever in levers}


def exact_of(ladder: list[str]) -> str:
    """The highest rung of the ladder that has exact levers only."""
    return [rung for rung in ladder if set(rung.split("+")[1:]) <= set(EXACT)][-1]


def eager_exact(ladder: list[str]) -> str:
    """The same without the graph: a gradient is read, and batches are counted, step by step."""
    return "+".join(part for part in exact_of(ladder).split("+") if part != "graph")


def make_job(settings: argparse.Namespace) -> Job:
    size = SIZES[settings.size]
    goals, _held_out = split_goals(size["goals"], seed=settings.seed)
    histories = learning_histories(
        goals, histories_per_goal=size["histories"], num_steps=size["history_steps"], seed=settings.seed
    )
    torch.manual_seed(settings.seed)
    return Job(
        histories=histories,
        samples=moments(histories),
        weights=DarkroomTransformer().state_dict(),
        batch_size=settings.batch_size,
        device=settings.device,
        seed=settings.seed,
        workers=2,
        fixed_workers=min(16, len(os.sched_getaffinity(0))),
    )


def cpu_name() -> str:
    host = read_host()
    cores = f", {host.cores:g} cores" if host.cores else ""
    return f"{host.cpu_model or 'CPU'}{cores}"


def new_result(job: Job, settings: argparse.Namespace) -> dict[str, Any]:
    on_gpu = job.device.startswith("cuda")
    hardware = torch.cuda.get_device_name() if on_gpu else cpu_name()
    num_tokens = MOST_ROWS + MOST_TOKENS_BESIDE_ROWS
    limits = {}
    for dtype in ("fp32", "bf16"):
        found = limit_of_step(
            batch_size=job.batch_size,
            num_tokens=num_tokens,
            device_name=hardware if on_gpu else None,
            dtype=dtype,
        )
        limits[dtype] = {
            "flops": found.flops,
            "traffic_bytes": found.traffic_bytes,
            "arithmetic_s": found.arithmetic_s,
            "traffic_s": found.traffic_s,
            "step_s": found.step_s,
        }
    return {
        "benchmark": "darkroom",
        "hardware": hardware,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "flatout": flatout.__version__,
        "date": datetime.date.today().isoformat(),
        "size": settings.size,
        "batch_size": job.batch_size,
        "num_samples": len(job.samples),
        "workers": {"as_written": job.workers, "seeds_fix": job.fixed_workers},
        "limit": limits,
        "rounds": 0,
        "arms": {},
        "kernels": {},
        "gradients": {},
        "curves": {},
        "errors": {},
    }


def main() -> None:
    settings = read_settings()
    torch.set_num_threads(settings.threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    warnings.filterwarnings("ignore", message=".*TF32.*|.*lazy backward.*|.*max_autotune_gemm.*")
    job = make_job(settings)
    result = new_result(job, settings)
    run = Run(job, settings, result)
    try:
        for phase in (run.set_up, run.rounds, run.kernels, run.curves):
            phase()
            save(result, settings)
    except KeyboardInterrupt:
        run.errors["run"] = "interrupted"
    run.summarise()
    save(result, settings)
    print(as_table(result))
    print(json.dumps(result))


def save(result: dict[str, Any], settings: argparse.Namespace) -> None:
    """Write what is known, under a name that says where it was measured."""
    if settings.save is None:
        return
    folder = Path(settings.save)
    folder.mkdir(parents=True, exist_ok=True)
    hardware = "".join(c if c.isalnum() else "-" for c in str(result["hardware"]).lower())
    path = folder / f"darkroom-{result['size']}_{hardware}_{result['date']}.json"
    half_written = path.with_suffix(".part")
    half_written.write_text(json.dumps(result, indent=1) + "\n")
    half_written.replace(path)


def read_settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(SIZES), help="default: full on a GPU, else small")
    parser.add_argument("--batch-size", type=int, help="samples of a step (default: the size's)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=330, help="for everything (default: %(default)s)")
    parser.add_argument("--levers", help="the ladder, with commas (default: all the device has)")
    parser.add_argument("--curve-steps", type=int, default=60, help="steps of the loss curves (default: 60)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--save", nargs="?", const=str(HERE / "results"), metavar="FOLDER", help="write a JSON file"
    )
    settings = parser.parse_args()
    if settings.device == "auto":
        settings.device = "cuda" if torch.cuda.is_available() else "cpu"
    settings.size = settings.size or ("full" if settings.device.startswith("cuda") else "small")
    settings.batch_size = settings.batch_size or SIZES[settings.size]["batch_size"]
    known = LEVERS["cuda" if settings.device.startswith("cuda") else "cpu"]
    settings.levers = tuple(settings.levers.split(",")) if settings.levers else known
    return settings


if __name__ == "__main__":
    main()
