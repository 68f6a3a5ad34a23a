"""Where a run happens: its folder, and what a run leaves there.

`--out` names the folder.  Without it a run gets `.flatout/runs/<time>-<verb>-<name>-<process>`, and
`--resume` goes on with the latest run of the verb.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from flatout.ground import OnProgress, runs
from flatout.ground.errors import BadInput, MissingExtra
from flatout.ground.torchrun import Launch, read_launch

FINISHED = "finished"  # how a run ends without an error
MARK = ".meeting-"  # prefix of the files that show whether nodes share a folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a run; each engine adds its own fields."""

    out: str  # the run folder


def choose_folder(out: str | Path | None, *, kind: str, name: str, resume: bool = False) -> Path:
    """Choose the folder of a run of the verb `kind`: as given, the latest to resume, or a free name."""
    if out is not None:
        return Path(out)
    launch = read_launch()
    if resume:
        found = [path for path, run in runs.list_runs(kind=kind) if _may_resume(run, launch)]
        if found:
            return found[0]
        if not launch.restarts:  # a job that crashed before it had a folder starts over
            raise BadInput(
                f"{runs.runs_folder()} has no run of flatout {kind} to resume", hint="name it with --out"
            )
    run = _this_run(kind, name)
    folders = (runs.runs_folder() / runs.folder_name(run, number) for number in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())


def find_begun(out: str | Path | None, *, kind: str) -> Path | None:
    """Return the unfinished run of this same job, identified by its launcher.

    torchrun restarts the ranks silently when a node joins.
    """
    job = read_launch().job
    if job is None:
        return None
    known = runs.list_runs(kind=kind) if out is None else _read_at(Path(out))
    return next((path for path, run in known if run.launcher == job and run.end != FINISHED), None)


def check_empty(folder: Path, *, besides: Collection[str] = ()) -> None:
    """Raise BadInput if a new run would find foreign files, or a file in the place of a folder."""
    if file := next((path for path in (folder, *folder.parents) if path.is_file()), None):
        raise BadInput(f"{folder} cannot be a folder: {file} is a file", hint="choose another --out")
    foreign = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [
        name for name in foreign if name not in {runs.RUN_FILE, *besides} and not name.startswith(MARK)
    ]
    if foreign:
        raise BadInput(
            f"{folder} is not empty: it holds {foreign[0]}",
            hint="continue with --resume, or choose another --out",
        )


def record_run(folder: Path, *, kind: str, name: str) -> AbstractContextManager[None]:
    """Keep run.json of a run up to date while the block runs: `report` and `watch --list` read it."""
    return runs.recorded_run(folder, _this_run(kind, name))


def draw_if_possible(draw: Callable[[], Path], *, on_progress: OnProgress) -> str | None:
    """Return the path of a run's picture; without matplotlib, say what is missing and return None."""
    try:
        return str(draw())
    except MissingExtra as error:
        on_progress(f"no plot: {error}")
        return None


def _this_run(kind: str, name: str) -> runs.Run:
    return runs.this_run(f"{kind}-{name}", time_s=time.time(), kind=kind)


def _may_resume(run: runs.Run, launch: Launch) -> bool:
    """Return whether this process may continue a run; one that torchrun restarted continues only its own."""
    return not launch.restarts or run.launcher == runs.launcher_of(launch)


def _read_at(folder: Path) -> tuple[tuple[Path, runs.Run], ...]:
    return ((folder, runs.read_run(folder)),) if (folder / runs.RUN_FILE).is_file() else ()
