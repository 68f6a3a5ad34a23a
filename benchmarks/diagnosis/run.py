"""Are ceilings true?  Every planted fault's ceiling beside what mending it really gains.

    python benchmarks/diagnosis/run.py [--only RULE] [--save]   diagnose, mend, compare
    python benchmarks/diagnosis/run.py --record DIR             on a GPU: save evidence and real gains in DIR
    python benchmarks/diagnosis/run.py --replay DIR [--save]    read DIR with the present rules, anywhere

A ceiling is what `flatout diagnose` shows for the guilty line of a script of tests/planted.  The real gain is
the planted script's step over the mended one's: both run at once and take turns.  DIR holds
`<rule>/evidence/{planted,clean}_<device>.json.gz` as tests/planted does, `darkroom_<device>.json` and
`gains_<device>.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests" / "planted")]
import score  # noqa: E402
from fixes import DARKROOM, PLANTED, ROOT, darkroom_with_one_gather, digest, mended, needs_workers  # noqa: E402
from table import goals, ordered, print_table  # noqa: E402
from twins import Gain, Job, compare  # noqa: E402

from flatout.doctor.examine import examine  # noqa: E402
from flatout.doctor.finding import Finding  # noqa: E402
from flatout.doctor.sentences import is_of_the_job  # noqa: E402
from flatout.measure.evidence import Evidence  # noqa: E402
from flatout.measure.evidence_file import load_evidence, save_evidence  # noqa: E402

# What costs memory and no time has no ceiling.
WITHOUT_CEILING = (
    "dead_parameters",
    "graph_retained_across_steps",
    "loss_not_finite",
    "scheduler_steps_mismatch",
)
DARKROOM_SECONDS = 220.0  # a step of the full size takes twelve seconds
PARTS = ("planted", "clean", "darkroom")


# Recording


def record(folder: Path, rules: Sequence[str], options: argparse.Namespace) -> None:
    """Diagnose each planted script, then let it and its mended form take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    if "darkroom" in options.parts and options.only is None:
        _record_darkroom(folder)
    if "planted" in options.parts:
        _record_planted(folder, rules, options)
    if "clean" in options.parts:  # these are judged by their silence alone, so some run at once
        with ThreadPoolExecutor(options.together) as pool:
            list(pool.map(lambda rule: _record_clean(folder, rule, options), rules))


def _record_planted(folder: Path, rules: Sequence[str], options: argparse.Namespace) -> None:
    """Record one pair after the other; a pair takes its turns while the next diagnosis imports torch."""
    with ThreadPoolExecutor(1) as pool:
        turns: Future[None] | None = None
        for rule in rules:
            pair = Pair(rule)
            began_s = time.monotonic()
            try:
                evidence, findings = score.diagnose_live(
                    PLANTED / rule / "planted.py", seconds=options.seconds
                )
            except Exception as error:  # noqa: BLE001 - one pair that fails does not cost the others
                _say(f"{rule}: {error}")
                pair.end()
                continue
            finally:
                if turns is not None:
                    turns.result()
            save_evidence(evidence, _recording(folder, rule, "planted", score.slug(evidence)))
            _say(f"{rule}: {time.monotonic() - began_s:.0f} s")
            turns = pool.submit(_record_gain, folder, pair, evidence, workers_of(rule, findings, evidence))


def _record_gain(folder: Path, pair: Pair, evidence: Evidence, workers: int) -> None:
    try:
        if pair.rule not in WITHOUT_CEILING:
            gain = pair.gain(workers=workers)
            note_gain(folder, score.slug(evidence), pair.rule, gain)
            _say(f"{pair.rule}: mended {gain.gain:.2f} [{gain.low:.2f}, {gain.high:.2f}] times as fast")
    except Exception as error:  # noqa: BLE001
        _say(f"{pair.rule}: no gain: {error}")
    finally:
        pair.end()


def _record_clean(folder: Path, rule: str, options: argparse.Namespace) -> None:
    try:
        evidence, _findings = score.diagnose_live(PLANTED / rule / "clean.py", seconds=options.seconds)
        save_evidence(evidence, _recording(folder, rule, "clean", score.slug(evidence)))
        _say(f"{rule}: clean")
    except Exception as error:  # noqa: BLE001
        _say(f"{rule}: clean: {error}")


