"""What it costs to watch a job: step time with a monitor over step time without, and the monitor's own cost.

    python benchmarks/monitor/run.py [--rounds 10] [--block 5] [--peers DIR…] [--quick] [--save]

See README.md for the arms and the method.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "overhead")]
from alone import run_alone  # noqa: E402
from arms import Arm, arms  # noqa: E402
from interleaved import ratio  # noqa: E402
from load import measure_load, measure_silent  # noqa: E402
from week import write_week  # noqa: E402
from workloads import WORKLOADS, Step, environment  # noqa: E402

PARTS = ("steps", "traceml", "alone", "load", "week")
WARM_UP_STEPS = 10


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
    workload: str, found: dict[str, Arm], *, device: str, rounds: int, block_s: float, limit_s: float
) -> dict[str, Any]:
    """Rounds of all arms; those that `limit_s` leaves time for, and two in any case."""
    torch.manual_seed(0)
    step = WORKLOADS[workload](device)()
    wall: dict[str, list[float]] = {name: [] for name in found}
    cpu: dict[str, list[float]] = {name: [] for name in found}
    names = list(found)
    start = time.perf_counter()
    for number in range(rounds):
        if number >= 2 and time.perf_counter() - start > limit_s:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            wall_s, cpu_s = time_block(step, found[name], block_s=block_s, device=device)
            wall[name].append(wall_s)
            cpu[name].append(cpu_s)
    result: dict[str, Any] = {"step_s": statistics.median(wall["off"])}
    for name in names[1:]:
        result[name] = ratio(wall[name], wall["off"])
        if device == "cpu":
            result[name]["cpu_time"] = ratio(cpu[name], cpu["off"])
    return result


def traceml(workload: str, *, device: str, rounds: int) -> dict[str, Any] | None:
    """As in benchmarks/overhead: TraceML cannot be switched off inside a process."""
    spec = importlib.util.spec_from_file_location("overhead_run", HERE.parent / "overhead" / "run.py")
    assert spec is not None and spec.loader is not None
    overhead = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(overhead)
    found: dict[str, Any] | None = overhead.traceml(workload, device=device, rounds=rounds, num_steps=150)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--arms", nargs="+", help="beside off; default: all that can run here")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["encoder", "loader"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds of rounds of one workload")
    parser.add_argument("--block", type=float, default=5.0, help="seconds of a block (default: 5)")
    parser.add_argument("--silent", type=float, default=20.0, help="seconds of browsers that never read")
    parser.add_argument("--days", type=float, default=7.0, help="of the simulated week (default: 7)")
    parser.add_argument(
        "--alone", type=float, default=20.0, help="seconds a monitor runs alone (default: 20)"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    parser.add_argument("--peers", nargs="*", default=[], help="folders in which peers are installed")
    parser.add_argument("--note", help="what else is to be known of this run, such as a loaded machine")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs")
    parser.add_argument("--save", action="store_true", help="write results/monitor_HARDWARE_DATE.json")
    parser.add_argument("--output", type=Path, help="write the result to this file as well")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.block, options.days, options.alone = 2, 0.5, 0.02, 2.0
        options.silent = 5.0
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    sys.path += options.peers  # behind what is installed here
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), *options.peers]).strip(":")
    found, absent = arms(options.device)
    if options.arms is not None:
        found = {name: arm for name, arm in found.items() if name in ("off", *options.arms)}
    if importlib.util.find_spec("traceml_ai") is None:
        absent["traceml"] = "No module named 'traceml_ai'"
    print(f"arms: {', '.join(found)}", *(f"; no {name}: {why}" for name, why in absent.items()), flush=True)
    result: dict[str, Any] = {"benchmark": "monitor", **environment(options.device), "note": options.note}
    result |= {"workloads": {}, "absent": absent}
    for part in options.parts:
        PART_OF[part](options, found, result)
        if options.output is not None:  # after every part: what follows may be cut off
            options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    if options.save:
        hardware = re.sub(r"[^a-z0-9]+", "-", str(result["hardware"]).lower())
        path = HERE / "results" / f"monitor_{hardware}_{date.today().isoformat()}.json"
        path.parent.mkdir(exist_ok=True)
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(joined(before, result), indent=1) + "\n", encoding="utf-8")


def joined(before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Parts that ran this time, beside those that ran before."""
    rows = {
        workload: {**before.get("workloads", {}).get(workload, {}), **result["workloads"].get(workload, {})}
        for workload in {**before.get("workloads", {}), **result["workloads"]}
    }
    return {**before, **result, "workloads": rows}


