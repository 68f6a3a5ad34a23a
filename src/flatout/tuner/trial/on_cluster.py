"""Trials as tasks on the nodes of a Ray cluster.

A tuning asks for one trial after the other, and each depends on the earlier answers.  It also knows what it
will most likely ask: the next treatments, on top of those kept so far.  These run ahead on other nodes, and
trials that turn out not to be needed are cancelled: the answers, and so the result, are those of one machine.

Trials that are compared by time run in one task on one node: both arms of a pair, or the blocks of one run.
Numbers are compared between nodes, so the nodes must be of one kind: the first to answer sets it, and others
get no task.

Every answer is written to the journal when it arrives.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.ground.codec import encode
from flatout.ground.script.command import ScriptCommand
from flatout.hardware.ray_cluster import RayCluster
from flatout.measure.evidence import Evidence
from flatout.tuner.results.machine import Machine, machine_of
from flatout.tuner.treatment import Dose
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trials import AHEAD, TrialPlan, TrialRun, Trials, Unit, asked_of

GRACE_S = 10.0  # for interrupted trials to clean up
QUEUED = 2  # trials given to Ray for each that it can run at once
LOOK_S = 10.0  # between two looks at a full cluster
THREADS = "OMP_NUM_THREADS"  # Ray sets it to a task's cores


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialsJob(ScriptCommand):
    """What a node must know to run trials."""

    plan: TrialPlan
    ranks: int
    threads: str | None  # OMP_NUM_THREADS as the command was given


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialsAnswer:
    """What a node found."""

    kind: str  # of machine
    results: tuple[TrialResult, ...]
    files: dict[str, bytes]  # path on the machine of the command -> content


@dataclass(kw_only=True, slots=True)
class _Task:
    key: str
    unit: Unit
    labels: set[str] = field(default_factory=set)  # it is expected under these; none: it is asked for


class ClusterTrials(Trials):
    """Runs trials of one job on a cluster."""

    def __init__(self, cluster: RayCluster, command: Sequence[str], **options: Any) -> None:
        super().__init__(command, **options)
        assert self.journal is not None
        self._cluster, self._journal = cluster, self.journal
        self._tasks: dict[Any, _Task] = {}  # given to Ray
        self._waiting: list[_Task] = []  # expected, for when nodes have room
        self._kind: str | None = None

    def __exit__(self, *error: object) -> None:
        for task in self._tasks:
            self._cluster.cancel(task, interrupt=True)
        if self._tasks:  # let them remove their folders
            self._cluster.wait(self._tasks, number=len(self._tasks), timeout_s=GRACE_S)
        self._tasks = {}
        super().__exit__(*error)

    def run(self, doses: Sequence[Dose], **changes: Any) -> TrialResult:
        """Run the script once, on some node."""
        return self._run_unit(((tuple(doses), changes),))[0]

    def run_pairs(self, pairs: Sequence[Unit]) -> list[tuple[TrialResult, TrialResult]]:
        """Run pairs, both runs of one on the same node, one after the other."""
        found = [self._run_unit(pair) for pair in pairs]
        return [(first, second) for first, second in found]

    def run_all(self, runs: Sequence[TrialRun]) -> list[TrialResult]:
        """Run trials whose numbers are compared, on as many nodes as there are."""
        self.expect("numbers", [((tuple(doses), changes),) for doses, changes in runs])
        return [self.run(doses, **changes) for doses, changes in runs]

    @property
    def slots(self) -> int:
        return max(1, self._cluster.slots())

    def expect(self, label: str, units: Sequence[Unit]) -> None:
        """Start trials that are neither running nor known yet, in this order, as far as nodes have room.

        They take the place of others expected under this label.
        """
        before = [*self._tasks.values(), *self._waiting]
        for task in before:
            task.labels.discard(label)
        num_known: Counter[str] = Counter()
        for unit in map(self._whole, units):
            key = self._key(unit)
            same = next((task for task in before if task.key == key and label not in task.labels), None)
            if same is not None:
                same.labels.add(label)
            elif num_known[key] < self._journal.count(key):
                num_known[key] += 1
            else:
                self._waiting.append(_Task(key=key, unit=unit, labels={label}))
        self._cancel_unlabelled()
        self._fill()

    def forget(self, label: str | None = None) -> None:
        """Cancel trials expected under this label alone, or all of them."""
        for task in (*self._tasks.values(), *self._waiting):
            task.labels = set() if label is None else task.labels - {label}
        self._cancel_unlabelled()

    def _cancel_unlabelled(self) -> None:
        self._waiting = [known for known in self._waiting if known.labels]
        for task, known in list(self._tasks.items()):
            if not known.labels:
                del self._tasks[task]
                self._cluster.cancel(task, interrupt=True)

    def _fill(self) -> None:
        """Give Ray the next trials.

        It runs tasks in the order in which it gets them: few may wait, since one that is asked for runs after
        them; but some must, since a cluster grows for them.
        """
        self._waiting.sort(key=lambda known: known.labels == {AHEAD})
        room = QUEUED * self.slots - len(self._tasks)
        for known in self._waiting[: max(0, room)]:
            self._start(known)
        del self._waiting[: max(0, room)]

    def machine(self, evidence: Evidence) -> Machine:
        _, found = self._cluster.result(self._cluster.submit(machine_of, evidence))
        return found  # type: ignore[no-any-return]

    def _whole(self, unit: Unit) -> Unit:
        return tuple((doses, {**self.always, **changes}) for doses, changes in unit)

    def _key(self, unit: Unit) -> str:
        runs = [[list(doses), asked_of(changes)] for doses, changes in unit]
        return json.dumps(encode([self.plan, runs]), sort_keys=True)

    def _run_unit(self, unit: Unit) -> tuple[TrialResult, ...]:
        unit = self._whole(unit)
        key = self._key(unit)
        leaves_file = any("first_step" in changes for _, changes in unit)
        while (known := self._journal.find(key)) is None:
            if all(task.key != key for task in self._tasks.values()):
                waiting = [known for known in self._waiting if known.key == key]
                self._waiting = [known for known in self._waiting if known not in waiting[:1]]
                self._start(waiting[0] if waiting else _Task(key=key, unit=unit))
            arrived = self._collect()
            if leaves_file and key in arrived:  # its file disappears with the folder, so it is not recorded
                return arrived[key]
        return known

    def _start(self, task: _Task) -> None:
        job = TrialsJob(
            command=self.command,
            module=self.module,
            plan=self.plan,
            ranks=self.ranks,
            threads=os.environ.get(THREADS),
        )
        self._tasks[self._cluster.submit(run_unit, job, task.unit)] = task

    def _collect(self) -> dict[str, tuple[TrialResult, ...]]:
        """Wait for an answer, and record every one that came."""
        self._fill()
        ended = self._cluster.wait(self._tasks, timeout_s=LOOK_S)
        if not ended and (lack := self._cluster.describe_lack()):
            self.on_progress(lack)
        arrived: dict[str, tuple[TrialResult, ...]] = {}
        for task in ended:
            known = self._tasks.pop(task)
            node, answer = self._cluster.result(task)
            self._kind = self._kind or answer.kind
            if answer.kind != self._kind:
                self.on_progress(f"a node is left out: it has {answer.kind}; others have {self._kind}")
                self._cluster.avoid(node)
                self._start(known)
                continue
            self.num_run += len(answer.results)
            for path, content in answer.files.items():
                Path(path).write_bytes(content)
            if answer.files or any("first_step" in changes for _, changes in known.unit):
                arrived[known.key] = answer.results
            else:
                self._journal.add(known.key, *answer.results, ahead=True)
        return arrived


def run_unit(job: TrialsJob, unit: Unit) -> TrialsAnswer:
    """Run trials on this process's node; keep only the files that were asked for."""
    if job.threads is None:
        os.environ.pop(THREADS, None)
    else:
        os.environ[THREADS] = job.threads
    results, files = [], {}
    with Trials(job.command, module=job.module, plan=job.plan, ranks=job.ranks) as trials:
        for doses, changes in unit:
            wanted = changes.get("first_step")
            here = trials.folder / "first_step.safetensors"
            given = changes if wanted is None else {**changes, "first_step": str(here)}
            results.append(trials.run(doses, **given))
            if wanted is not None and here.exists():
                files[wanted] = here.read_bytes()
                here.unlink()
    return TrialsAnswer(kind=describe_machine(), results=tuple(results), files=files)


def describe_machine() -> str:
    """Describe what numbers depend on, on this machine."""
    from flatout.ground.packages import installed_version
    from flatout.hardware.host import read_host
    from flatout.hardware.nvml import read_gpus

    host, gpus = read_host(), read_gpus().gpus
    gpu = gpus[0].name if gpus else "no GPU"
    return f"{gpu}, {host.cpu_model}, {host.cores} cores, torch {installed_version('torch')}"
