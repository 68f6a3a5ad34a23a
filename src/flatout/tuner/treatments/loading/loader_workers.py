"""Give training loaders the number of worker processes that is fastest, zero included.

A loader draws a seed for its workers each time it starts, unless its workers live on.  Everything drawn after
it, such as the order of the next epoch, stays the script's own if as many seeds are drawn as without workers.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value

LEAST_WAIT = 0.03  # of the step
MOST = 16


def propose(case: Case) -> list[Value]:
    """Propose counts around what the cores allow, if the step waits for its batches.

    The script's own count is among them if its workers end with every epoch.
    """
    evidence = case.evidence
    loaders = [loader for loader in evidence.loaders if loader.trains and loader.num_workers is not None]
    wait_s, step_s = evidence.phase_s("wait"), evidence.step_s
    if not loaders or any(loader.streams for loader in loaders) or not wait_s or not step_s:
        return []
    now = loaders[0].num_workers or 0
    if wait_s < LEAST_WAIT * step_s and now <= 1:
        return []
    cores = max(1, round(evidence.host.cores or 1))
    counts: set[int] = {1, 2, cores // 2, cores, 2 * cores, now // 2, 0 if now else 1}
    is_lasting = not now or loaders[0].persistent_workers
    found = {min(count, MOST) for count in counts} - {now} | (set() if is_lasting else {now})
    return [*sorted(found, key=lambda count: abs(count - cores))]


def install(patches: Patches, value: Value) -> None:
    """Give every DataLoader over a map-style dataset that many workers, which live as long as it does."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    count = int(value)
    lasting: dict[int, bool] = {}  # by dataset: frameworks make a loader again, with what they read from it

    @patches.around(DataLoader, "__init__")
    def init(real: Any, loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) < 5 and not isinstance(dataset, IterableDataset):  # the sixth argument is num_workers
            lasting.setdefault(id(dataset), bool(kwargs.get("persistent_workers", False)))
            kwargs["num_workers"] = count
            if count:
                kwargs["persistent_workers"] = True
            else:
                for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"):
                    kwargs.pop(name, None)
        real(loader, dataset, *args, **kwargs)

    begun: WeakSet[Any] = WeakSet()

    @patches.around(DataLoader, "__iter__")
    def begin(real: Any, loader: Any) -> Any:
        again, asked = loader in begun, lasting.get(id(loader.dataset), loader.persistent_workers)
        begun.add(loader)
        if not again or asked == loader.persistent_workers:
            return real(loader)
        generator = loader.generator or torch.default_generator
        if not asked:
            torch.empty((), dtype=torch.int64).random_(generator=generator)
            return real(loader)
        before = generator.get_state()
        batches = real(loader)
        generator.set_state(before)
        return batches


TREATMENT = Treatment(
    propose,
    install,
    "fetch batches in worker processes that live for the whole run",
    safety="exact",
    redraws=True,
)
