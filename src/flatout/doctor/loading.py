"""What is known of a loader: which lines take its time, and how many workers could share its work.

A process that makes batches is running, queued for a core, or blocked by storage or the network.  Processes
that compute share the cores, so more of them than cores gain nothing; blocked ones leave their core to
others.
"""

from __future__ import annotations

from collections import Counter

from flatout.doctor.ceilings import batches_per_step, share_of, wait_share
from flatout.ground.units import show_share
from flatout.measure.evidence import Evidence, Loader, Place

LEAST_CORES = 2  # for a worker beside the training process
BLOCKED = 0.5  # of a batch's time: above it, the process leaves its core to others
MOST_PER_CORE = 4  # workers per core, if they block
FEWEST_SAMPLES = 20
LEAST_SHOWN = 0.1  # of a batch's time, a line
WATCHES = ("lightning", "lightning_fabric", "torch")  # libraries that wrap DataLoader()


def cores_of_a_process(evidence: Evidence) -> int | None:
    """Return the whole cores for each training process: the ranks of one host share its cores."""
    if evidence.host.cores is None:
        return None
    ranks_of_a_host = max(Counter(rank.host for rank in evidence.ranks).values(), default=1)
    return int(evidence.host.cores / ranks_of_a_host)


def batch_s(loader: Loader) -> float | None:
    """Return the seconds in which one process makes one batch."""
    if loader.fetch_s is None or loader.collate_s is None:
        return None
    return loader.fetch_s.mean_s + loader.collate_s.mean_s


def late_share(evidence: Evidence, loader: Loader) -> float | None:
    """Return the share of the step spent waiting for batches that no worker had finished.

    The rest of the wait hands finished batches over: no worker, and no line that makes batches, is too slow.
    It grows if other jobs take the cores.
    """
    share, wait_s = wait_share(evidence, loader), loader.wait_s
    if share is None or loader.late_s is None or wait_s is None or wait_s.mean_s <= 0:
        return share
    return share * min(1.0, loader.late_s / wait_s.mean_s)


def most_freed_share(evidence: Evidence, loader: Loader, waiting: float) -> float:
    """Return the share of the step that a free loader can save at most: the wait, and its workers' cores.

    Workers that compute take cores from the step.  Without them, the step ends earlier by at most the time
    that all cores together need for the workers' work.
    """
    cores, cpu_s = evidence.host.cores, loader.cpu_s
    if not loader.num_workers or not cores or cpu_s is None:
        return waiting
    workers = share_of(cpu_s * batches_per_step(evidence) / cores, evidence.step_s)
    return min(1.0, waiting + (workers or 0.0))


def blocked_share(loader: Loader) -> float | None:
    """Return the share of a batch's time that needs no core; None if it is unknown."""
    return share_of(loader.blocked_s, batch_s(loader))


def is_blocked(loader: Loader) -> bool:
    """Return whether making a batch is mostly waiting, and not for a core."""
    return (blocked_share(loader) or 0.0) > BLOCKED


def most_workers(loader: Loader, cores: int) -> int:
    """Return how many workers can make batches at the same time."""
    return cores * (MOST_PER_CORE if is_blocked(loader) else 1)


def has_room(loader: Loader, cores: float | None) -> bool:
    """Return whether more workers would shorten the wait for batches without needing cores of their own."""
    return is_blocked(loader) and (loader.num_workers or 0) < most_workers(loader, int(cores or 1))


def slow_lines(loader: Loader, *, most: int = 2) -> list[tuple[Place, float]]:
    """Return the lines that hold most of a batch's time, with their shares of it."""
    samples = sum(line.samples for line in loader.lines)
    if samples < FEWEST_SAMPLES:
        return []
    by_line: dict[Place, int] = {}
    for line in loader.lines:
        if line.place is not None:
            by_line[line.place] = by_line.get(line.place, 0) + line.samples
    shares = sorted(((place, num / samples) for place, num in by_line.items()), key=lambda item: -item[1])
    return [(place, share) for place, share in shares[:most] if share >= LEAST_SHOWN]


def figures(loader: Loader) -> list[str]:
    """Describe what a batch's time is spent on, one line each."""
    lines = [f"{place} ({show_share(share)})" for place, share in slow_lines(loader)]
    found = [f"a batch's time is spent at {', '.join(lines)}"] if lines else []
    if is_blocked(loader):
        found.append(
            f"making a batch is {show_share(blocked_share(loader))} waiting for storage or the network, and "
            "that takes no core: more workers than cores help"
        )
    return found


def loader_arguments(loader: Loader, **arguments: object) -> str:
    """Say `give this DataLoader num_workers=2`, or the equivalent for the library that makes it."""
    library = made_by(loader)
    prefix = "dataloader_" if library == "transformers" else ""
    words = " and ".join(f"{prefix}{name}={value}" for name, value in arguments.items())
    if library == "transformers":
        return f"give TrainingArguments {words}"
    return f"give the DataLoader that {library} makes {words}" if library else f"give this DataLoader {words}"


def made_by(loader: Loader) -> str | None:
    """Return the library whose line makes a loader; None if it is the user's own."""
    library = (loader.via or "").partition("/")[0]
    return None if library in ("", *WATCHES) else library
