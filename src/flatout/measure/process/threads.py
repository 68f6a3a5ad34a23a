"""How many threads a CPU operator uses, and which line sets the number.

torch takes the number from OMP_NUM_THREADS, or uses as many as the machine has cores: too many in a container
that may use only a few of them, and in each of several processes.
"""

from __future__ import annotations

import sys

from flatout.measure.evidence import Place, Threads
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode


class ThreadsWatch:
    """Notes the number of threads, and who sets it."""

    def __init__(self, user_code: UserCode) -> None:
        self._user_code = user_code
        self._place: Place | None = None
        self.held: int | None = None  # the job's own number, while an arm uses another

    def install(self, patches: Patches) -> None:
        import torch

        set_num_threads = torch.set_num_threads

        def set_noted(number: int) -> None:
            set_num_threads(number)
            if self.held is None:  # otherwise an arm's
                place, via = self._user_code.place(sys._getframe(1))
                self._place = place if via is None else self._place

        patches.replace(torch, "set_num_threads", set_noted)

    def evidence(self) -> Threads | None:
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "get_num_threads"):
            return None  # a script that failed early
        return Threads(num=self.held or torch.get_num_threads(), place=self._place)
