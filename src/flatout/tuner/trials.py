"""Runs of the script, each in a process of its own.

A trial is one run of the script under some treatments, until enough steps were timed: running out of memory,
a crash or a hang costs only that trial.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from flatout.ground import OnProgress, ignore
from flatout.ground.codec import decode, encode
from flatout.ground.script.main import start_command
from flatout.measure.evidence import Evidence
from flatout.measure.run.lineage import adopt_orphans
from flatout.tuner.child import MODULE, ChildOptions, TrialOptions
from flatout.tuner.results.machine import Machine, machine_of
from flatout.tuner.treatment import Dose, all_treatments
from flatout.tuner.trial.fork_server import Forked, ForkServer, can_fork
from flatout.tuner.trial.journal import Journal
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trial.turns import TrialTurn, Turns

HANGS = 4.0  # a trial that takes this many times as long as the first one hangs
MOST_ERROR = 300
# Errors that a trial may have for its neighbours alone: they share a GPU, /dev/shm and the host's memory.
LACKS = ("OutOfMemoryError", "DataLoader worker", "shared memory", "Cannot allocate memory", "No space left")
QUEUED = 2  # batches that a worker has ready
SHORT_EPOCH = 4  # times as many steps as there are workers
AHEAD = "ahead"  # expects trials that are likely needed; under other labels they are needed
ENDS_S = 0.2  # between two looks at trials that are being ended

TrialRun = tuple[Sequence[Dose], dict[str, Any]]  # a trial: treatments, and fields of TrialOptions

Process = subprocess.Popen[bytes] | Forked

# Trials that run one after the other on one machine.
Unit = tuple[tuple[tuple[Dose, ...], dict[str, Any]], ...]


def pair_of(first: Sequence[Dose], second: Sequence[Dose], **changes: Any) -> Unit:
    """Return two runs that are compared by time; `changes` are fields of TrialOptions for the second."""
    return (tuple(first), {"timed": True}), (tuple(second), {"timed": True, **changes})


def asked_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes to TrialOptions that identify a trial: not the seconds, which time alone sets."""
    return {name: each for name, each in changes.items() if name != "seconds"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPlan:
    """How many steps a trial runs."""

    warmup: int = 5
    blocks: int = 8
    block_steps: int = 5
    limit_s: float = 600.0
    most_steps: int | None = None  # of the job, if it is known
    epoch_steps: int | None = None  # the same
    seen_steps: int = 0  # that the diagnosis saw: the job has as many, or more

    @property
    def num_steps(self) -> int:
        """Warm-up, blocks, and a last step to compare."""
        return self.warmup + self.blocks * self.block_steps + 1

    @property
    def most_block_steps(self) -> int:
        """The steps that every block may take in a job that is known to have so many."""
        return (self.seen_steps - self.warmup - 1) // self.blocks

    def past_queue(self, num_workers: int) -> TrialPlan:
        """Return a plan for a loader whose workers fill a queue before the first step.

        A trial shorter than the queue shows the pace of the steps, not that of the workers, who deliver in
        bursts.  Where epochs are short, the pause at the start of each belongs to the pace, too.
        """
        turn = self.epoch_steps or 0
        turn = turn if num_workers <= turn <= SHORT_EPOCH * num_workers else num_workers
        longer = replace(
            self,
            warmup=max(self.warmup, QUEUED * num_workers),
            block_steps=turn * math.ceil(self.block_steps / turn) if turn else self.block_steps,
        )
        longer = replace(longer, limit_s=self.limit_s * longer.num_steps / self.num_steps)
        fits = self.most_steps is None or longer.num_steps <= self.most_steps
        return longer if fits else self


def hint_of(run: TrialResult, plan: TrialPlan) -> str:
    """Say what to do about a job whose own runs cannot be judged."""
    if "EOFError" in (run.error or ""):
        return "trials read no input: give the script its answers as arguments or in a file"
    if run.ended in ("crashed", "killed"):
        return "try it without flatout: it must run for some dozens of steps"
    if not run.num_steps:
        return "it must train: no step of an optimizer was seen"
    if run.ended == "finished":
        return f"a trial runs {plan.num_steps} steps: give it more epochs or more data"
    return "flatout diagnose says more" if run.losses else "its steps must call backward on a loss"


class Trials:
    """Runs trials of one job, and leaves nothing of them behind."""

    child = MODULE  # the module whose main() a trial's process runs

    def __init__(
        self,
        command: Sequence[str],
        *,
        module: bool,
        plan: TrialPlan,
        on_progress: OnProgress = ignore,
        journal: Journal | None = None,
        ranks: int = 1,
    ) -> None:
        self.ranks = ranks  # processes that train together, each a run of the script
        self.command, self.module, self.plan, self.on_progress = tuple(command), module, plan, on_progress
        self.journal = journal
        self.num_run = 0
        self.ends_s = math.inf  # on the clock of `monotonic`: a trial that runs longer is ended
        self.always: dict[str, Any] = {}  # fields of TrialOptions for all trials
        self.at_once = 1  # trials that have room beside each other
        self.times_kernels = False  # in the first step of the job itself, and chooses by that
        self._started: set[Process] = set()  # and not ended yet
        self._may_fork = ranks == 1 and can_fork()
        self._forks = False  # whether a trial that was forked has succeeded
        self._server: ForkServer | None = None  # started once a plain start has shown that it changes nothing
        self._one_writes = threading.Lock()

    @functools.cached_property
    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="flatout-trials-"))

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_server()
        if "folder" in vars(self):
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, doses: Sequence[Dose], **changes: Any) -> TrialResult:
        """Run the script once; `changes` are fields of TrialOptions, and `timed` for a run of a pair."""
        return self._run_once((doses, changes))

    def run_pairs(self, pairs: Sequence[Unit]) -> list[tuple[TrialResult, TrialResult]]:
        """Run pairs that are compared by time, one run after the other on one machine.

        Where there is room for several, they start beside each other and take their steps in turn, unless
        their first step chooses kernels by timing them.
        """
        runs: list[TrialRun] = [run for pair in pairs for run in pair]
        found: list[TrialResult] = []
        timing = {each.name for each in all_treatments().values() if each.times_kernels}
        is_timing = self.times_kernels or any(dose.name in timing for doses, _ in runs for dose in doses)
        at_once = 1 if is_timing or self.ranks > 1 else self.at_once
        for begins in range(0, len(runs), at_once):
            found += self._run_in_turn(runs[begins : begins + at_once])
        return list(zip(found[::2], found[1::2], strict=True))

    def _run_in_turn(self, runs: Sequence[TrialRun]) -> list[TrialResult]:
        if len(runs) == 1:
            return [self._run_once(run) for run in runs]
        known = [self._find(run) for run in runs]
        left = [run for run, found in zip(runs, known, strict=True) if found is None]
        turns = Turns(len(left)).all()
        try:
            ran = iter(
                self._run_beside(
                    [functools.partial(self._run_once, *each) for each in zip(left, turns, strict=True)]
                )
            )
        finally:
            for turn in turns:
                turn.end()
        found = [next(ran) if each is None else each for each in known]
        return self._without_neighbours(runs, found)

    def _run_once(self, run: TrialRun, turn: TrialTurn | None = None) -> TrialResult:
        """Run a trial that may be known already; one with a turn is not."""
        doses, changes = run
        if turn is None and (known := self._find(run)) is not None:
            return known
        try:
            found = self._run(doses, **{**self.always, **changes}, turn=turn)
        finally:
            if turn is not None:
                turn.end()
        if self.journal is not None and (key := self._recorded_as(run)) is not None:
            with self._one_writes:
                self.journal.add(key, found)
        return found

    def _find(self, run: TrialRun) -> TrialResult | None:
        """Return a recorded result of such a trial, once."""
        if self.journal is None or (key := self._recorded_as(run)) is None:
            return None
        with self._one_writes:
            known = self.journal.find(key)
        return None if known is None else known[0]

    def _recorded_as(self, run: TrialRun) -> str | None:
        doses, changes = run
        if "first_step" in changes:  # it leaves a file, gone with the folder
            return None
        asked = asked_of({**self.always, **changes})
        return json.dumps(encode([list(doses), asked, self.plan]), sort_keys=True)

    def run_all(self, runs: Sequence[TrialRun]) -> list[TrialResult]:
        """Run trials whose numbers are compared but not their times, `at_once` of them beside each other."""
        if self.at_once == 1 or len(runs) == 1:
            return [self._run_once(run) for run in runs]
        takes_two = any(changes.get("double") for _, changes in runs)  # in memory
        found = self._run_beside(
            [functools.partial(self._run_once, run) for run in runs],
            num_at_once=max(1, self.at_once - takes_two),
        )
        return self._without_neighbours(runs, found)

    def _run_beside(
        self, calls: Sequence[Callable[[], TrialResult]], *, num_at_once: int | None = None
    ) -> list[TrialResult]:
        """Run trials in threads, which end with their processes if this one is interrupted."""
        pool = ThreadPoolExecutor(num_at_once or max(1, len(calls)))
        asked = [pool.submit(call) for call in calls]
        try:
            return [each.result() for each in asked]
        finally:  # after an interrupt, start nothing more and end what runs
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(each.done() for each in asked):
                for process in list(self._started):
                    _end_group(process)
                wait(asked, timeout=ENDS_S)

    def _without_neighbours(
        self, runs: Sequence[TrialRun], found: Sequence[TrialResult]
    ) -> list[TrialResult]:
        """Run those again, alone, that ran out of memory or the like beside others."""
        return [
            self._run_once(run) if any(lack in (result.error or "") for lack in LACKS) else result
            for run, result in zip(runs, found, strict=True)
        ]

    @property
    def slots(self) -> int:
        """How many trials run at once."""
        return 1

    def expect(self, label: str, units: Sequence[Unit]) -> None:
        """Take note of the trials that come next; a single machine runs nothing ahead."""

    def forget(self, label: str | None = None) -> None:
        """Take note that trials expected under a label, or all of them, are no longer needed."""

    def machine(self, evidence: Evidence) -> Machine:
        """Return the machine that the trials run on."""
        return machine_of(evidence)

    def _run(
        self, doses: Sequence[Dose], *, timed: bool = False, turn: TrialTurn | None = None, **changes: Any
    ) -> TrialResult:
        with self._one_writes:
            self.num_run += 1
            own = self.folder / str(self.num_run)
        own.mkdir()
        workers = [int(dose.value) for dose in doses if dose.name == "loader-workers"]
        plan = self.plan.past_queue(workers[-1]) if timed and workers else self.plan
        # The job's own runs are compared in numbers, too; and ranks, each with its clock, must end alike.
        may_grow = timed and bool(doses) and self.ranks == 1
        options = TrialOptions(
            result=str(own / "result.json"),
            scratch=str(own / "scratch"),
            warmup=plan.warmup,
            blocks=plan.blocks,
            block_steps=plan.block_steps,
            checked=(1, 2, plan.warmup) if may_grow else (1, 2, plan.warmup, plan.num_steps),
            most_block_steps=plan.most_block_steps if may_grow else 0,
            turn=turn.of_child if turn is not None else None,
        )
        installed, texts = _split(doses, own)
        child = ChildOptions(
            command=self.command,
            module=self.module,
            doses=installed,
            texts=texts,
            trial=replace(options, **changes),
            parent=os.getpid(),
        )
        limit_s = plan.limit_s + HANGS * float(changes.get("seconds", 0.0))
        return self._run_child(child, own, limit_s=limit_s, turn=turn)

    def _run_child(
        self, child: ChildOptions, own: Path, *, limit_s: float, turn: TrialTurn | None = None
    ) -> TrialResult:
        """Run a trial, forked where that works; where several have room, they start beside each other."""
        if turn is not None or self.at_once > 1:
            return self._run_processes(child, own, limit_s=limit_s, turn=turn)
        server = self._server
        found = self._run_processes(child, own, limit_s=limit_s, server=server)
        works = found.ended in ("measured", "finished")
        if server is None:  # a server ends with the thread that starts it
            in_main = threading.current_thread() is threading.main_thread()
            if self._may_fork and in_main and works and found.starts_plainly:
                self._server = ForkServer(self.child)
        elif works:
            self._forks = True
        elif not self._forks:  # is it the treatment that fails, or the fork?
            self._may_fork = False
            self._end_server()
            return self._run_processes(child, own, limit_s=limit_s)
        return found

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _run_processes(
        self,
        child: ChildOptions,
        own: Path,
        *,
        limit_s: float,
        turn: TrialTurn | None = None,
        server: ForkServer | None = None,
    ) -> TrialResult:
        adopt_orphans()
        started: list[Process] = []
        (own / "scratch").mkdir(parents=True, exist_ok=True)
        with open(own / "output", "wb") as output:
            try:
                if server is not None:
                    with contextlib.suppress(OSError):  # it was killed, say for memory
                        forked = replace(child, parent=server.wait_ready())
                        started.append(server.start(json.dumps(encode(forked)), output))
                        self._started.add(started[-1])
                for variables in () if started else launches(self.ranks):
                    options = _of_rank(child, len(started), own)
                    command = start_command(self.child, json.dumps(encode(options)))
                    plain = _start(command, output, variables, turn.of_child if turn else ())
                    started.append(plain)
                    self._started.add(plain)
                    if turn is not None:
                        turn.begin(plain, limit_s=self._limit_s(limit_s))
                process = started[0]  # it speaks for all
                process.wait(timeout=self._limit_s(limit_s))
                error = None
            except subprocess.TimeoutExpired as late:
                error = f"did not end within {late.timeout:.0f} s"
            finally:
                for each in started:
                    _end_group(each)
                    self._started.discard(each)
        shutil.rmtree(own / "scratch", ignore_errors=True)
        result = own / "result.json"
        if error is None and result.is_file():
            return decode(TrialResult, json.loads(result.read_text()))
        ended = f"ended with code {process.returncode}: {_last_line(own / 'output')}"
        return TrialResult(ended="killed", error=error or ended)

    def _limit_s(self, seconds: float) -> float:
        """Return how long a trial may still take."""
        return max(0.0, min(seconds, self.ends_s - time.monotonic()))


