"""Start the job in a child process, and leave nothing of it behind.

The child shares the terminal: the script's own output and input pass through.  Orphans of the job (its
workers, if it dies hard) become children of this process and end with it; a mark in their environment
identifies them, so nobody else's processes are touched.  If this process is killed, the job ends with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flatout.ground import OnProgress
from flatout.ground.codec import encode
from flatout.ground.errors import BadInput, FlatoutError, Interrupted, NothingMeasured, ScriptFailed
from flatout.ground.interrupts import Interrupts, Terminated
from flatout.ground.runs import home_folder, make_folder
from flatout.ground.script.command import check_command
from flatout.ground.script.main import start_command
from flatout.ground.torchrun import read_launch
from flatout.measure.evidence import Evidence
from flatout.measure.evidence_file import load_evidence, save_evidence
from flatout.measure.run.child import MODULE
from flatout.measure.run.lineage import (
    ARM_FAILED,
    DUE,
    END,
    FAILED_ARM,
    FAILED_UNDER,
    LEAST_SET_UP_S,
    NOT_WRITTEN,
    OVERDUE_S,
    UNFINISHED,
    adopt_orphans,
)
from flatout.measure.run.ranks import agreement
from flatout.measure.run.ranks.exchange import Exchange
from flatout.measure.run.ranks.other_trainers import UNWATCHED, WATCH_THEM

GRACE_S, AGAIN_S = 25.0, 2.5
MARK = "FLATOUT_JOB"
SCRATCH = "FLATOUT_SCRATCH"  # names the folder for a script's writes, if they are to be discarded
SCRIPTS_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
MOST_RETRIES = 3
ITS_WORDS = "its last output is above"
MORE_TIME = "try a larger --seconds, or run less of it"
LOOK_S = 1.0  # between looks at whether the job is late
NEWS_S = 10.0  # for a job that should have said more


def default_evidence_path(command: Sequence[str]) -> Path:
    stem = Path(command[0]).name.removesuffix(".py") if command else "job"  # a module has dots of its own
    when = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return home_folder() / f"{stem}-{when}.json"


@contextlib.contextmanager
def writes_thrown_away() -> Iterator[None]:
    """Keep the writes of jobs started meanwhile, here or by torchrun, out of the user's folders."""
    with tempfile.TemporaryDirectory(prefix="flatout-scratch-") as folder:
        os.environ[SCRATCH] = folder
        try:
            yield
        finally:
            del os.environ[SCRATCH]


def run_job(
    command: Sequence[str],
    *,
    module: bool,
    keep_running: bool,
    evidence_path: Path,
    seconds: float,
    script_stdout_to_stderr: bool,
    on_progress: OnProgress,
) -> Evidence:
    """Run the job under observation; its evidence is at `evidence_path` when this returns or raises."""
    check_command(command, module=module)
    evidence_path = evidence_path.absolute()  # the script may change its working directory
    _check_writable(evidence_path)
    options = {
        "command": list(command),
        "module": module,
        "folder": os.getcwd(),
        "keep_running": keep_running,
        "seconds": seconds,
        "skipped": {},
        "failed_at": {},
        "parent": os.getpid(),
        "scratch": os.environ.get(SCRATCH),
    }
    distributed = read_launch().num_ranks > 1
    exchange = Exchange(evidence_path)
    own_path = exchange.begin() if distributed else evidence_path
    options["evidence_path"] = str(own_path)
    before = _stamp(own_path)
    end = _run_within(options, script_stdout_to_stderr, on_progress, distributed=distributed)
    evidence = _read(own_path, before, end, command[0])
    if end.interrupted and end.code == ARM_FAILED:  # the interrupt met a job that an arm had just ended
        evidence = dataclasses.replace(evidence, job=dataclasses.replace(evidence.job, ended="interrupted"))
        save_evidence(evidence, own_path)
    if end.killed and evidence.job.ended == "crashed":
        evidence = _of_killed(evidence)
        save_evidence(evidence, own_path)
    if distributed and read_launch().is_first:
        evidence = exchange.gather(evidence)
        save_evidence(evidence, evidence_path)
        exchange.clear()
    elif distributed:
        exchange.publish(evidence)
        exchange.leave(own_path)
    _check_ending(evidence, end, evidence_path, command[0])
    return evidence


