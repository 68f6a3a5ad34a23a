"""What a watched script leaves behind when it ends without Python's shutdown.

A signal such as SIGTERM, a crash in C and `os._exit` run no `finally` and no `atexit`.  The module
`faulthandler` still hears signals: its handlers are written in C, act while the script hangs in C, and pass
the signal on to its previous handler, so that the process ends as it would alone.  Each has an empty file in
the folder of the run, and writes the stack there: the file that is not empty tells what ended the run.
SIGKILL, which the kernel sends when memory runs out, is never heard; then all files are empty.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

from flatout.ground.errors import BadInput
from flatout.ground.runs import CRASH, HEARD, LAST_WORDS, end_of, end_run


class LastWords:
    """The files of one run; raises OSError if they cannot be made."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pid = folder, os.getpid()
        self._files = {name: (folder / f"{name}{LAST_WORDS}").open("wb") for name in (CRASH, *HEARD)}
        self._hears_crashes = not faulthandler.is_enabled()  # else the user reads them elsewhere
        if self._hears_crashes:
            faulthandler.enable(file=self._files[CRASH])
        for name in HEARD:
            if signal.getsignal(signal.Signals[name]) is signal.SIG_DFL:  # nohup ignores SIGHUP
                faulthandler.register(signal.Signals[name], file=self._files[name], chain=True)
        os.register_at_fork(after_in_child=self._leave)
        self._exit, os._exit = os._exit, self._exit_with  # type: ignore[assignment]

    def _leave(self) -> None:
        """Write nowhere in a forked child: what ends it does not end the run."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in self._files.values():
            if not file.closed:
                os.dup2(nowhere, file.fileno(), inheritable=False)
        os.close(nowhere)

    def _exit_with(self, status: int) -> None:
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError, BadInput):
                end, exit_code = end_of(SystemExit(status))
                end_run(self._folder, time_s=time.time(), end=end, exit_code=exit_code)
        self._exit(status)

    def close(self) -> None:
        """Stop listening: the run has ended."""
        for name in HEARD:
            faulthandler.unregister(signal.Signals[name])
        os._exit = self._exit
        for name, file in self._files.items():
            if name != CRASH or not self._hears_crashes:  # a crash while Python ends is written nowhere else
                file.close()
            with contextlib.suppress(OSError):
                (self._folder / f"{name}{LAST_WORDS}").unlink()
