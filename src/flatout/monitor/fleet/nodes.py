"""The nodes of some sources, each with its last minute.

A source is a folder of runs that all nodes see, or the address of a page that a node serves.  A folder gives
one node for each host and rank: its latest run.  A node is silent when nothing new came from it for a while,
by the clock of this machine: those of others may be off.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.ground.errors import BadInput
from flatout.ground.runs import Run, list_runs, state_of
from flatout.monitor.fleet.logs import Log, PageLog
from flatout.monitor.past.history import HistoryTail
from flatout.monitor.sample import Sample, drop_older
from flatout.monitor.verdicts.verdict import WINDOW_S, verdict

SILENT_S = 15.0
LIST_EVERY_S = 5.0
JUDGE_EVERY_S = 5.0
MOST_AT_ONCE = 32  # pages asked at the same time: one that hangs must not hold up the others
HERE = socket.gethostname()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeState:
    """One line of the view: what is unknown is None."""

    node: str
    run: str | None
    state: str  # running, ended, died, silent
    silent_s: float | None  # since something came
    steps: int | None = None
    steps_per_s: float | None = None
    loss: float | None = None
    num_gpus: int = 0
    gpu_share: float | None = None  # mean of its GPUs, as are the others
    gpu_memory_share: float | None = None
    cpu_share: float | None = None
    bound: str | None = None
    problem: str | None = None  # why its page does not answer


class Node:
    """A run of one machine, followed."""

    def __init__(self, key: str, log: Log, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.key, self.log, self._clock = key, log, clock
        self._run: Run | None = None
        self._window: deque[Sample] = deque()
        self._heard_s: float | None = None
        self._judged_s = float("-inf")
        self._bound: str | None = None
        self._began = False

    @property
    def run(self) -> Run | None:
        return self.log.run if isinstance(self.log, PageLog) else self._run

    @run.setter
    def run(self, run: Run) -> None:
        self._run = run

    @property
    def name(self) -> str:
        host = None if self.run is None else self.run.host
        rank = None if self.run is None else self.run.rank
        host = host or (self.log.host if isinstance(self.log, PageLog) else self.key)
        return host if rank is None else f"{host} rank {rank}"

    def look(self) -> None:
        """Take in what came since."""
        samples = self.log.more() if self._began else self.log.recent()
        self._began = self._began or bool(samples)
        if not samples:
            return
        self._heard_s = self._clock()
        self._window.extend(samples)
        drop_older(self._window, WINDOW_S)
        if self._clock() - self._judged_s >= JUDGE_EVERY_S:
            self._judged_s = self._clock()
            self._bound = verdict(self._window).bound

    @property
    def state(self) -> NodeState:
        run = self.run
        silent_s = None if self._heard_s is None else self._clock() - self._heard_s
        page = self.log if isinstance(self.log, PageLog) else None
        is_unknown = run is None and page is not None and not page.has_answered
        name = None if is_unknown else "this machine" if run is None else run.name
        problem = None if page is None else page.problem
        latest = self._window[-1] if self._window else None
        if latest is None:
            state = self._state(silent_s)
            return NodeState(node=self.name, run=name, state=state, silent_s=silent_s, problem=problem)
        job = latest.job
        memory = [
            gpu.memory_used_bytes / gpu.memory_total_bytes
            for gpu in latest.gpus
            if gpu.memory_used_bytes is not None and gpu.memory_total_bytes
        ]
        return NodeState(
            node=self.name,
            run=name,
            state=self._state(silent_s),
            silent_s=silent_s,
            steps=None if job is None else job.steps,
            steps_per_s=None if job is None else job.steps_per_s,
            loss=None if job is None else job.loss,
            num_gpus=len(latest.gpus),
            gpu_share=_mean([gpu.utilisation_share for gpu in latest.gpus]),
            gpu_memory_share=_mean(memory),
            cpu_share=latest.host.cpu_share,
            bound=self._bound,
            problem=problem,
        )

    def _state(self, silent_s: float | None) -> str:
        run = self.run
        if run is not None and run.ended_s is not None:
            return "ended"
        if run is not None and run.host in (None, HERE) and not isinstance(self.log, PageLog):
            return state_of(run)
        return "running" if silent_s is not None and silent_s < SILENT_S else "silent"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class Fleet:
    """Every node of some sources; `look` asks them all."""

    def __init__(self, sources: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.sources = tuple(sources)
        self._clock = clock
        self._pages: dict[str, Node] = {}
        self._folders: list[Path] = []
        self._runs: dict[str, Node] = {}
        self._listed_s = float("-inf")
        for source in sources:
            if "://" in source:
                key = f"page {len(self._pages) + 1}"  # an address may hold a token, which a key would show
                self._pages[key] = Node(key, PageLog(source), clock=clock)
            elif Path(source).is_dir():
                self._folders.append(Path(source))
            else:
                raise BadInput(
                    f"there is no folder {source}", hint="name a folder of runs, or a page's address"
                )
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE) if self._pages else None

    @property
    def nodes(self) -> list[Node]:
        """All nodes, by name."""
        return sorted([*self._pages.values(), *self._runs.values()], key=lambda node: _natural(node.name))

    def look(self) -> list[NodeState]:
        """Ask every node once."""
        if self._clock() - self._listed_s >= LIST_EVERY_S:
            self._listed_s = self._clock()
            self._list()
        asked = [] if self._pool is None else [self._pool.submit(node.look) for node in self._pages.values()]
        for node in self._runs.values():
            node.look()
        for each in asked:
            each.result()
        return _tell_apart([(node.key, node.state) for node in self.nodes])

    def open_log(self, key: str) -> Log | None:
        """Open another reader of a node's log, from its beginning."""
        node = self._pages.get(key) or self._runs.get(key)
        return None if node is None else node.log.again()

    def _list(self) -> None:
        """Find the latest run of each host and rank."""
        found: dict[str, Node] = {}
        for root in self._folders:
            seen: set[tuple[str | None, int | None]] = set()
            with contextlib.suppress(OSError):
                for folder, run in list_runs(root, kind="watch"):  # the latest first
                    if (run.host, run.rank) in seen:
                        continue
                    seen.add((run.host, run.rank))
                    key = folder.name if folder.name not in found else str(folder)
                    if (node := self._runs.get(key)) is None:
                        node = Node(key, HistoryTail(folder), clock=self._clock)
                    found[key] = node
                    found[key].run = run
        self._runs = found


def _tell_apart(states: Sequence[tuple[str, NodeState]]) -> list[NodeState]:
    """Add the key to the names of nodes that two sources have alike, such as two jobs of one machine."""
    alike = Counter((state.node, state.run) for _, state in states)
    return [
        replace(state, node=f"{state.node} ({key})") if alike[state.node, state.run] > 1 else state
        for key, state in states
    ]


def _natural(name: str) -> list[Any]:
    """Sort node-2 before node-10."""
    digits = "".join(letter if letter.isdigit() else " " for letter in name).split()
    return ["".join(letter for letter in name if not letter.isdigit()), [int(each) for each in digits], name]