def _record_darkroom(folder: Path) -> None:
    """Diagnose it; one step of the slow one takes twelve seconds at full size, so one turn has to do."""
    began_s = time.monotonic()
    size = ("--size", "full" if torch.cuda.is_available() else "small")
    with tempfile.TemporaryDirectory() as name:
        limit_s = 2 * DARKROOM_SECONDS
        fast = Job(darkroom_with_one_gather(Path(name)), size, limit_s=limit_s)
        slow = Job(DARKROOM / "train.py", size, limit_s=limit_s)
        try:
            script = (DARKROOM / "train.py").relative_to(ROOT)
            evidence, _findings = score.diagnose_live(script, *size, seconds=DARKROOM_SECONDS, folder=ROOT)
            save_evidence(evidence, folder / f"darkroom_{score.slug(evidence)}.json")
            _say(f"darkroom: {time.monotonic() - began_s:.0f} s")
            gain = compare(slow, fast, turns=1)
            note_gain(folder, score.slug(evidence), "darkroom", gain)
            _say(f"darkroom: mended {gain.gain:.0f} times as fast; {time.monotonic() - began_s:.0f} s")
        except Exception as error:  # noqa: BLE001
            _say(f"darkroom: {error}")
        finally:
            slow.end()
            fast.end()


def note_gain(folder: Path, device: str, name: str, gain: Gain) -> None:
    path = folder / f"gains_{device}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    of = {} if name == "darkroom" else {"scripts": digest(name)}
    path.write_text(json.dumps({**known, name: asdict(gain) | of}, indent=1) + "\n")


def known_gains(path: Path) -> dict[str, Any]:
    """The gains of a file whose scripts are still the same."""
    gains = json.loads(path.read_text()) if path.exists() else {}
    return {
        name: gain
        for name, gain in gains.items()
        if name == "darkroom" or (name in rules_of(None) and gain["scripts"] == digest(name))
    }


class Pair:
    """A planted script and its mended form, started before they are needed: they wait at their first step."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self._folder = tempfile.TemporaryDirectory()
        self._work = Path(self._folder.name)
        self._slow: Job | None = None
        self._fast: Job | None = None
        if rule not in WITHOUT_CEILING:
            (self._work / "planted.py").write_text((PLANTED / rule / "planted.py").read_text())
            self._slow = Job(self._work / "planted.py")
            if not needs_workers(rule):
                self._fast = self._mended(2)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_unused: object) -> None:
        self.end()

    def end(self) -> None:
        for job in (self._slow, self._fast):
            if job is not None:
                job.end()
        self._folder.cleanup()

    def gain(self, *, workers: int) -> Gain:
        self._fast = self._fast or self._mended(workers)
        assert self._slow is not None
        return compare(self._slow, self._fast)

    def _mended(self, workers: int) -> Job:
        (self._work / "mended.py").write_text(mended(self.rule, workers=workers))
        return Job(self._work / "mended.py")


def workers_of(rule: str, findings: Sequence[Finding], evidence: Evidence) -> int:
    """The number of workers that the finding's arm ran with."""
    for finding in findings:
        if finding.name == score.kebab(rule) and finding.ceiling is not None:
            for found in evidence.counterfactuals:
                if found.label == finding.ceiling.arm and found.kind == "workers" and found.value:
                    return int(found.value)
    return 2


def _recording(folder: Path, rule: str, stem: str, device: str) -> Path:
    path = folder / rule / "evidence" / f"{stem}_{device}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# Reading


