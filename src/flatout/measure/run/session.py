"""The observed job: run the script as `__main__` in this process and end it when enough is known.

To end it, a private BaseException is raised at a step end: `finally` blocks and context managers of the
script run (they may write a checkpoint), and ordinary `except Exception` handlers let it pass.  A script that
swallows it is ended by force once the evidence is on disk, and so are threads that wait for an end of
training that will not come.  A script that leaves by `os._exit` is held until the evidence is written.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from flatout.ground.script.command import ScriptCommand
from flatout.ground.script.main import after_import, run_as_main, show_error
from flatout.measure.arms.arm import Arm
from flatout.measure.evidence_file import save_evidence
from flatout.measure.patches import Patches
from flatout.measure.process.redirect import Mirror, redirect_torch, redirect_writes
from flatout.measure.run.assemble import Assembly, Ending
from flatout.measure.run.lineage import (
    ARM_FAILED,
    DUE,
    END,
    FAILED_ARM,
    FAILED_BESIDE,
    FAILED_UNDER,
    NOT_WRITTEN,
    is_orphan,
)
from flatout.measure.run.observer import JobListener, Observer, ObserverOptions
from flatout.measure.run.ranks.agreement import keep_attempts_apart

UNWIND_S = 20.0  # for `finally` blocks, which may write a checkpoint
LEAVE_S = 15.0  # for saving the evidence and leaving
PAST_FAILURE = 2  # steps: the one that failed, and one more
MOST_SWALLOWED = 3
MOST_WORDS = 300
MOST_SAVING = 0.1  # of the time, for saving intermediate evidence
_exit = os._exit


class EndOfMeasurement(BaseException):
    """Ends the observed script; not an Exception, so ordinary handlers let it through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions(ScriptCommand):
    """What the launching process asks for."""

    folder: str
    evidence_path: str
    keep_running: bool
    seconds: float
    skipped: dict[str, str]  # arms under which the job failed before, and how
    progress_fd: int | None
    failed_at: dict[str, int] = field(default_factory=dict)  # after how many steps, by the arm
    began_s: float | None = None  # on the monotonic clock; None: when the process began to observe
    parent: int | None = None  # the launching process; the job ends with it
    scratch: str | None = None  # the folder for the script's writes; None: no redirection


