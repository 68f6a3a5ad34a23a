"""How the processes of a job find each other, in the store of their launcher, before they compute.

Ranks exchange texts through the store, and agree on a folder before any of them chooses its device.

torchrun keeps its store while the job lives, and restarts ranks after a crash or when a node joins.  A rank
of an earlier attempt is gone, but what it wrote is still there.  So every rank writes a random name; the
first rank collects the names and tells each the name of the group, which is complete once all have answered.
A dead rank does not answer, and the first asks again when another takes its place.

All nodes must see the same files; `check_shared` tests that before a run writes to two disks.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from flatout.engines.run.folder import MARK
from flatout.ground import OnProgress, ignore
from flatout.ground.errors import BadInput, ChildDied
from flatout.ground.interrupts import end_with_parent
from flatout.ground.runs import PRIVATE, make_folder
from flatout.ground.torchrun import Launch, read_launch
from flatout.ground.units import show_some

# A rank waits for the slowest one: an epoch of long completions may take minutes, a lost rank shows sooner.
PATIENCE = timedelta(minutes=30)
POLL_S = 0.02
TELL_AFTER_S = 20.0  # of waiting for a rank; torchrun gives up a node that joins late after a minute
# Until a file that one node wrote appears on another: NFS caches for as long.
SEEN_WITHIN_S = 60.0


class Meeting:
    """The ranks of one attempt of a job; with one rank, every method costs nothing."""

    def __init__(
        self, launch: Launch, *, store: Store | None = None, on_progress: OnProgress = ignore
    ) -> None:
        self.launch, self._on_progress = launch, on_progress
        self._store: Store | None = None  # of this attempt alone
        self._round = 0
        if store is not None:
            with lost_ranks():
                self._group = meet(
                    store, rank=launch.rank, num_ranks=launch.num_ranks, on_wait=self._tell_missing
                )
                self._store = PrefixStore(f"flatout/{self._group}", store)

    @classmethod
    def join(cls, *, on_progress: OnProgress = ignore) -> Meeting:
        """Meet the ranks that the launcher's environment names; without one, this process is alone."""
        launch = read_launch()
        if launch.is_launched:
            end_with_parent()  # a rank whose agent was killed must not run beside its replacement
        if launch.num_ranks == 1:
            return cls(launch)
        if launch.meets_at is None:
            raise BadInput(
                f"rank {launch.rank} of {launch.num_ranks} does not know where to meet the others",
                hint="start it with torchrun or srun, or set MASTER_ADDR and MASTER_PORT",
            )
        host, port = launch.meets_at
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        url = f"tcp://{place}?rank={launch.rank}&world_size={launch.num_ranks}"
        with lost_ranks():
            found: Store = next(iter(rendezvous(url, timeout=PATIENCE)))[0]
        while isinstance(found, PrefixStore):  # of one attempt, as its agent counts
            found = found.underlying_store
        return cls(launch, store=found, on_progress=on_progress)

    @property
    def first(self) -> bool:
        """Whether this process writes the files and reports progress."""
        return self.launch.rank == 0

    @property
    def store(self) -> Store:
        """Where the process group of this attempt meets."""
        assert self._store is not None, "a process that is alone has no group"
        return PrefixStore("ranks", self._store)

    def gather(self, text: str) -> list[str]:
        """Gather the texts of all ranks, in their order."""
        if self._store is None:
            return [text]
        own, before = f"{self._round}/{self.launch.rank}", f"{self._round - 2}/{self.launch.rank}"
        keys = [f"{self._round}/{rank}" for rank in range(self.launch.num_ranks)]
        self._round += 1
        with lost_ranks():
            self._store.set(own, text)
            self._store.wait(keys, PATIENCE)
            found = [value.decode() for value in self._store.multi_get(keys)]
            self._store.delete_key(before)  # every rank has read it: all wrote in the round after it
        return found

    def share(self, choose: Callable[[], str]) -> str:
        """Return what the first rank chooses, on every rank."""
        return self.gather(choose() if self.first else "")[0]

    def agree(self, what: str, value: object) -> None:
        """Raise BadInput unless every rank has the same value."""
        found = sorted(set(self.gather(str(value))))
        if len(found) > 1:
            self._refuse(
                f"ranks differ in {what}: {', '.join(found)}", hint="give all machines the same files"
            )

    def begin(
        self, choose: Callable[[bool], Path], *, begun: Callable[[], Path | None], resume: bool
    ) -> tuple[Path, bool]:
        """Return (the run's folder, whether it is resumed) on every rank, as the first one decides.

        A restarted job resumes even if it was not asked to: the run that it has `begun`, or else the one that
        `choose` returns, which takes whether to resume.
        """
        again = "again" in self.gather("again" if self.launch.restarts else "")

        def decide() -> str:
            own = begun()
            return json.dumps([str(own or choose(resume or again)), resume or again or own is not None])

        out, resumes = json.loads(self.share(decide))
        self.check_shared(Path(out))
        return Path(out), resumes

    def check_shared(self, folder: Path) -> None:
        """Raise BadInput on every rank unless all of them see the first rank's folder."""
        if self.launch.num_ranks == 1:
            return
        mark = folder / f"{MARK}{self._group}"
        if self.first:
            if not folder.is_dir():
                make_folder(folder)
                folder.chmod(PRIVATE)
            mark.touch()
        (place, *_) = self.gather(self._place())
        blind = self.gather("" if _appears(mark) else self._place())
        if self.first:
            mark.unlink()
        if missing := sorted(set(blind) - {""}):
            self._refuse(
                f"{folder} of {place} is not the folder that {', '.join(missing)} finds under this name",
                hint="name a folder that all machines share with --out",
            )

    def _refuse(self, message: str, *, hint: str) -> NoReturn:
        """End every rank with the same error; all read it first, since the store may end with rank 0."""
        with contextlib.suppress(ChildDied):
            self.gather("")
        raise BadInput(message, hint=hint)

    def _tell_missing(self, ranks: list[int]) -> None:
        """Report the missing ranks, once on every node."""
        if self.launch.local_rank:
            return
        told = f"waiting for rank {show_some(ranks, most=8)} of {self.launch.num_ranks}"
        if self.launch.has_store:
            told += (
                "; torch tells a node that joins a running job where to meet only with "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes"
            )
        self._on_progress(told)

    def _place(self) -> str:
        return f"{socket.gethostname()} (node {self.launch.node or 0})"


