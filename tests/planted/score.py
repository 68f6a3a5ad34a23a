"""Score the doctor on jobs whose faults are known.

Every folder beside this file is one rule, or one of its faults (`costly_block__dataset`): `planted.py` has
that fault, `clean.py` does the same work without it.  Marks in the scripts say what is right:

    # guilty                 this line must be found, by the folder's rule
    # guilty: NAME           the same by another rule
    # guilty: NAME, largest  of several causes the one that costs most: the finding that must come first
    # guilty on cuda         the same, but only where the job computes on that kind of device
    # also: NAME, NAME       these rules may speak of this line too; `, largest` and `on cuda` may follow
    # decoy: NAME            popular advice that is wrong of this line, or of the whole script

Where a script has another cause that costs more than its planted one, as launches do beside a small copy,
`also` says so.  Two remedies of one wait, a line and its loader, are both the largest.  Everything else that
is said about a script is wrong.  The scripts of `decoys/` have no fault, or one whose remedy is another than
the usual one: each has at least one line that a hasty eye would blame.  Those of `several/` have two or
three faults.  Live runs use `flatout diagnose` on this machine; evidence recorded on another
(`<folder>/evidence/<script>_<device>.json.gz`) is replayed, so that rules which need a GPU are scored
without one.  A recording whose source lines differ from the script is stale, and an error.

    python tests/planted/score.py                        live runs and replays, exit code 1 on any fault
    python tests/planted/score.py --only sync_in_step    one rule
    python tests/planted/score.py --replay               replays alone
    python tests/planted/score.py --record tests/planted record the evidence of the live runs
    python tests/planted/score.py --planted my_package/planted   the scripts of another package's rules
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.doctor.examine import examine
from flatout.doctor.finding import Finding
from flatout.ground.codec import decode
from flatout.measure.evidence import Evidence, Place
from flatout.measure.evidence_file import decode_evidence, load_evidence, save_evidence

PLANTED = Path(__file__).resolve().parent
SCRIPTS = ("planted", "clean")
DECOYS, SEVERAL = "decoys", "several"  # folders of scripts that are no rule's pair
LIMIT_S = 180  # beyond the time that a diagnosis is given
TOGETHER = 2  # cases on as many cores
SECONDS = 30.0  # of one diagnosis; a quiet machine needs a third of it

_MARK = re.compile(
    r"#\s*(?:(?P<guilty>guilty)(?::\s*(?P<name>[a-z-]+))?(?P<largest>, largest)?|also:\s*(?P<also>[a-z, -]+?))"
    r"(?:\s+on\s+(?P<device>\w+))?\s*(?=#|$)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What a script says about one of its lines."""

    line: int
    rules: tuple[str, ...]
    required: bool
    device: str | None  # None: on any
    largest: bool = False  # of the required ones

    def holds_on(self, device: str) -> bool:
        return self.device in (None, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One script, run here or replayed from recorded evidence."""

    rule: str  # the folder's name: a rule, or one of its faults
    script: Path
    recording: Path | None = None

    @property
    def name(self) -> str:
        how = "live" if self.recording is None else self.recording.name.partition(".")[0].rpartition("_")[2]
        return f"{self.rule}/{self.script.stem} {how}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How one case went."""

    case: Case
    device: str | None = None
    expected: int = 0
    exact: int = 0
    allowed: int = 0
    inexact: tuple[str, ...] = ()  # the right rule at another line
    missed: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    first: str | None = None  # what was said first, where it is not the largest cause
    error: str | None = None

    @property
    def faults(self) -> tuple[str, ...]:
        return (
            *(f"missed {what}" for what in self.missed),
            *(f"inexact {what}" for what in self.inexact),
            *(f"wrong {what}" for what in self.wrong),
            *([f"error {self.error}"] if self.error else []),
        )


def kebab(folder: str) -> str:
    """The rule's name: `costly_block__dataset` plants costly-block."""
    return folder.partition("__")[0].replace("_", "-")


def cases(*, only: str | None = None, live: bool = True, planted: Path = PLANTED) -> list[Case]:
    """Every script of every rule's folder, live and as often as it was recorded."""
    found = []
    for folder in sorted(path.parent for path in planted.glob("*/planted.py")):
        if only is not None and only.replace("-", "_") not in (
            folder.name,
            kebab(folder.name).replace("-", "_"),
        ):
            continue
        for stem in SCRIPTS:
            found += _cases_of(folder / f"{stem}.py", live=live)
    for name in (DECOYS, SEVERAL):
        if only in (None, name):
            for script in sorted((planted / name).glob("*.py")):
                found += _cases_of(script, live=live)
    return found


def _cases_of(script: Path, *, live: bool) -> list[Case]:
    recordings = [
        path
        for path in sorted((script.parent / "evidence").glob(f"{script.stem}_*.json.gz"))
        if path.name.rpartition("_")[0] == script.stem
    ]
    given = [None, *recordings] if live else recordings
    return [Case(rule=script.parent.name, script=script, recording=recording) for recording in given]


def marks(source: str, *, rule: str) -> list[Mark]:
    """The marks of a script, by line."""
    found = []
    for number, text in enumerate(source.splitlines(), start=1):
        for mark in _MARK.finditer(text):
            required = mark["guilty"] is not None
            names = mark["name"] or kebab(rule) if required else mark["also"].strip()
            rules, largest = re.split(r"[,\s]+", names), mark["largest"] is not None
            if rules[-1] == "largest":
                largest = bool(rules.pop())
            found.append(
                Mark(
                    line=number,
                    rules=tuple(rules),
                    required=required,
                    device=mark["device"],
                    largest=largest,
                )
            )
    return found


def judge(case: Case, findings: Sequence[Finding], *, device: str) -> Score:
    """Compare findings with the marks of the script."""
    held = [mark for mark in marks(case.script.read_text(), rule=case.rule) if mark.holds_on(device)]
    required = {(mark.rules[0], mark.line) for mark in held if mark.required}
    allowed = {(rule, mark.line) for mark in held if not mark.required for rule in mark.rules}
    said = [
        (each.name, _line_in(case.script, each.place))
        for finding in findings
        for each in (finding, *finding.also)
    ]
    exact = {spoken for spoken in said if spoken in required}
    missing = required - exact
    inexact, wrong, fine = [], [], 0
    for name, line in said:
        if (name, line) in exact:
            if said.count((name, line)) > 1:
                wrong.append(f"{name} said twice of line {line}")
        elif (name, line) in allowed:
            fine += 1
        elif any(rule == name for rule, _line in missing):
            expected = next(spoken for spoken in sorted(missing) if spoken[0] == name)
            missing = missing - {expected}
            inexact.append(f"{name} at line {line}, planted at {expected[1]}")
        else:
            wrong.append(f"{name} at line {line}")
    return Score(
        case=case,
        device=device,
        expected=len(required),
        exact=len(exact),
        allowed=fine,
        inexact=tuple(inexact),
        missed=tuple(f"{rule} at line {line}" for rule, line in sorted(missing)),
        wrong=tuple(wrong),
        first=_said_first(held, said),
    )


def _said_first(held: Sequence[Mark], said: Sequence[tuple[str, int | None]]) -> str | None:
    """What was said first, where that is not the largest cause; None where there is nothing to find."""
    wanted = {(mark.rules[0], mark.line) for mark in largest(held)}
    if not wanted or (said and said[0] in wanted):
        return None
    return "nothing" if not said else f"{said[0][0]} at line {said[0][1]}"


def largest(held: Sequence[Mark]) -> list[Mark]:
    """The causes that may be said first; none where there is nothing to find."""
    required = [mark for mark in held if mark.required]
    return required and ([mark for mark in held if mark.largest] or required)


def _line_in(script: Path, place: Place | None) -> int | None:
    """The line of a place, None when it is none of this script's."""
    return place.line if place is not None and Path(place.file).name == script.name else None


def run(case: Case, *, record: Path | None = None) -> Score:
    """Diagnose one case and judge it."""
    try:
        if case.recording is not None:
            evidence = load_evidence(case.recording)
            _refuse_stale(case, evidence)
            findings: Sequence[Finding] = examine(evidence)
        else:
            evidence, findings = diagnose_live(case.script)
    except (CannotScore, subprocess.TimeoutExpired) as error:
        # What was not said is missed, whatever the reason.
        return dataclasses.replace(judge(case, [], device="unknown"), device=None, error=str(error))
    if record is not None and case.recording is None:
        name = f"{case.script.stem}_{slug(evidence)}.json.gz"
        save_evidence(evidence, record / case.rule / "evidence" / name)
    return judge(case, findings, device=evidence.job.device)


def slug(evidence: Evidence) -> str:
    """The device in a file's name: h200, cpu."""
    device = evidence.gpu.name if evidence.gpu is not None else evidence.job.device
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")


def run_together(cases: Sequence[Case], *, record: Path | None = None) -> Iterator[Future[Score]]:
    """Judge the cases; results in the order of the cases."""
    return together(cases, lambda case: run(case, record=record))


def together(cases: Sequence[Case], work: Callable[[Case], Any]) -> Iterator[Future[Any]]:
    """Do something with each case, two at a time where both leave the other a core."""
    cores = _Cores(TOGETHER)

    def work_on(case: Case) -> Any:
        with cores.taken(0 if case.recording else TOGETHER if _takes_all_cores(case) else 1):
            print(f"scoring {case.name}", file=sys.stderr, flush=True)
            return work(case)

    pool = ThreadPoolExecutor(TOGETHER)
    for case in cases:
        yield pool.submit(work_on, case)
    pool.shutdown(wait=False)


def _takes_all_cores(case: Case) -> bool:
    text = case.script.read_text()
    return "num_workers" in text or "set_num_threads" in text


class _Cores:
    """Cores that cases take, one or all of them."""

    def __init__(self, number: int) -> None:
        self._free, self._changed = number, threading.Condition()

    @contextlib.contextmanager
    def taken(self, number: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= number)
            self._free -= number
        try:
            yield
        finally:
            with self._changed:
                self._free += number
                self._changed.notify_all()


class CannotScore(Exception):
    """A case that gave no findings to judge."""


def diagnose_live(
    script: Path, *arguments: str, seconds: float = SECONDS, folder: Path | None = None
) -> tuple[Evidence, list[Finding]]:
    """What `flatout diagnose` says of a script on this machine, started in `folder` or a new one."""
    options, limit_s = ["--json", "--seconds", f"{seconds:g}"], seconds + LIMIT_S
    # One thread per process: with more, a shared machine decides which part of a job is slow.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryDirectory() as name:
        work, path = folder or Path(name), str(script)
        if folder is None:
            (work / script.name).write_text(script.read_text())
            path = script.name
        command = [sys.executable, "-m", "flatout", "diagnose", *options, path, *arguments]
        done = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    if done.returncode not in (0, 1):
        raise CannotScore(f"exit code {done.returncode}: {done.stderr.strip()[-400:]}")
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise CannotScore(f"no JSON on stdout: {done.stdout[-200:]!r}") from None
    findings = [decode(Finding, finding) for finding in document["findings"]]
    return decode_evidence(document["evidence"], name=script.name), findings


def _refuse_stale(case: Case, evidence: Evidence) -> None:
    lines = case.script.read_text().splitlines()
    for file, numbered in evidence.sources.items():
        if Path(file).name != case.script.name:
            continue
        for number, text in numbered.items():
            present = lines[int(number) - 1] if int(number) <= len(lines) else None
            if present is None or _code(present) != _code(text):
                raise CannotScore(
                    f"recorded from another text of the script (line {number}); record it again"
                )


def _code(line: str) -> str:
    """A line without its marks: they may be corrected after a recording."""
    return _MARK.sub("", line).removesuffix("# fmt: skip").rstrip()


def unproven(scores: Sequence[Score]) -> list[str]:
    """Guilty lines that no scored case was expected to find."""
    proven = {score.case.rule for score in scores if score.expected}
    return sorted({score.case.rule for score in scores} - proven - {DECOYS, SEVERAL})


def table(scores: Sequence[Score]) -> Iterator[str]:
    """The cases, then the sums over all of them."""
    width = max(len(score.case.name) for score in scores)
    for score in scores:
        verdict = "; ".join(score.faults) or ("found" if score.expected else "silent")
        verdict += f"; said first: {score.first}" if score.first else ""
        yield f"{score.case.name:<{width}}  {score.device or 'n/a':<5} {verdict}"
    yield ""
    for name, words in sums(scores).items():
        yield f"{name:<13}{words}"


def sums(scores: Sequence[Score]) -> dict[str, str]:
    """Precision, recall, exact lines and causes in their order, over all cases."""
    expected = sum(score.expected for score in scores)
    exact = sum(score.exact for score in scores)
    allowed = sum(score.allowed for score in scores)
    found = exact + sum(len(score.inexact) for score in scores)
    said = found + allowed + sum(len(score.wrong) for score in scores)
    decoys = [score for score in scores if score.case.rule == DECOYS]
    guilty = [score for score in scores if score.expected]
    clean = [score for score in scores if score.case.script.stem == "clean"]
    return {
        "precision": _ratio(found + allowed, said),
        "recall": _ratio(found, expected),
        "exact line": _ratio(exact, found),
        "top-1 cause": _ratio(sum(score.first is None for score in guilty), len(guilty)),
        "clean twins": _ratio(sum(not score.faults for score in clean), len(clean)),
        "decoys": _ratio(sum(not score.faults for score in decoys), len(decoys)),
    }


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:6.1%}  ({part} of {whole})" if whole else "n/a (0 of 0)"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Score the doctor on jobs whose faults are known.")
    parser.add_argument("--only", metavar="RULE", help="one rule, by its name or its folder")
    parser.add_argument("--replay", action="store_true", help="recorded evidence alone, no live runs")
    parser.add_argument("--record", metavar="FOLDER", type=Path, help="save the evidence of live runs there")
    parser.add_argument("--planted", metavar="FOLDER", type=Path, default=PLANTED, help="another package's")
    options = parser.parse_args(arguments)
    chosen = cases(only=options.only, live=not options.replay, planted=options.planted)
    if not chosen:
        print(f"nothing to score in {options.planted}", file=sys.stderr)
        return 2
    scores = [future.result() for future in list(run_together(chosen, record=options.record))]
    print("\n".join(table(scores)))
    for rule in unproven(scores):
        print(f"unproven    {kebab(rule)}: no case on a device where its line counts as guilty")
    return 1 if unproven(scores) or any(score.faults for score in scores) else 0


if __name__ == "__main__":
    sys.exit(main())
