"""What it costs to be observed: step time with an instrument over step time without.

    python benchmarks/overhead/run.py [--device auto] [--blocks 30] [--quick] [--save]

Blocks of steps with and without the instrument alternate in one process, and the ratio is taken block by
block.  On a GPU it is a ratio of wall times.  On a CPU it is also given for the process's CPU time, which
other jobs of a shared machine disturb less.  `whole` compares a complete diagnosis with its allowance:
60 steps' time plus 20 s beyond what the script needs to start.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from workloads import WORKLOADS, Step, environment  # noqa: E402

from flatout.measure.run.observer import Observer, ObserverOptions  # noqa: E402
from flatout.measure.run.step_blocks.schedule import StepBlock  # noqa: E402

# (steps before timing, timed steps): past the warm-up, and with a loader past the batches looked at closely
STEPS = {"modules": (10, 40), "encoder": (8, 10), "loader": (40, 100)}
Arm = Callable[[], AbstractContextManager[Any]]


class RealSteps(Observer):
    """An observer whose plan, after its own warm-up, is real blocks only, of the length it would plan."""

    def _plan(self) -> list[StepBlock]:
        real = [block for block in super()._plan() if block.arm == "real"]
        return [max(real, key=lambda block: block.num_steps)] * 1000


@contextmanager
def observed() -> Iterator[None]:
    observer = RealSteps(ObserverOptions(folder=str(HERE)))
    observer.install()
    try:
        yield
    finally:
        observer.remove()
        if observer.finished or observer.warm_up is not None:
            raise RuntimeError("the timed steps were not all real steps")


@contextmanager
def profiled() -> Iterator[None]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities):
        yield


def time_block(
    make: Callable[[], Step], arm: Arm, sizes: tuple[int, int], device: str
) -> tuple[float, float]:
    """Mean step seconds of one block by the clock and in CPU time, after the warm-up a diagnosis has."""
    num_before, num_steps = sizes
    with arm():
        step = make()
        for _ in range(num_before):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        start, start_cpu = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
        return wall_s / num_steps, cpu_s / num_steps


def ratio_with_interval(ratios: list[float]) -> dict[str, float]:
    """The median over blocks, with its 95 % bootstrap interval."""
    values, random = np.array(ratios), np.random.default_rng(0)
    medians = np.median(random.choice(values, size=(4000, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {"ratio": float(np.median(values)), "low": float(low), "high": float(high), "blocks": len(ratios)}


def compare(workload: str, arm: Arm, *, device: str, blocks: int) -> dict[str, Any]:
    torch.manual_seed(0)
    make = WORKLOADS[workload](device)
    ratios: list[tuple[float, float]] = []
    plain_s = []
    for block in range(blocks):
        arms: list[tuple[str, Arm]] = [("off", nullcontext), ("on", arm)]
        order = arms if block % 2 else arms[::-1]
        times = {name: time_block(make, each, STEPS[workload], device) for name, each in order}
        ratios.append((times["on"][0] / times["off"][0], times["on"][1] / times["off"][1]))
        plain_s.append(times["off"][0])
    result = {"step_s": float(np.median(plain_s)), **ratio_with_interval([wall for wall, _ in ratios])}
    if device == "cpu":
        result["cpu_time"] = ratio_with_interval([cpu for _, cpu in ratios])
    return result


SCRIPT = """
import sys, time, statistics
sys.path.insert(0, {folder!r})
import torch
from workloads import WORKLOADS
{prelude}
if __name__ == "__main__":
    step = WORKLOADS[{workload!r}]({device!r})()
    times = []
    while len(times) < {num_steps}:
        start = time.perf_counter()
        with traced():
            step()
        times.append(time.perf_counter() - start)
    print("STEP_S", statistics.median(times[len(times) // 3:]), flush=True)
"""
PLAIN = "from contextlib import nullcontext as traced"
TRACEML = """
import traceml_ai as traceml
traceml.init(mode="auto")
traced = lambda: traceml.trace_step(torch.nn.Identity())
"""


def traceml(workload: str, *, device: str, rounds: int, num_steps: int) -> dict[str, Any] | None:
    """TraceML cannot be switched off inside a process: alternating processes, median step of each."""
    try:
        import traceml_ai  # noqa: F401
    except ImportError:
        return None
    if not rounds:
        return None
    with tempfile.TemporaryDirectory() as folder:
        commands = {}
        for name, prelude, command in (
            ("off", PLAIN, [sys.executable]),
            ("on", TRACEML, [sys.executable, "-m", "traceml_ai.launcher.cli", "run", "--mode", "summary"]),
        ):
            script = Path(folder) / f"{name}.py"
            script.write_text(
                SCRIPT.format(
                    folder=str(HERE), prelude=prelude, workload=workload, device=device, num_steps=num_steps
                )
            )
            commands[name] = [*command, str(script)]
        ratios = []
        for _ in range(rounds):
            times = {name: _median_step(command, folder) for name, command in commands.items()}
            if times["on"] is None or times["off"] is None:
                return None
            ratios.append(times["on"] / times["off"])
    return ratio_with_interval(ratios)


def _median_step(command: list[str], folder: str) -> float | None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    for line in (done.stdout + done.stderr).splitlines():
        if "STEP_S" in line:
            return float(line.split("STEP_S")[1].split()[0])
    print(f"no figure from {command}: {done.stderr[-500:]}", file=sys.stderr)
    return None


def whole(workload: str, *, device: str) -> dict[str, Any]:
    """Wall time of a whole diagnosis beyond starting the script, against 60 steps' time plus 20 s."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        evidence = Path(folder) / "evidence.json"
        text = SCRIPT.format(
            folder=str(HERE), prelude=PLAIN, workload=workload, device=device, num_steps=1_000_000
        )
        script.write_text(text)
        short = Path(folder) / "short.py"
        short.write_text(text.replace("1000000", "1"))
        start = time.perf_counter()
        subprocess.run([sys.executable, str(short)], check=True, capture_output=True)
        startup_s = time.perf_counter() - start
        start = time.perf_counter()
        command = [sys.executable, "-m", "flatout", "diagnose", "--save", str(evidence), str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wall_s = time.perf_counter() - start
        if done.returncode not in (0, 1):
            raise SystemExit(f"flatout failed: {done.stderr}")
        from flatout.measure.evidence_file import load_evidence

        found = load_evidence(evidence)
    step_s = found.step_s or 0.0
    allowed_s = 60 * step_s + 20
    beyond_s = wall_s - startup_s
    return {"step_s": step_s, "beyond_s": beyond_s, "allowed_s": allowed_s, "steps": len(found.steps)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--blocks-share", type=float, default=1.0, help="of blocks, where steps are longer")
    parser.add_argument("--traceml-rounds", type=int, default=5, help="pairs of processes (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    parser.add_argument("--quick", action="store_true", help="few blocks, to see that it runs")
    parser.add_argument("--save", action="store_true", help="write results/overhead_HARDWARE_DATE.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    blocks = 3 if options.quick else options.blocks
    rounds = 2 if options.quick else options.traceml_rounds
    rows: dict[str, dict[str, Any]] = {}
    for workload in WORKLOADS:
        chosen = blocks if workload == "modules" else max(3, round(blocks * options.blocks_share))
        rows[workload] = {
            "flatout": compare(workload, observed, device=device, blocks=chosen),
            "torch.profiler": compare(workload, profiled, device=device, blocks=max(3, chosen // 10)),
            "traceml": traceml(workload, device=device, rounds=rounds, num_steps=150),
            "whole": whole(workload, device=device),
        }
        if len(rows) == 1:
            print_head()
        print_row(workload, rows[workload])
    result = {"benchmark": "overhead", **environment(device), "workloads": rows}
    print(json.dumps(result))
    if options.save:
        hardware = re.sub(r"[^a-z0-9]+", "-", str(result["hardware"]).lower())
        date = datetime.date.today().isoformat()
        path = HERE / "results" / f"overhead_{hardware}_{date}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


def print_head() -> None:
    columns = ("flatout", "flatout CPU time", "torch.profiler", "traceml")
    heads = "".join(f"{name:>25}" for name in columns)
    print(f"{'workload':9}{'step':>10}{heads}{'whole':>20}", flush=True)


def print_row(workload: str, row: dict[str, Any]) -> None:
    found = [row["flatout"], row["flatout"].get("cpu_time"), row["torch.profiler"], row["traceml"]]
    cells = [f"{r['ratio']:.4f} [{r['low']:.3f}, {r['high']:.3f}]" if r else "n/a" for r in found]
    step_ms = row["flatout"]["step_s"] * 1e3
    spent = f"{row['whole']['beyond_s']:.1f} of {row['whole']['allowed_s']:.1f} s"
    figures = "".join(f"{cell:>25}" for cell in cells)
    print(f"{workload:9}{step_ms:7.2f} ms{figures}{spent:>20}", flush=True)


if __name__ == "__main__":
    main()