def launches(ranks: int) -> list[dict[str, str]]:
    """Return torchrun's variables for each of several processes on one machine; none for one alone."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _of_rank(child: ChildOptions, rank: int, own: Path) -> ChildOptions:
    """Give the first rank the trial's result file, and the others files of their own."""
    if rank == 0 or child.trial is None:
        return child
    first_step = child.trial.first_step and str(own / f"first_step.{rank}")
    trial = replace(child.trial, result=str(own / f"result.{rank}.json"), first_step=first_step)
    return replace(child, trial=trial)


def _start(
    command: list[str], output: IO[bytes], variables: dict[str, str], files: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        pass_fds=files,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={"PYTHONHASHSEED": "0", **os.environ, **variables},  # sets have the same order in every run
    )


def _split(doses: Sequence[Dose], folder: Path) -> tuple[tuple[Dose, ...], dict[str, str]]:
    """Return what the child installs, and the texts that replace the user's files, by file.

    The child is not told of patches: to look them up there would add the import of libcst to the job's start.
    """
    if all(dose.name in all_treatments() for dose in doses):
        return tuple(doses), {}
    from flatout.tuner.patches.patch import all_patches, write_texts

    return tuple(dose for dose in doses if dose.name not in all_patches()), write_texts(doses, folder)


def _end_group(process: Process) -> None:
    """End the script and the workers it leaves."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:MOST_ERROR] if lines else "it printed nothing"
