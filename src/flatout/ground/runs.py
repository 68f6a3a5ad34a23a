"""The folder of runs, `.flatout/runs/<name>`, for every verb that keeps its results.

.flatout/.gitignore                          keeps the folder out of the user's repository
.flatout/runs/20261115-143002-train-4711/
    run.json                                 which run it is: written at its start, and again at its end
    ...                                      what the verb itself writes: a log, checkpoints, a report

A run that died silently still has a run.json: its process is gone and no end is written.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import json
import os
import re
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

import psutil

from flatout.ground.atomic_files import FULL, replace_whole, unwritable
from flatout.ground.documents import DocumentKind, decode_document
from flatout.ground.errors import BadInput, Interrupted
from flatout.ground.torchrun import Launch, read_launch

RUN = DocumentKind(format="flatout-run", version=1, what="a run", hint="flatout watch --list shows the runs")
VARIABLE_OF_RUNS = "FLATOUT_RUNS"
HOME = ".flatout"
RUN_FILE = "run.json"
CHANNEL_FILE = "job.channel"  # of a watched run: what the job reports at present
LAST_WORDS = ".last"  # SIGTERM.last: empty, until that ends the script
HEARD = ("SIGTERM", "SIGHUP")
CRASH = "crash"  # crash.last begins with a line that names it
UNHEARD = "a signal that left no record, such as SIGKILL, which the kernel sends when memory runs out"
LONGEST_NAME = 40
LONGEST_END = 300
LARGEST_RUN_FILE = 4 * 2**20  # a command line has at most 2 MiB
HIGHEST_PID = 2**31 - 1
BOOT = Path("/proc/sys/kernel/random/boot_id")
STARTED_FIELD = 19  # of /proc/PID/stat after the name, which may hold anything
LATEST_S = 32_503_680_000.0  # the year 3000
CLOCK_SET_S = 2.0  # between two clocks, where one was set

PRIVATE = 0o700  # only the owner may read a run
REDACTED = "***"
# A name with a whole word for a secret: --api-key, HF_TOKEN, trainer.password, but not --max-tokens.
_SECRET_NAME = (
    r"(?:[\w.-]*[-_.])?(?:api[-_]?keys?|key|token|secret|password|passwd|passphrase|pass|pwd?|credentials?"
    r"|auth|bearer)"
)
_SECRET_OPTION = re.compile(rf"-{{1,2}}{_SECRET_NAME}", re.IGNORECASE)
# -p is often a password (-p 8080 is a port); beside a user so is what is glued to it: mysql -u me -pX.
_PASSWORD, _NUMBER = "-p", re.compile(r"[-+]?[\d._]+(?:e[-+]?\d+)?", re.IGNORECASE)
_USER_OPTION = re.compile(r"(?<!\S)(?:-u|--user(?:name)?[= ]) ?(?!-|\S*\.py\b)\S")  # not python -u train.py
_SECRET_VALUE = rf"""((?<![\w.-]){_SECRET_NAME}["']?\s*[=:]\s*["']?)[^\s"'&,;}}]+"""
# The forms in which Hugging Face, OpenAI, GitHub, AWS, Slack and JSON web tokens come.
_TOKENS = (
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[a-z]_\w{16,}|github_pat_\w{16,}|AKIA\w{16}|xox[a-z]-[\w-]{10,}"
    r"|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"
)
_SECRETS = (
    (re.compile(r"(://[^\s/@:]*:)[^\s/@]+(?=@)"), rf"\1{REDACTED}"),  # a password in an address
    (re.compile(r"(https?://)[^\s/@:]+(?=@)", re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(r"(\bBearer )\S+", re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(_SECRET_VALUE, re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(_TOKENS), REDACTED),
)

RunState = Literal["running", "ended", "died"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run: its process, its verb, and how it ended."""

    name: str
    pid: int
    process_started_s: float | None  # tells the process from a later one with the same number, if no key does
    started_s: float
    command: tuple[str, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES; None: it is not set
    ended_s: float | None = None
    kind: str = "watch"  # the verb: watch, evolve, adapt, steer
    launcher: int | str | None = None  # the launcher's name for the job, or its process: one for all restarts
    exit_code: int | None = None  # of a watched script, if it is known
    host: str | None = None  # the machine; its processes are known there alone
    process_key: str | None = None  # the same by the kernel's own count, which no change of the clock moves
    boot_age_s: float | None = None  # of the machine when the run began: a clock that nobody sets
    end: str | None = None  # finished, interrupted, the error or signal; None: it is running, or did not say


def runs_folder() -> Path:
    """Return where runs are kept: $FLATOUT_RUNS, or .flatout/runs of the working folder."""
    chosen = os.environ.get(VARIABLE_OF_RUNS)
    return Path(chosen) if chosen else home_folder() / "runs"


def home_folder() -> Path:
    """Return Flatout's folder: .flatout in the working folder, or a temporary one if that is read-only.

    Others can write among temporary files too: raise BadInput if the folder is not the user's alone.
    """
    if os.access(Path.cwd(), os.W_OK):
        return Path.cwd() / HOME
    folder = Path(tempfile.gettempdir()) / f"flatout-{os.geteuid()}"
    with contextlib.suppress(OSError):  # it is there, or nothing can be written at all
        folder.mkdir(mode=PRIVATE)
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_own or stat.S_IMODE(found.st_mode) & ~PRIVATE:
            raise BadInput(
                f"{folder} is not a folder that only you can open",
                hint=f"set {VARIABLE_OF_RUNS} to a folder that you own",
            )
    return folder


def make_folder(folder: Path) -> None:
    """Make a folder with its parents; a `.flatout` that is made on the way is ignored by git."""
    folder.mkdir(parents=True, exist_ok=True)
    for parent in (folder, *folder.parents):
        ignored = parent / ".gitignore"
        if parent.name == HOME and not ignored.exists():
            ignored.write_text("*\n", encoding="utf-8")


def this_run(name: str | None = None, *, time_s: float, kind: str = "watch") -> Run:
    """Describe the run of this process."""
    command = tuple(getattr(sys, "orig_argv", sys.argv))
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    launch = read_launch()
    return Run(
        name=name or script.lstrip("-") or "job",
        pid=os.getpid(),
        process_started_s=process_started_s(os.getpid()),
        process_key=process_key(os.getpid()),
        started_s=time_s,
        command=command,
        rank=launch.rank if launch.is_launched else None,
        world_size=launch.num_ranks if launch.is_launched else None,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        kind=kind,
        launcher=launcher_of(launch),
        host=socket.gethostname(),
        boot_age_s=boot_age_s(),
    )


def launcher_of(launch: Launch) -> int | str | None:
    """Return the launcher's id of the job, which stays the same when the job restarts."""
    return (launch.job or os.getppid()) if launch.is_launched else None


def create_run(run: Run, root: Path | None = None) -> Path:
    """Make a folder with a unique name and write run.json; raise OSError if that fails."""
    try:
        root = root or runs_folder()
    except BadInput as error:
        raise PermissionError(errno.EACCES, error.message) from None
    make_folder(root)
    for number in itertools.count(1):  # a process may begin two runs in one second
        folder = root / folder_name(run, number)
        try:
            folder.mkdir(mode=PRIVATE)
        except FileExistsError:
            continue
        break
    try:
        write_run(folder, run)
    except OSError:  # a full disk
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
    return folder


def folder_name(run: Run, number: int = 1) -> str:
    """Name a run's folder: when it started, what it is called, and its process."""
    started = datetime.datetime.fromtimestamp(run.started_s).strftime("%Y%m%d-%H%M%S")
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", run.name).strip("-.")[:LONGEST_NAME] or "job"
    return f"{started}-{plain}-{run.pid}" + ("" if number == 1 else f"-{number}")


@contextlib.contextmanager
def recorded_run(folder: Path, run: Run) -> Iterator[None]:
    """Keep run.json of a folder while the block runs, and write how it ended; one run at a time."""
    if (folder / RUN_FILE).is_file():
        before = read_run(folder)
        if before.pid != run.pid and state_of(before) == "running":
            raise BadInput(f"another run writes {folder}", hint="wait for it, or choose another folder")
    is_new = not folder.exists()
    try:
        make_folder(folder)
        if is_new:
            folder.chmod(PRIVATE)
        write_run(folder, run)
    except OSError as error:  # a file of this name, a folder that is not ours, a full disk
        raise unwritable(str(folder), error) from error
    end = "finished"
    try:
        yield
    except (KeyboardInterrupt, Interrupted):
        end = "interrupted"
        raise
    except BaseException as error:
        end = str(error) or type(error).__name__
        raise
    finally:
        with contextlib.suppress(OSError):  # a full disk has its own error on the way
            write_run(folder, replace(run, ended_s=time_of(run, time.time()), end=end))


def write_run(folder: Path, run: Run) -> None:
    """Write run.json, without secrets; raise OSError if that fails.

    On a full disk, overwrite the file in place if the new one fits: a run must not seem to have
    died because its end could not be kept.
    """
    kept = replace(run, command=redact(run.command), end=None if run.end is None else redact_text(run.end))
    document = {"format": RUN.format, "version": RUN.version, **asdict(kept)}
    path, content = folder / RUN_FILE, (json.dumps(document, indent=1) + "\n").encode()
    try:
        replace_whole(path, content)
    except OSError as error:
        if error.errno not in FULL or not path.is_file():
            raise
        with path.open("r+b", buffering=0) as file:
            if len(content) > os.fstat(file.fileno()).st_blocks * 512:
                raise
            file.write(content)
            file.truncate()


def redact(command: Sequence[str]) -> tuple[str, ...]:
    """Replace the secrets of a command line: values of options such as --api-key, passwords in addresses."""
    has_user = _USER_OPTION.search(" ".join(command)) is not None
    found: list[str] = []
    before = ""
    for word in command:
        is_named = _SECRET_OPTION.fullmatch(before) is not None and not word.startswith("--")
        is_password = before == _PASSWORD and not word.startswith("-") and not _NUMBER.fullmatch(word)
        glued = word.removeprefix(_PASSWORD)
        if is_named or is_password:
            found.append(REDACTED)
        elif has_user and glued not in ("", word) and not _NUMBER.fullmatch(glued):
            found.append(f"{_PASSWORD}{REDACTED}")
        else:
            found.append(redact_text(word))
        before = word
    return tuple(found)


def redact_text(text: str) -> str:
    """Replace what looks like a secret within a text."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def end_run(folder: Path, *, time_s: float, end: str | None = None, exit_code: int | None = None) -> None:
    run = read_run(folder)
    write_run(folder, replace(run, ended_s=time_of(run, time_s), end=end, exit_code=exit_code))


def time_of(run: Run, now_s: float) -> float:
    """Return the present time by the clock as it was set when the run began.

    A clock that is set meanwhile makes a run neither longer nor shorter.
    """
    age_s = boot_age_s()
    if age_s is None or run.boot_age_s is None or run.process_key is None:
        return now_s
    if run.process_key.partition(" ")[0] != _boot():
        return now_s
    by_age_s = run.started_s + age_s - run.boot_age_s
    return by_age_s if abs(by_age_s - now_s) > CLOCK_SET_S else now_s


def end_of(error: BaseException | None) -> tuple[str, int]:
    """Return how a script ended that raised `error`, or nothing, and its exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or error.code == 0:
            return "finished", 0
        return (f"exit code {error.code}", error.code) if isinstance(error.code, int) else (_line(error), 1)
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return "interrupted", Interrupted.exit_code
    if error is None:
        return "finished", 0
    return f"{type(error).__name__}: {_line(error)}".rstrip(": "), 1


def _line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if len(words) <= LONGEST_END else f"{words[:LONGEST_END]}…"


def show_state(run: Run) -> str:
    """Describe the state of a run: running, interrupted, finished, or died or failed and why.

    A run whose end is not known has just ended.
    """
    state = state_of(run)
    if state == "running" or run.end is None:
        return state
    if state == "died":
        return f"died: {run.end}"
    return run.end if run.end in ("finished", "interrupted") else f"failed: {run.end}"


def read_regular(path: Path, *, most_bytes: int, start: int = 0) -> bytes:
    """Read a file of a run; raise OSError if it is too large, or is a pipe or a device, which hang."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        file.seek(start)
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
    return data


def read_run(folder: Path) -> Run:
    """Read the run that a folder holds; raise BadInput if it holds none."""
    path = folder / RUN_FILE
    try:
        text = read_regular(path, most_bytes=LARGEST_RUN_FILE).decode()
        data = json.loads(text, parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{folder} holds no run: {error}", hint=RUN.hint) from None
    try:
        run = decode_document(data, Run, RUN, name=str(path))
    except (RecursionError, OverflowError) as error:
        raise BadInput(f"{path} is damaged: {error}", hint=RUN.hint) from None
    times = [time_s for time_s in (run.started_s, run.ended_s, run.process_started_s) if time_s is not None]
    if not 0 < run.pid <= HIGHEST_PID or not all(0 <= time_s < LATEST_S for time_s in times):
        raise BadInput(f"{path} is damaged: process {run.pid} at {times} seconds since 1970", hint=RUN.hint)
    return run if state_of(run) != "died" else replace(run, end=_read_last_words(folder))


def _read_last_words(folder: Path) -> str | None:
    """Read which signal or crash ended a script; None if nothing recorded signals."""
    found = None
    for name in (CRASH, *HEARD):
        try:
            words = read_regular(folder / f"{name}{LAST_WORDS}", most_bytes=LARGEST_RUN_FILE)
        except OSError:
            continue
        if words:
            first = words.decode(errors="replace").splitlines()[0]
            return first.removeprefix("Fatal Python error: ")[:LONGEST_END] if name == CRASH else name
        found = UNHEARD
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenRun:
    """A run in its folder, and the state in which it was found."""

    folder: Path
    run: Run
    state: RunState


def state_of(run: Run) -> RunState:
    if run.ended_s is not None:
        return "ended"
    return "running" if is_alive(run.pid, run.process_started_s, run.process_key) else "died"


def list_runs(root: Path | None = None, *, kind: str | None = None) -> tuple[tuple[Path, Run], ...]:
    """List every readable run, or those of one verb, the latest first."""
    folder = root or runs_folder()
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            found.append((path, read_run(path)))
        except BadInput:
            continue
    wanted = [pair for pair in found if kind in (None, pair[1].kind)]
    return tuple(sorted(wanted, key=lambda pair: pair[1].started_s, reverse=True))


def find_run(wanted: str, root: Path | None = None) -> Path:
    """Find a run's folder by its path, its name, or a unique part of its name."""
    if (Path(wanted) / RUN_FILE).is_file():
        return Path(wanted)
    runs = [path for path, _ in list_runs(root)]
    exact = [path for path in runs if path.name == wanted]
    matching = exact or [path for path in runs if wanted and wanted in path.name]
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(path.name for path in (matching or runs)[:5]) or "none"
    problem = "names several runs" if matching else "names no run"
    raise BadInput(f"{wanted!r} {problem} of {root or runs_folder()}", hint=f"there are: {known}")


def folder_of_run(run: str | Path) -> Path:
    """Find the folder, or a file, of a run by its path, its name, or a part of its name."""
    return Path(run) if Path(run).exists() else find_run(str(run))


def process_started_s(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def process_key(pid: int) -> str | None:
    """Return the machine's boot and the ticks from it to the start of a process; None except on Linux.

    Other ways derive the start from the clock, and it changes when the clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    boot = _boot()
    return None if boot is None else f"{boot} {fields[STARTED_FIELD].decode()}"


def _boot() -> str | None:
    """Return the id of this boot of the machine; None except on Linux."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return None


def boot_age_s() -> float | None:
    """Return the seconds since the boot, sleep included; None if the system does not count them."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.clock_gettime(clock)


def is_alive(pid: int, started_s: float | None, key: str | None = None) -> bool:
    """Return whether the process with this key, or that started at `started_s`, runs; a zombie does not."""
    try:
        process = psutil.Process(pid)
        found = process_key(pid) if key is not None else None
        if found is not None:
            same = found == key
        else:
            same = started_s is None or abs(process.create_time() - started_s) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
