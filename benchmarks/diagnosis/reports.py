"""Faults that others reported, rebuilt: are they found at their line, and what does mending them gain?

    python benchmarks/diagnosis/reports.py [--only NAME] [--seconds 60] [--save]

Every script of reports/ is an ordinary training script with the fault of one public report; `--mended`
removes that fault and nothing else.  The script is diagnosed, then it and its mended form take turns.  Marks
in the script say which line is guilty, as in tests/planted; a script whose line is guilty on a GPU alone is
skipped elsewhere, by name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests" / "planted")]
import score  # noqa: E402
from twins import Job, compare  # noqa: E402

from flatout.doctor.finding import Finding  # noqa: E402
from flatout.doctor.sentences import is_of_the_job  # noqa: E402

# What each report says that mending gained; of the step where nothing else is said.
REPORTS = {
    "parameter_groups": "1.30 (-23 %)",
    "ema_empty_cache": "2 - 2.5",
    "host_sampling": "1.25, of tokens/s",
    "odd_vocabulary": "1.25",
    "scripted_gelu": '"massive"',
    "sixteen_workers": "2",
    "rl_update": "2.7 - 6.8",
    "float_ema": "10, of the update",
}


def study(name: str, *, device: str, seconds: float, turn_s: float) -> dict[str, Any]:
    """Diagnose one script, and measure what mending it gains."""
    script = HERE / "reports" / f"{name}.py"
    marks = [mark for mark in score.marks(script.read_text(), rule=name) if mark.required]
    if not any(mark.holds_on(device) for mark in marks):
        return {"skipped": "needs cuda"}
    jobs = [] if device == "cpu" else _jobs(script)  # with cores to spare they start during the diagnosis
    try:
        case = score.Case(rule=name, script=script)
        evidence, findings = score.diagnose_live(script, seconds=seconds)
        row = found_at(marks[0], findings)
        judged = score.judge(case, findings, device=evidence.job.device)
        row |= {"wrong": judged.wrong, "step_s": evidence.step_s}
        jobs = jobs or _jobs(script)
        gain = compare(*jobs, turns=5, turn_s=turn_s)
    finally:
        for job in jobs:
            job.end()
    return {**row, "real": gain.gain, "real_low": gain.low, "real_high": gain.high}


def _jobs(script: Path) -> list[Job]:
    return [Job(script), Job(script, ("--mended",))]


def found_at(mark: score.Mark, findings: Sequence[Finding]) -> dict[str, Any]:
    """Where the guilty rule spoke, else what was said of the guilty line, with the finding's ceiling."""
    row: dict[str, Any] = {"rule": mark.rules[0], "line": mark.line, "found": None, "as": None, "rank": None}
    row |= {"ceiling": None, "low": None, "high": None, "arm": None, "reason": None}
    spoken = [
        (said.name == mark.rules[0], said.place.line == mark.line, -rank, said, finding)
        for rank, finding in enumerate(findings, start=1)
        for said in (finding, *finding.also)
        if said.place is not None and (said.name == mark.rules[0] or said.place.line == mark.line)
    ]
    if not spoken:
        return row
    *_how, rank, said, finding = max(spoken, key=lambda each: each[:3])
    row |= {"found": said.place.line, "as": said.name, "rank": -rank, "reason": finding.no_ceiling}
    ceiling = finding.ceiling
    if ceiling is not None:
        of_job = is_of_the_job(ceiling)
        row |= {"ceiling": ceiling.job_speedup if of_job else ceiling.speedup, "arm": ceiling.kind}
        row |= {"low": ceiling.speedup_low, "high": ceiling.speedup_high}
    return row


def lines(result: dict[str, Any]) -> list[str]:
    """The table."""
    found = [
        f"{'report on ' + result['hardware']:40}{'reported':>18}  {'found':28}{'ceiling':>20}{'real':>20}"
    ]
    for name, row in result["reports"].items():
        start = f"{name + ': ' + row.get('rule', ''):40}{REPORTS[name]:>18}  "
        if "line" not in row:
            found.append(start + (row.get("skipped") or row["failed"]))
            continue
        where = "no"
        if row["found"] is not None:
            where = f"line {row['found']}" + (f", not {row['line']}" if row["found"] != row["line"] else "")
            where += f" as {row['as']}" if row["as"] != row["rule"] else ""
        ceiling = _interval(row["ceiling"], row["low"], row["high"])
        real = _interval(row["real"], row["real_low"], row["real_high"])
        found.append(f"{start}{where:28}{ceiling:>20}{real:>20}" + "".join(f"; {w}" for w in row["wrong"]))
    return found


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else "")


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=REPORTS, help="a script; may be repeated")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one diagnosis (default: 60)")
    parser.add_argument("--turn-seconds", type=float, default=0.4, help="of one turn (default: 0.4)")
    parser.add_argument("--save", action="store_true", help="write results/reports_HARDWARE_DATE.json")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    hardware = torch.cuda.get_device_name() if on_gpu else f"cpu-{os.cpu_count()}-cores"
    slug = "".join(c if c.isalnum() else "-" for c in hardware.lower())
    path = HERE / "results" / f"reports_{slug}_{datetime.date.today().isoformat()}.json"
    stamp = {"hardware": hardware, "torch": str(torch.__version__), "python": platform.python_version()}
    result: dict[str, Any] = {"benchmark": "reports", **stamp, "seconds": options.seconds, "reports": {}}
    for name in REPORTS:
        if options.only is not None and name not in options.only:
            continue
        began_s = time.monotonic()
        try:
            row = study(
                name,
                device="cuda" if on_gpu else "cpu",
                seconds=options.seconds,
                turn_s=options.turn_seconds,
            )
        except Exception as error:  # noqa: BLE001 - one script that fails does not cost the others
            row = {"failed": f"failed: {str(error)[-300:]}"}
        result["reports"][name] = {**row, "took_s": time.monotonic() - began_s}
        print(f"{name}: {result['reports'][name]['took_s']:.0f} s", file=sys.stderr, flush=True)
        if options.save:  # after each: a run that is ended early keeps what it has
            path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    print("\n".join(lines(result)))


if __name__ == "__main__":
    main()