def meet(store: Store, *, rank: int, num_ranks: int, on_wait: Callable[[list[int]], None] = ignore) -> str:
    """Agree on a name that only the ranks of this attempt know; call `on_wait` once with late ranks."""
    own, place = uuid.uuid4().hex, f"flatout/{num_ranks}"
    store.set(f"{place}/{rank}", own)
    if rank == 0:
        return _assemble(store, [f"{place}/{each}" for each in range(num_ranks)], on_wait=on_wait)
    try:
        store.wait([own], timedelta(seconds=TELL_AFTER_S))
    except RuntimeError:
        on_wait([0])
    group = store.get(own).decode()
    while True:
        store.set(f"{group}/{rank}", "here")
        following = store.get(f"{group}/next").decode()
        if following == group:
            return group
        group = following  # a member of the previous group was of an earlier attempt


def _assemble(store: Store, keys: list[str], *, on_wait: Callable[[list[int]], None]) -> str:
    """Name a group until all of it answers; `next` of a group is itself, or the one that replaces it."""
    group, members, told = "", list[bytes](), False
    began_s = time.monotonic()
    deadline_s = began_s + PATIENCE.total_seconds()
    while time.monotonic() < deadline_s:
        if store.check(keys):
            found = store.multi_get(keys)
            if found != members:
                before, group, members = group, uuid.uuid4().hex, found
                for name in members:
                    store.set(name.decode(), group)
                if before:
                    store.set(f"{before}/next", group)
            answers = [f"{group}/{rank}" for rank in range(1, len(keys))]
            if not answers or store.check(answers):
                store.set(f"{group}/next", group)
                return group
        if not told and time.monotonic() - began_s > TELL_AFTER_S:
            told = True
            on_wait([rank for rank, key in enumerate(keys) if not store.check([key])])
        time.sleep(POLL_S)
    came = sum(store.check([key]) for key in keys)
    raise RuntimeError(f"{came} of {len(keys)} came within {PATIENCE}")


def _appears(path: Path) -> bool:
    deadline_s = time.monotonic() + SEEN_WITHIN_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            if path.name in {
                each.name for each in path.parent.iterdir()
            }:  # asks the server, where stat may not
                return True
        time.sleep(POLL_S)
    return False


@contextlib.contextmanager
def lost_ranks() -> Iterator[None]:
    """Raise ChildDied where another rank cannot be reached."""
    try:
        yield
    except RuntimeError as error:
        raise ChildDied(
            f"another rank is gone: {str(error).splitlines()[0]}",
            hint="torchrun --max-restarts N starts all ranks again from the last checkpoint",
        ) from error
