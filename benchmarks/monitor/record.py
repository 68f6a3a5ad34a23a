"""Records how the cases look to the monitor: each script under `flatout watch --run`, its log, its verdicts.

    python benchmarks/monitor/record.py --output tests/data --prefix watch_h200_

The logs are what `tests/cli/test_watch_on_h200.py` replays where there is no GPU.  `idle` is the GPU with no
job on it; with one GPU in the machine, that test adds it as the second GPU of the healthy run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.monitor.past.history import line_of, read_tier
from flatout.monitor.sample import Sample
from flatout.monitor.sampler import Sampler
from flatout.monitor.verdicts.verdict import verdict

HERE = Path(__file__).parent
CASES = {"starved": 13.0, "healthy": 13.0, "small_kernels": 11.0, "leaking": 46.0}
EXPECTED = {"starved": "data", "healthy": "healthy", "small_kernels": "host", "leaking": "memory"}
IDLE_S = 7.0
LONGEST_START_S = 60.0


def record(case: str, *, seconds: float) -> tuple[list[Sample], dict[str, Any]]:
    """The run's samples, and what was said and how it ended."""
    script = HERE / "cases" / f"{case}.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flatout", "watch", "--run", "--name", case, "--log", folder]
        done = subprocess.run(
            [*command, str(script), "--seconds", str(seconds)],
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * seconds + LONGEST_START_S,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        samples = [sample for run in Path(folder).iterdir() for sample in read_tier(run, "raw")]
    said = done.stderr.strip().splitlines()
    return samples, {"exit_code": done.returncode, "said": said[-6:]}


def record_idle(*, seconds: float) -> list[Sample]:
    sampler = Sampler()
    with sampler:
        time.sleep(seconds)
    return list(sampler.recent())


def judged(samples: list[Sample]) -> list[dict[str, Any]]:
    """Every verdict of the run, with the second at which it was first given; the end of the job has none."""
    running = [sample for sample in samples if sample.job is not None and sample.job.state == "running"]
    found: list[dict[str, Any]] = []
    for number in range(1, len(running) + 1):
        given = verdict(running[:number])
        if not found or found[-1]["bound"] != given.bound:
            at_s = running[number - 1].time_s - running[0].time_s
            found.append({"at_s": round(at_s, 1), "bound": given.bound})
        found[-1] |= {"sentence": given.sentence, "evidence": list(given.evidence)}
    return found


def write(samples: list[Sample], path: Path) -> None:
    """As a log, without what names one machine."""
    anonymous = [replace(each, gpus=tuple(replace(gpu, uuid=None) for gpu in each.gpus)) for each in samples]
    path.write_bytes(b"".join(line_of(sample) for sample in anonymous))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--summary", type=Path, help="write every verdict here, and how each script ended")
    parser.add_argument("--prefix", default="watch_")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "idle"], default=["idle", *CASES])
    parser.add_argument("--scale", type=float, default=1.0, help="of the seconds of every case")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {}
    for case in options.cases:
        if case == "idle":
            samples = record_idle(seconds=IDLE_S * options.scale)
        else:
            samples, summary[case] = record(case, seconds=CASES[case] * options.scale)
            summary[case] |= {"expected": EXPECTED[case], "verdicts": judged(samples)}
        write(samples, options.output / f"{options.prefix}{case}.jsonl")
        last = summary.get(case, {}).get("verdicts", [])[-1:]
        shown = "; ".join(f"{each['bound']} from {each['at_s']} s: {each['sentence']}" for each in last)
        print(f"{case}: {len(samples)} samples; {shown}", flush=True)
    if options.summary is not None:
        options.summary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
