"""Give operators in a worker process more than the one thread that torch allows.

Few workers on many cores leave cores idle while a transform of large images uses a single one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value
from flatout.tuner.treatments.loading.loader_workers import LEAST_WAIT


def propose(case: Case) -> list[Value]:
    """Propose it if the step waits for workers that mostly compute, and cores are free for them."""
    evidence = case.evidence
    wait_s, step_s, cores = evidence.phase_s("wait"), evidence.step_s, evidence.host.cores
    if not wait_s or not step_s or not cores or wait_s < LEAST_WAIT * step_s:
        return []
    for loader in evidence.loaders:
        if loader.trains and loader.num_workers and loader.cpu_s and loader.fetch_s:
            threads = int(cores) // loader.num_workers
            computes = loader.cpu_s > 0.5 * loader.fetch_s.mean_s
            return [threads] if threads >= 2 and computes else []
    return []


class _Begin:
    """The first call of a worker; a class, because spawned workers receive it by pickle."""

    def __init__(self, threads: int, real: Callable[[int], None] | None) -> None:
        self.threads, self.real = threads, real

    def __call__(self, worker: int) -> None:
        import torch

        torch.set_num_threads(self.threads)
        if self.real is not None:
            self.real(worker)


def install(patches: Patches, value: Value) -> None:
    from torch.utils.data import DataLoader

    @patches.around(DataLoader, "__init__")
    def init(real: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        real(loader, *args, **kwargs)
        loader.worker_init_fn = _Begin(int(value), loader.worker_init_fn)


TREATMENT = Treatment(
    propose,
    install,
    "let operators in loader workers use this many threads",
    safety="reordered",
)
