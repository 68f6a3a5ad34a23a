"""What a viewer has chosen to see, and what each key does to it.

A view is a value: a key makes another one of it.  So keys are tested without a terminal, and the help lists
what the table below holds and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.monitor.sample import ProcessSample, Sample

# What processes are sorted by -> the figure, most first.
SORTS: dict[str, Callable[[ProcessSample], Any]] = {
    "GPU memory": lambda process: process.gpu_memory_bytes,
    "SM": lambda process: process.sm_share,
    "CPU": lambda process: process.cpu_cores,
    "RAM": lambda process: process.memory_bytes,
    "pid": lambda process: -process.pid,
}
ON_GPU = ("GPU memory", "SM")  # columns that a machine without one does not have
KEYS = (
    ("q", "quit"),
    ("s", "sort processes by the next column"),
    ("tab, arrows", "show the next or previous GPU"),
    ("p", "hide or show processes"),
    ("space", "pause the display, or continue it"),
    ("?", "this help"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What the viewer chose."""

    gpu: int = 0  # the position of the GPU that is looked at, not its number
    sort: str = next(iter(SORTS))
    shows_processes: bool = True
    shows_help: bool = False
    is_held: bool = False
    is_over: bool = False

    def sorted_by(self, num_gpus: int) -> str:
        """Return the chosen column, or the first that exists."""
        sorts = sorts_of(num_gpus)
        return self.sort if self.sort in sorts else sorts[0]

    def pressed(self, key: str, *, num_gpus: int) -> View:
        """Return the view after a key; an unknown key changes nothing."""
        if self.shows_help and key in ("?", "escape", "q"):
            return replace(self, shows_help=False)
        match key:
            case "q" | "Q" | "interrupt":
                return replace(self, is_over=True)
            case "s" | "S":
                sorts = sorts_of(num_gpus)
                place = sorts.index(self.sorted_by(num_gpus))
                return replace(self, sort=sorts[(place + 1) % len(sorts)])
            case "next" | "previous":
                step = 1 if key == "next" else -1
                return replace(self, gpu=(self.gpu + step) % num_gpus if num_gpus else 0)
            case "p" | "P":
                return replace(self, shows_processes=not self.shows_processes)
            case "space":
                return replace(self, is_held=not self.is_held)
            case "?" | "h":
                return replace(self, shows_help=not self.shows_help)
        return self


def sorts_of(num_gpus: int) -> list[str]:
    return [name for name in SORTS if num_gpus or name not in ON_GPU]


def sorted_processes(sample: Sample, sort: str) -> Sequence[ProcessSample]:
    """Sort the largest first and unknown values last; of equals, the job's own come first."""
    figure = SORTS[sort]

    def place(process: ProcessSample) -> tuple[bool, Any, bool, int]:
        value = figure(process)
        return value is None, -(value or 0), not process.of_job, process.pid

    return sorted(sample.processes, key=place)