def _run_within(
    options: dict[str, Any], to_stderr: bool, on_progress: OnProgress, *, distributed: bool
) -> _End:
    """Run the job, and again without an arm under which it failed, if the time allows another run.

    What was measured before the failure is saved.  Ranks must act alike, so they run again in any case.
    """
    deadline_s = time.monotonic() + options["seconds"]
    for _attempt in range(1 + MOST_RETRIES):
        options["began_s"] = began_s = time.monotonic()
        end = _run_child(options, to_stderr, on_progress)
        now_s = time.monotonic()
        if end.interrupted or end.code != ARM_FAILED or end.failed_arm is None:
            return end
        if not distributed and deadline_s - now_s < now_s - began_s:
            break
        label, how, num_steps = end.failed_arm
        on_progress(f"{label}: {FAILED_UNDER}{how}; measuring again without it")
        options["skipped"][label] = FAILED_UNDER + how
        options["failed_at"][label] = num_steps
        if not distributed:
            options["seconds"] = deadline_s - now_s
        agreement.begin_another_attempt()
    return dataclasses.replace(end, code=0)


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise BadInput(f"{path} is a folder", hint=f"name a file in it: {path / 'evidence.json'}")
    try:
        make_folder(path.parent)
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.write(b"0")
    except OSError as error:
        raise BadInput(
            f"{path.parent} cannot be written: {error.strerror}",
            hint="free some space; flatout diagnose --save FILE names another place",
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """How the observed process ended."""

    code: int
    interrupted: bool
    killed: bool = False  # because it did not end in time
    failed_arm: tuple[str, str, int] | None = None  # its label, how the job failed under it, after which step


def _run_child(options: dict[str, Any], to_stderr: bool, on_progress: OnProgress) -> _End:
    mark = uuid.uuid4().hex
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    adopt_orphans()
    set_up_s = max(options["seconds"], LEAST_SET_UP_S) + OVERDUE_S
    told = _Told(due_s=None if options["keep_running"] else time.monotonic() + set_up_s)
    with Interrupts(hold=True) as interrupts:
        try:
            process = subprocess.Popen(
                start_command(MODULE, json.dumps(encode({**options, "progress_fd": writer}))),
                stdout=sys.stderr.fileno() if to_stderr else None,
                close_fds=False,  # a shell may have opened files for the script
                env={**os.environ, MARK: mark},
            )
            os.close(writer)
            thread = threading.Thread(target=_follow, args=(reader, on_progress, told), daemon=True)
            thread.start()
            with _passed_on(process):
                end = _wait(process, interrupts, told)
        finally:
            interrupts.hold()
            _end_leftovers(mark)
        thread.join(timeout=1.0)
        if interrupts.take():  # while leftovers were ended
            end = dataclasses.replace(end, interrupted=True)
    if end.code == NOT_WRITTEN:
        raise FlatoutError(f"the evidence could not be written: {'; '.join(told.errors)}", hint="--save FILE")
    return dataclasses.replace(end, failed_arm=told.failed_arm)


@dataclass(slots=True)
class _Told:
    """What the observed process reported in addition to its progress."""

    errors: list[str] = field(default_factory=list)
    failed_arm: tuple[str, str, int] | None = None
    due_s: float | None = None  # when to expect the job's end or more news, on the monotonic clock
    has_begun: bool = False  # a step was seen


def _follow(reader: int, on_progress: OnProgress, told: _Told) -> None:
    with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            text = line.rstrip("\n")
            if text.startswith("error: "):
                told.errors.append(text.removeprefix("error: "))
            elif text.startswith(FAILED_ARM):
                label, how, num_steps = json.loads(text.removeprefix(FAILED_ARM))
                told.failed_arm = (label, how, num_steps)
            elif text.startswith(DUE):
                told.due_s = time.monotonic() + float(text.removeprefix(DUE))
            else:
                told.has_begun = True
                on_progress(text)


def _wait(process: subprocess.Popen[bytes], interrupts: Interrupts, told: _Told) -> _End:
    """Wait for the job; Ctrl-C and SIGTERM reach it, and it gets time to save what it knows."""
    try:
        interrupts.release()
        killed = not _ends_in_time(process, told)
        return _End(code=process.wait(), interrupted=False, killed=killed)
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, Terminated):
            process.send_signal(END)
        elif not _terminal_signals_group():
            process.send_signal(signal.SIGINT)
    try:
        code = _wait_for_end(process, told)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        code = process.wait()
    return _End(code=code, interrupted=True)


def _ends_in_time(process: subprocess.Popen[bytes], told: _Told) -> bool:
    """Wait for the job, and kill it if it neither ends nor says that it will.

    A job ends itself when its time is up, unless native code keeps the interpreter's lock.
    """
    num_late = 0
    while num_late <= NEWS_S / LOOK_S:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=LOOK_S)
            return True
        is_late = told.due_s is not None and time.monotonic() >= told.due_s
        num_late = num_late + 1 if is_late else 0
    process.kill()
    return False


