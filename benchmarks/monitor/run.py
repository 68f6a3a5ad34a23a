"""What it costs to watch a job: step time with a monitor over step time without, and the monitor's own cost.

    python benchmarks/monitor/run.py [--device auto] [--rounds 10] [--block 5] [--days 7] [--quick] [--save]

See README.md for the arms and the method.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "overhead")]
from arms import Arm, arms  # noqa: E402
from interleaved import ratio  # noqa: E402
from week import write_week  # noqa: E402
from workloads import WORKLOADS, Step, environment  # noqa: E402

CHOSEN = ("encoder", "loader")
WARM_UP_STEPS = 10

ALONE = """
import json, sys, time
start = time.perf_counter()
from flatout.monitor.sampler import Sampler
import psutil
sampler = Sampler(hz=float(sys.argv[1]))
sampler.take()
first_s = time.perf_counter() - start
process = psutil.Process()
before = process.cpu_times()
began = time.perf_counter()
with sampler:
    time.sleep(float(sys.argv[2]))
after = process.cpu_times()
used_s = after.user + after.system - before.user - before.system
print(json.dumps({
    "first_sample_s": first_s,
    "cpu_share_of_a_core": used_s / (time.perf_counter() - began),
    "rss_bytes": process.memory_info().rss,
    "gpus": len(sampler.latest.gpus),
}))
"""


def time_block(step: Step, arm: Arm, *, block_s: float, device: str) -> tuple[float, float]:
    """Mean step seconds of one block by the clock and in CPU time."""
    with arm(step) as watched:
        for _ in range(WARM_UP_STEPS):
            watched()
        _wait(device)
        num, start, start_cpu = 0, time.perf_counter(), time.process_time()
        while num < 3 or time.perf_counter() - start < block_s:
            watched()
            num += 1
        _wait(device)
        return (time.perf_counter() - start) / num, (time.process_time() - start_cpu) / num


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compare(
    workload: str, found: dict[str, Arm], *, device: str, rounds: int, block_s: float
) -> dict[str, Any]:
    torch.manual_seed(0)
    step = WORKLOADS[workload](device)()
    wall: dict[str, list[float]] = {name: [] for name in found}
    cpu: dict[str, list[float]] = {name: [] for name in found}
    names = list(found)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            wall_s, cpu_s = time_block(step, found[name], block_s=block_s, device=device)
            wall[name].append(wall_s)
            cpu[name].append(cpu_s)
    result: dict[str, Any] = {"step_s": sorted(wall["off"])[rounds // 2]}
    for name in names[1:]:
        result[name] = ratio(wall[name], wall["off"])
        if device == "cpu":
            result[name]["cpu_time"] = ratio(cpu[name], cpu["off"])
    return result


def alone(*, hz: float, seconds: float) -> dict[str, Any]:
    """The monitor in a process that does nothing else."""
    command = [sys.executable, "-c", ALONE, str(hz), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the monitor failed: {done.stderr}")
    return dict(json.loads(done.stdout))


def traceml(workload: str, *, device: str, rounds: int) -> dict[str, Any] | None:
    """As in benchmarks/overhead: TraceML cannot be switched off inside a process."""
    spec = importlib.util.spec_from_file_location("overhead_run", HERE.parent / "overhead" / "run.py")
    assert spec is not None and spec.loader is not None
    overhead = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(overhead)
    found: dict[str, Any] | None = overhead.traceml(workload, device=device, rounds=rounds, num_steps=150)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--block", type=float, default=5.0, help="seconds of a block (default: 5)")
    parser.add_argument("--days", type=float, default=7.0, help="of the simulated week (default: 7)")
    parser.add_argument(
        "--alone", type=float, default=20.0, help="seconds the monitor runs alone (default: 20)"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs")
    parser.add_argument("--save", action="store_true", help="write results/monitor_HARDWARE_DATE.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if options.quick:
        options.rounds, options.block, options.days, options.alone = 2, 0.5, 0.02, 2.0
    found, absent = arms()
    print(f"arms: {', '.join(found)}; not installed: {', '.join(absent) or 'none'}", flush=True)
    rows: dict[str, Any] = {}
    for workload in CHOSEN:
        rows[workload] = compare(workload, found, device=device, rounds=options.rounds, block_s=options.block)
        if "traceml-ai" not in absent:
            rows[workload]["traceml"] = traceml(workload, device=device, rounds=2 if options.quick else 5)
        print_row(workload, rows[workload])
    monitor = {f"{hz:g} Hz": alone(hz=hz, seconds=options.alone) for hz in (1.0, 10.0)}
    for name, figures in monitor.items():
        print(
            f"alone at {name}: {figures['cpu_share_of_a_core']:.2%} of a core, "
            f"{figures['rss_bytes'] / 1e6:.0f} MB, first sample after {figures['first_sample_s']:.2f} s, "
            f"{figures['gpus']} GPUs",
            flush=True,
        )
    week = write_week(days=options.days)
    print(f"{week['days']:g} days of {week['gpus']} GPUs: {week['disk_bytes'] / 1e6:.1f} MB on disk")
    result = {
        "benchmark": "monitor",
        **environment(device),
        "workloads": rows,
        "alone": monitor,
        "week": week,
        "absent": absent,
    }
    print(json.dumps(result))
    if options.save:
        hardware = re.sub(r"[^a-z0-9]+", "-", str(result["hardware"]).lower())
        path = HERE / "results" / f"monitor_{hardware}_{datetime.date.today().isoformat()}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def print_row(workload: str, row: dict[str, Any]) -> None:
    print(f"{workload}: a step takes {row['step_s'] * 1e3:.2f} ms", flush=True)
    for name, found in row.items():
        if isinstance(found, dict):
            cpu = found.get("cpu_time")
            shown = f"; CPU time {cpu['ratio']:.4f} [{cpu['low']:.3f}, {cpu['high']:.3f}]" if cpu else ""
            print(f"  {name:>10}  {found['ratio']:.4f} [{found['low']:.3f}, {found['high']:.3f}]{shown}")


if __name__ == "__main__":
    main()