def read(folder: Path, gains_folder: Path | None = None) -> dict[str, Any]:
    """The table of one recorded folder, and how the doctor scores on it."""
    (gains_path,) = sorted((gains_folder or folder).glob("gains_*.json"))
    device = gains_path.stem.removeprefix("gains_")
    gains = known_gains(gains_path)
    rows, scores, hardware = [], [], device
    for rule in rules_of(None):
        path = folder / rule / "evidence" / f"planted_{device}.json.gz"
        if not path.exists():
            continue
        evidence = load_evidence(path)
        hardware = evidence.job.device_name or evidence.host.cpu_model or device
        if rule in gains and has_guilty_line(rule, evidence.job.device):
            rows.append(row_of(rule, evidence, gains[rule]))
        for stem in ("planted", "clean"):
            recording = folder / rule / "evidence" / f"{stem}_{device}.json.gz"
            if recording.exists():
                case = score.Case(rule=rule, script=PLANTED / rule / f"{stem}.py", recording=recording)
                scores.append(score.run(case))
    darkroom = folder / f"darkroom_{device}.json"
    if darkroom.exists() and "darkroom" in gains:
        rows.append(row_of("darkroom", load_evidence(darkroom), gains["darkroom"]))
    for judged in scores:
        for fault in judged.faults:
            _say(f"{judged.case.name}: {fault}")
    return {
        "benchmark": "diagnosis",
        "hardware": hardware,
        "device": device,
        "rows": ordered(rows),
        "goals": goals(rows),
        "score": score.sums(scores),
    }


def has_guilty_line(rule: str, device: str) -> bool:
    text = (PLANTED / rule / "planted.py").read_text()
    return any(mark.required and mark.holds_on(device) for mark in score.marks(text, rule=rule))


def row_of(rule: str, evidence: Evidence, gain: dict[str, Any]) -> dict[str, Any]:
    """One line of the table: the finding of the planted rule, or of darkroom the one worth most."""
    found = [finding for finding in examine(evidence) if rule == "darkroom" or _speaks_of(finding, rule)]
    best = max(found, key=lambda finding: finding.ceiling.speedup if finding.ceiling else 0.0, default=None)
    row: dict[str, Any] = {"name": rule.replace("__", ", ").replace("_", "-"), "real": gain["gain"]}
    row |= {"real_low": gain["low"], "real_high": gain["high"], "step_s": gain["slow_s"]}
    row |= {"found": best is not None, "ceiling": None, "arm": None, "of": None}
    if best is not None and best.ceiling is not None:
        ceiling = best.ceiling
        of_job = is_of_the_job(ceiling)
        row |= {"ceiling": ceiling.job_speedup if of_job else ceiling.speedup}
        row |= {"low": ceiling.speedup_low, "high": ceiling.speedup_high}
        row |= {"arm": ceiling.kind, "of": "job" if of_job else "step"}
    elif best is not None:
        row["reason"] = best.no_ceiling
    return row


def _speaks_of(finding: Finding, rule: str) -> bool:
    return score.kebab(rule) in (finding.name, *(other.name for other in finding.also))


def rules_of(only: str | None) -> list[str]:
    """The folders that are asked for, in that order, or all of them."""
    found = sorted(path.parent.name for path in PLANTED.glob("*/planted.py"))
    return found if only is None else [rule for rule in only.replace("-", "_").split(",") if rule in found]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def save(result: dict[str, Any]) -> None:
    """Write results/BENCHMARK-HARDWARE_DATE.json."""
    hardware = re.sub(r"[^a-z0-9]+", "-", str(result["hardware"]).lower()).strip("-")
    path = HERE / "results" / f"{result['benchmark']}-{hardware}_{datetime.date.today().isoformat()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="RULE,RULE", help="some folders of tests/planted")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one diagnosis (default: 60)")
    parser.add_argument("--record", metavar="DIR", type=Path, help="save evidence and real gains there")
    parser.add_argument("--replay", metavar="DIR", type=Path, help="read what was recorded there")
    parser.add_argument("--gains", metavar="DIR", type=Path, help="where gains_*.json lies (default: DIR)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to record")
    parser.add_argument("--together", type=int, default=1, help="clean twins diagnosed at once (default: 1)")
    parser.add_argument("--save", action="store_true", help="write results/diagnosis-HARDWARE_DATE.json")
    options = parser.parse_args()
    if options.replay is not None:
        result = read(options.replay, options.gains)
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = options.record or Path(name)
            record(folder, rules_of(options.only), options)
            if options.record is not None:
                return
            result = read(folder)
    print_table(result)
    print(json.dumps(result))
    if options.save:
        save(result)


if __name__ == "__main__":
    main()