def steps_part(options: argparse.Namespace, found: dict[str, Arm], result: dict[str, Any]) -> None:
    for workload in options.workloads:
        row = compare(
            workload,
            found,
            device=options.device,
            rounds=options.rounds,
            block_s=options.block,
            limit_s=options.limit,
        )
        result["workloads"][workload] = row
        print(f"{workload}: a step takes {row['step_s'] * 1e3:.2f} ms", flush=True)
        for name in list(found)[1:]:
            cpu = row[name].get("cpu_time")
            print(
                f"  {name:>10}  {_shown(row[name])}{f'; CPU time {_shown(cpu)}' if cpu else ''}", flush=True
            )


def traceml_part(options: argparse.Namespace, found: dict[str, Arm], result: dict[str, Any]) -> None:
    if "traceml" in result["absent"]:
        return
    for workload in options.workloads:
        row = traceml(workload, device=options.device, rounds=min(options.rounds, 5))
        result["workloads"].setdefault(workload, {})["traceml"] = row
        print(f"{workload}: {'traceml':>10}  {'no figure' if row is None else _shown(row)}", flush=True)


def alone_part(options: argparse.Namespace, found: dict[str, Arm], result: dict[str, Any]) -> None:
    """Ours at both rates, peers at theirs."""
    chosen = [("flatout", 1.0), ("flatout", 10.0)]
    chosen += [(name, 1.0) for name in ("nvitop", "codecarbon") if name in found]
    result["alone"] = {}
    for name, hz in chosen:
        figures = run_alone(name, hz=hz, seconds=options.alone)
        result["alone"][f"{name} {hz:g} Hz"] = figures
        if figures is not None:
            print(
                f"alone, {name} at {hz:g} Hz: {figures['cpu_share_of_a_core']:.2%} of a core, "
                f"{figures['rss_bytes'] / 1e6:.0f} MB, first sample after {figures['first_sample_s']:.2f} s",
                flush=True,
            )


def load_part(options: argparse.Namespace, found: dict[str, Arm], result: dict[str, Any]) -> None:
    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        result["absent"]["load"] = "the extra web is not installed"
        return
    step = WORKLOADS["encoder"](options.device)()
    block_s = max(options.block, 2.0)
    load = measure_load(step, device=options.device, rounds=options.rounds, block_s=block_s)
    result["load"] = load
    print(
        f"{load['browsers']} browsers: step {_shown(load['browsers over watched'])} of a watched job's; "
        f"a sample every {load['median_gap_s']:.2f} s, at the longest {load['longest_gap_s']:.2f} s",
        flush=True,
    )
    if not options.silent:
        return
    load["silent"] = silent = measure_silent(step, device=options.device, seconds=options.silent)
    print(
        f"{silent['silent_browsers']} browsers that never read: the server grew by "
        f"{silent['grown_bytes_with_silent'] / 1e6:.1f} MB in {silent['seconds']:g} s; "
        f"with one that reads by {silent['grown_bytes_with_a_reader'] / 1e6:.1f} MB",
        flush=True,
    )


def week_part(options: argparse.Namespace, found: dict[str, Arm], result: dict[str, Any]) -> None:
    week = write_week(days=options.days)
    result["week"] = week
    print(
        f"{week['days']:g} days of {week['gpus']} GPUs: {week['disk_bytes'] / 1e6:.1f} MB on disk", flush=True
    )


def _shown(found: dict[str, Any]) -> str:
    return f"{found['ratio']:.4f} [{found['low']:.4f}, {found['high']:.4f}]"


PART_OF = {
    "steps": steps_part,
    "traceml": traceml_part,
    "alone": alone_part,
    "load": load_part,
    "week": week_part,
}

if __name__ == "__main__":
    main()