def _wait_for_end(process: subprocess.Popen[bytes], told: _Told) -> int:
    """Wait for a job that was interrupted.

    An interrupt can get lost while modules are imported: torch carries on when numpy raises anything.  Before
    the first step a second interrupt does no harm.
    """
    for _ in range(round(GRACE_S / AGAIN_S)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=AGAIN_S)
        if not told.has_begun:
            process.send_signal(signal.SIGINT)
    raise subprocess.TimeoutExpired(process.args, GRACE_S)


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward signals that only scripts use: a scheduler knows the number of this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pass_on = lambda number, _frame: process.send_signal(number)  # noqa: E731
    before = {number: signal.signal(number, pass_on) for number in SCRIPTS_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminal_signals_group() -> bool:
    """Return whether a Ctrl-C on this terminal reached the job too: it signals the whole group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _end_leftovers(mark: str) -> None:
    """End what the job left running, and nothing else."""
    left = [process for process in psutil.Process().children(recursive=True) if _is_marked(process, mark)]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _gone, alive = psutil.wait_procs(left, timeout=3.0)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=3.0)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a stamp that changes with every write: a file of an earlier run is not this job's evidence."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_ino, facts.st_mtime_ns


def _read(path: Path, before: tuple[int, int] | None, end: _End, name: str) -> Evidence:
    if _stamp(path) not in (None, before):
        return load_evidence(path)
    if end.interrupted:
        raise Interrupted("interrupted before any step was measured")
    if end.killed:
        raise NothingMeasured(f"{name}: the time was up before a step was measured", hint=MORE_TIME)
    raise ScriptFailed(
        f"{name} {_how_it_ended(end)} before any step was measured", hint=_with_cause(end, ITS_WORDS)
    )


def _of_killed(evidence: Evidence) -> Evidence:
    """Return the evidence that a job had saved when it was killed, because its time was up."""
    if evidence.job.exit_code is not None and not evidence.steps:
        return evidence  # it failed by itself, and was only slow to end
    job = dataclasses.replace(evidence.job, ended="measured", exit_code=0, error=None)
    reason = f"{UNFINISHED}: native code had not returned when the time was up (--seconds)"
    missing = [each for each in evidence.missing if not each.startswith("the job ended")]
    return dataclasses.replace(evidence, job=job, missing=(*missing, reason))


def _how_it_ended(end: _End) -> str:
    if end.code < 0:
        return f"was ended by {signal.Signals(-end.code).name}"
    return f"ended with exit code {end.code}"


def _with_cause(end: _End, hint: str) -> str:
    """Add to a hint what may have ended a job that could say nothing."""
    is_killed = end.code < 0 and signal.Signals(-end.code).name == "SIGKILL"
    return f"{hint}; the kernel sends SIGKILL when memory runs out" if is_killed else hint


def _check_ending(evidence: Evidence, end: _End, path: Path, name: str) -> None:
    job, num = evidence.job, len(evidence.steps)
    when = f"after {num} measured steps" if num else "before any step was measured"
    kept = f"evidence so far: {path}"
    if job.ended == "interrupted" or (end.interrupted and job.ended != "measured"):
        raise Interrupted(f"interrupted {when}", hint=kept)
    if job.ended == "crashed":
        what = _how_it_ended(end) if end.code else f"raised {job.error}"
        raise ScriptFailed(f"{name} {what} {when}", hint=_with_cause(end, kept if num else ITS_WORDS))
    if not num and job.exit_code:
        words = f": {job.error}" if job.error else ""
        raise ScriptFailed(f"{name} ended with exit code {job.exit_code} {when}{words}", hint=ITS_WORDS)
    if num:
        return
    unfinished, unwatched = (
        next((reason for reason in evidence.missing if reason.startswith(begins)), None)
        for begins in (UNFINISHED, UNWATCHED)
    )
    what = f"{name} ended without a training step"
    if unfinished is not None:
        what = f"{name}: the time was up before a step was measured"
    if unwatched is not None:
        raise NothingMeasured(f"{what}; {unwatched}", hint=WATCH_THEM)
    if unfinished is not None:
        raise NothingMeasured(f"{what}; {unfinished}", hint=MORE_TIME)
    hint = "no optimizer, backward or repeated model call was seen; flatout.step() can mark steps"
    raise NothingMeasured(what, hint=hint)