class Session(JobListener):
    """One run of the script under observation."""

    def __init__(self, options: JobOptions, *, at_start: Collection[str]) -> None:
        """Prepare a run; `at_start` holds the modules that Python had imported before Flatout."""
        self.options, self._at_start = options, at_start
        self.assembly = Assembly(command=options.words, folder=options.folder)
        self.observer = Observer(
            ObserverOptions(
                folder=options.folder,
                seconds=options.seconds,
                began_s=options.began_s,
                counterfactuals=not options.keep_running,
                skipped=options.skipped,
                plain_steps=max(options.failed_at.values(), default=-PAST_FAILURE) + PAST_FAILURE,
            ),
            self,
        )
        self.num_stops = 0
        self.interrupted = False
        self.saved = False
        self._pid = os.getpid()
        self._saving = threading.Lock()
        self._timer: threading.Timer | None = None
        self._mirror: Mirror | None = None  # redirects the script's writes
        self._next_save_s = 0.0

    def run(self) -> int:
        """Run the job and return the exit code: the script's own with `keep_running`, else 0 once saved."""
        self.observer.install_switches()
        self.observer.patches.replace(os, "_exit", self._exit_once_saved)
        if self.options.scratch is not None:
            own = Path(self.options.evidence_path).parent
            self._mirror = redirect_writes(Patches(), Path(self.options.scratch), apart=[own])
        after_import("torch", self._watch_torch)
        signal.signal(END, self._asked_to_end)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ending = self._run_script()
        if os.getpid() != self._pid:  # a process that the script forked has come to the script's end
            return ending.exit_code or 0
        for number in (signal.SIGINT, signal.SIGTERM, END):
            signal.signal(number, signal.SIG_IGN)  # the evidence is being written
        self.due(LEAVE_S)
        failed = self._failed_arm(ending)
        if failed is None:
            self.observer.sequence.acquit(self._acquitted(ending))
        self.observer.end_arm()
        self._end_workers()
        if self._timer is not None:
            self._timer.cancel()
        if self.options.keep_running and self.observer.finished:  # measured; add how the job continued
            self.saved = False
            ending = Ending("measured", ending.exit_code, ending.error)
        if failed is not None:
            ending = self._give_up(failed, _how(ending))
        code = self._save(ending)
        if self.num_stops and (any(_own_threads()) or any(_own_processes())):
            self._leave(code)
        if code == 0 and failed is not None:
            return ARM_FAILED
        if code == 0 and self.options.keep_running:
            return ending.exit_code or 0
        return code

    def _run_script(self) -> Ending:
        """Run the script; ignore what it raises because of the measurement's end or an interrupt."""
        ending = Ending("finished", 0)
        try:
            run_as_main(self.options.command, module=self.options.module, at_start=self._at_start)
            _join_threads()
        except SystemExit as exit_:
            ending = Ending("finished", _exit_code(exit_), _exit_words(exit_))
        except KeyboardInterrupt:
            self.interrupted = True
        except BaseException as error:  # noqa: BLE001 - the script's own, shown as such
            ending = Ending("crashed", 1, _words(error))
            if not self.num_stops and not self.interrupted and self._failed_arm(ending) is None:
                show_error(error)
        if self.num_stops:
            return Ending("measured", 0)
        return Ending("interrupted", 130) if self.interrupted else ending

    def _failed_arm(self, ending: Ending) -> Arm | None:
        """Return the arm that may have caused a failure of the script, which then runs again without it."""
        failed = ending.exit_code and ending.ended not in ("interrupted", "measured")
        return None if not failed or self._acquitted(ending) else self.observer.arm_under_way

    def _acquitted(self, ending: Ending) -> list[str]:
        """Return arms under which an earlier run ended as this one does without them.

        Steps run as they are up to the one at which the script failed. A script that ends there again does
        so by itself, and so does one that exits with the same words under another arm.
        """
        if ending.ended == "crashed" and self.observer.arm_under_way is not None:
            return []
        how = FAILED_UNDER + _how(ending)
        return [label for label, reason in self.options.skipped.items() if reason == how]

    def _give_up(self, arm: Arm, how: str) -> Ending:
        """Report the failed arm, and end with what was measured before."""
        arm.refusal = FAILED_BESIDE + how
        self.progress(FAILED_ARM + json.dumps([arm.label, how, self.observer.num_steps]))
        return Ending("measured", 0)

    def stuck(self, arm: Arm) -> None:
        ending = self._give_up(arm, "its steps did not end")
        self._leave(self._save(ending) or ARM_FAILED)

    def _watch_torch(self, _torch: ModuleType) -> None:
        if self._mirror is not None:
            redirect_torch(Patches(), self._mirror)
        if os.getpid() == self._pid:  # otherwise a process that the script forked
            self.observer.install()
            keep_attempts_apart(self.observer.patches)

    def _asked_to_end(self, _number: int, _frame: Any) -> None:
        """Handle a request to end, or the launcher's death; a script may have its own way to end."""
        if self.observer.is_overdue:
            self._cut_short()
        if is_orphan(self.options.parent):
            self._end_soon()  # nobody is left to end a script that continues
        if self.interrupted:
            return
        self.interrupted = True
        if callable(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise KeyboardInterrupt

    # -- the end

    def finished(self) -> None:
        if self.options.keep_running:
            self._save(Ending("measured"))
            self.observer.remove()
            self.saved = True
            self.progress("measured; the script continues")
            return
        self.num_stops += 1
        self._end_soon()
        off_main = threading.current_thread() is not threading.main_thread()
        if self.num_stops >= MOST_SWALLOWED or off_main:
            self._end_by_force()
        raise EndOfMeasurement

    def overdue(self) -> None:
        """Ask the main thread to end inside a step; called by the thread that looks at it."""
        if self._timer is None and not self.options.keep_running:
            self._end_soon()
            os.kill(self._pid, END)

    def _cut_short(self) -> None:
        self.observer.cut_short()
        if self.observer.clock.owner == threading.main_thread().ident:
            self.finished()
        self.num_stops += 1
        self._end_by_force()

    def _end_soon(self) -> None:
        """Give the script some time to unwind by itself."""
        if self._timer is None:
            self._timer = threading.Timer(UNWIND_S, self._end_by_force)
            self._timer.daemon = True
            self._timer.start()
            self.due(UNWIND_S + LEAVE_S)

    def _end_by_force(self) -> None:
        overdue = self.observer.is_overdue
        if overdue:  # the main thread is where Python cannot raise
            self.num_stops += 1
            self.observer.cut_short()
        ending = Ending("measured", 0) if self.num_stops else Ending("interrupted", 130)
        self._leave(self._save(ending, wait=not overdue))

    def _exit_once_saved(self, code: int) -> NoReturn:
        """Replace the script's `os._exit`: save first; processes that it forked leave at once."""
        if os.getpid() == self._pid:
            self._save(Ending("finished", code))
        _exit(code)

    def _leave(self, code: int) -> NoReturn:
        """End this process and its workers, whatever threads the script left."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for child in multiprocessing.active_children():
            child.kill()
        _exit(code)

    def _end_workers(self) -> None:
        for iterator in list(self.observer.loaders.iterators):
            shut_down: Callable[[], Any] | None = getattr(iterator, "_shutdown_workers", None)
            if shut_down is not None:
                shut_down()
        gc.collect()
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()

    # -- evidence and progress

    def _save(self, ending: Ending, *, wait: bool = True) -> int:
        with self._saving:  # the timer that ends a script by force waits for the file
            if self.saved:
                return 0
            self.saved = True
            try:
                evidence = self.assembly.evidence(self.observer, ending, wait=wait)
                save_evidence(evidence, Path(self.options.evidence_path))
            except OSError as error:
                self.progress(f"error: {self.options.evidence_path}: {error.strerror}")
                return NOT_WRITTEN
            return 0

    def block_ended(self) -> None:
        """Save after a block, so that a killed process leaves results; use at most a tenth of the time."""
        began_s = time.monotonic()
        if began_s < self._next_save_s:
            return
        try:
            evidence = self.assembly.evidence(self.observer, Ending("crashed", None, "killed"), wait=False)
            save_evidence(evidence, Path(self.options.evidence_path))
        except Exception:  # noqa: BLE001 - the job goes on whatever this was; the last save reports it
            return
        finally:
            ended_s = time.monotonic()
            self._next_save_s = ended_s + (ended_s - began_s) / MOST_SAVING

    def due(self, seconds: float) -> None:
        """Let the launcher expect the end, or more such news, in `seconds`."""
        if not self.options.keep_running:
            self.progress(f"{DUE}{seconds}")

    def progress(self, message: str) -> None:
        if self.options.progress_fd is None:
            return
        try:
            os.write(self.options.progress_fd, (message + "\n").encode())
        except OSError:
            return  # the launching process is gone; the job does not depend on it


def _join_threads() -> None:
    """Wait for the script's threads, as Python would at its own end, which is too late for the evidence."""
    for thread in _own_threads():
        thread.join()


def _own_threads() -> Iterator[threading.Thread]:
    """Yield the threads that keep Python from ending."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            yield thread


def _own_processes() -> Iterator[multiprocessing.process.BaseProcess]:
    """Yield the processes for which Python waits at its end."""
    for process in multiprocessing.active_children():
        if not process.daemon:
            yield process


def _words(error: BaseException) -> str:
    words = _first_line(str(error))
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _how(ending: Ending) -> str:
    return ending.error or f"ended with exit code {ending.exit_code}"


def _first_line(words: str) -> str:
    return words.strip().partition("\n")[0][:MOST_WORDS]


def _exit_words(exit_: SystemExit) -> str | None:
    """Return the message of `sys.exit("no data at ./data")`."""
    return None if exit_.code is None or isinstance(exit_.code, int) else _first_line(str(exit_.code)) or None


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code
    print(exit_.code, file=sys.stderr)
    return 1
