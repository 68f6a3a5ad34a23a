"""Parents and children of a job: what a process leaves behind, and what is left when it is killed.

Nobody can clean up after SIGKILL but the kernel.  On Linux a process may ask it two things: to be given the
orphans of its children, and to be sent a signal when its own parent dies: one that no script uses, because
SIGTERM is the script's.  That second wish follows the *thread* that started the process, so the thread that
starts a job is the one that waits for it.  It is made by the job itself, never for another process: what is
only attached to is left alone.

Elsewhere there is no such wish, and nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# Exit codes by which the observed process tells the launching one what to do next.
ARM_FAILED = 75  # the script raised or hung under an arm: run it again without that arm
NOT_WRITTEN = 74  # the evidence could not be written
FAILED_ARM = "arm failed: "  # begins the line of its progress that names the arm

END = getattr(signal, "SIGRTMAX", signal.SIGTERM)  # asks the observed process to save what it knows and end
SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of whatever the children of this process leave running."""
    _ask_kernel(SET_CHILD_SUBREAPER, 1)


def end_with(parent: int | None) -> None:
    """Let this process be sent END when `parent`, the process that started it, is gone."""
    if parent is None:
        return
    _ask_kernel(SET_PARENT_DEATH_SIGNAL, END)
    if is_orphan(parent) and sys.platform == "linux":  # gone before the kernel was asked
        os.kill(os.getpid(), END)


def is_orphan(parent: int | None) -> bool:
    """Whether `parent` used to be the parent of this process."""
    return parent is not None and os.getppid() != parent


def _ask_kernel(wish: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(wish, value, 0, 0, 0)
