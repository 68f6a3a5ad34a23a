"""Parents and children of a job: what a process leaves behind, and what remains when it is killed.

Only the kernel can clean up after SIGKILL.  On Linux a process may ask it for two things: to be given the
orphans of its children, and to be sent a signal when its own parent dies: one that no script uses, because
SIGTERM is the script's.  The second request is bound to the *thread* that started the process, so the thread
that starts a job also waits for it.  The job makes that request for itself, never for another process:
processes that are only attached to stay untouched.

Other systems offer no such request, so nothing is done there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# Exit codes by which the observed process tells its launcher what to do next.
ARM_FAILED = 75  # the script raised or hung under an arm: run it again without that arm
NOT_WRITTEN = 74  # the evidence could not be written
FAILED_ARM = "arm failed: "  # begins the progress line that names the arm
# Why an arm brought nothing: the job went on where it ran without the arm, or could not run again.
FAILED_UNDER = "the script failed under it: "
FAILED_BESIDE = "the script failed while it ran, and did not run again without it: "
DUE = "news in: "  # begins the progress line that tells when to expect the end or more such news, in seconds
LEAST_SET_UP_S = 120.0  # until the first step, however short the diagnosis
OVERDUE_S = 5.0  # after the time is up, for the step under way
UNFINISHED = "the step under way"  # begins what the evidence says of a step that was cut short

END = getattr(signal, "SIGRTMAX", signal.SIGTERM)  # asks the observed process to save what it knows and end
SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of whatever this process's children leave running."""
    _ask_kernel(SET_CHILD_SUBREAPER, 1)


def end_with(parent: int | None) -> None:
    """Ask for the signal END when `parent`, the process that started this one, is gone."""
    if parent is None:
        return
    _ask_kernel(SET_PARENT_DEATH_SIGNAL, END)
    if is_orphan(parent) and sys.platform == "linux":  # gone before the kernel was asked
        os.kill(os.getpid(), END)


def is_orphan(parent: int | None) -> bool:
    """Return whether `parent` used to be the parent of this process."""
    return parent is not None and os.getppid() != parent


def _ask_kernel(wish: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(wish, value, 0, 0, 0)
