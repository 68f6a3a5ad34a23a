"""How the evidence of each rank reaches rank 0.

Rank 0 marks two folders: one beside the evidence file, which nodes of a cluster often share, and one for
temporary files on its own machine.  A rank that finds a mark leaves its evidence there.  A rank that finds
none, on a node that shares no folder, sends it through the launcher's store, which torchrun's agent holds
until the last process has ended.  Flatout opens no port of its own.

Each rank sends a summary of a few hundred bytes and its whole evidence, compressed.  Rank 0 reads all
summaries and the whole evidence of the slowest rank alone, so its work grows little with every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from flatout.ground.atomic_files import replace_whole
from flatout.ground.codec import WrongShape, decode, encode
from flatout.ground.errors import EvidenceUnreadable
from flatout.ground.torchrun import read_launch
from flatout.measure.evidence import Evidence, Rank
from flatout.measure.evidence_file import decode_evidence
from flatout.measure.run.ranks.agreement import ATTEMPT
from flatout.measure.run.ranks.merging import merge, rank_summary, slowest_of

MARK = "reader.json"
SUMMARY, WHOLE = ".json", ".whole"
WAIT_FOR_RANKS_S = 60.0
WAIT_FOR_NODES_S = 300.0  # ranks that send through the store import torch first
POLL_S = 0.05
FOLDERS_FIRST_S = 1.0  # before rank 0 looks into the store, which needs torch
STORE_TIMEOUT_S = 120.0
CHUNK_BYTES = 1 << 20  # the store accepts values up to 8 MiB
BROKEN = (OSError, ValueError, zlib.error, EvidenceUnreadable, WrongShape)


class Exchange:
    """The meeting place of one launch."""

    def __init__(self, evidence_path: Path) -> None:
        launch = read_launch()
        self._rank = launch.rank
        parts = [launch.job or "", *map(str, launch.meets_at or ())]
        name = "-".join(part.replace("/", "_") for part in parts if part) or str(os.getppid())
        self._local = Path(tempfile.gettempdir()) / f"flatout-{os.getuid()}-{name}"
        self._folders = (evidence_path.parent / f".flatout-ranks-{name}", self._local)
        self._store: Any = None

    def begin(self) -> Path:
        """Mark the folders before the job runs, and return the file for this rank's own evidence."""
        for folder in self._folders if self._rank == 0 else ():
            for path in folder.glob("rank-*"):
                path.unlink(missing_ok=True)
            mark = {"host": socket.gethostname(), "pid": os.getpid()}
            replace_whole(folder / MARK, json.dumps(mark).encode())
        self._local.mkdir(parents=True, exist_ok=True)
        partial = self._local / f"partial-{self._rank}.json"
        partial.unlink(missing_ok=True)
        return partial

    def publish(self, evidence: Evidence) -> None:
        """Hand this rank's evidence to rank 0, at the end of the process."""
        summary = json.dumps(encode(rank_summary(evidence)), separators=(",", ":")).encode()
        whole = zlib.compress(json.dumps(evidence.to_json(), separators=(",", ":")).encode())
        folder = next((each for each in self._folders if _is_read(each)), None)
        if folder is not None:
            replace_whole(folder / f"rank-{self._rank}{WHOLE}", whole)
            replace_whole(folder / f"rank-{self._rank}{SUMMARY}", summary)
        elif (store := self._open_store()) is not None:
            chunks = [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]
            for number, chunk in enumerate(chunks):
                store.set(f"{self._rank}{WHOLE}{number}", chunk)
            store.set(f"{self._rank}{SUMMARY}", b"%d\n%s" % (len(chunks), summary))

    def leave(self, partial: Path) -> None:
        """Remove what this rank wrote for itself alone."""
        partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks on this machine are not done
            self._local.rmdir()

    def gather(self, own: Evidence, *, timeout_s: float | None = None) -> Evidence:
        """Return rank 0's evidence merged with that of all other ranks that deliver theirs."""
        num_ranks = read_launch().num_ranks
        if timeout_s is None:
            timeout_s = WAIT_FOR_NODES_S if read_launch().has_store else WAIT_FOR_RANKS_S
        found = {own.job.rank: rank_summary(own)}
        began_s = time.monotonic()
        while True:
            self._look(found, num_ranks, also_store=time.monotonic() - began_s > FOLDERS_FIRST_S)
            if len(found) >= num_ranks or time.monotonic() - began_s >= timeout_s:
                break
            time.sleep(POLL_S)
        slowest = slowest_of(found.values()).rank
        whole = own
        if slowest != own.job.rank:
            with contextlib.suppress(*BROKEN):
                whole = decode_evidence(json.loads(zlib.decompress(self._whole(slowest))), name="evidence")
        return merge(own, whole, list(found.values()), world_size=num_ranks)

    def clear(self) -> None:
        """Remove what the ranks left for each other."""
        for folder in self._folders:
            for path in (*folder.glob("rank-*"), *folder.glob("partial-*"), folder / MARK):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _look(self, found: dict[int, Rank], num_ranks: int, *, also_store: bool) -> None:
        for folder in self._folders:
            for path in folder.glob(f"rank-*{SUMMARY}"):
                with contextlib.suppress(*BROKEN):
                    number = int(path.stem.partition("-")[2])
                    if number not in found:
                        found[number] = decode(Rank, json.loads(path.read_bytes()))
        absent = [number for number in range(num_ranks) if number not in found]
        store = self._open_store() if also_store and absent else None
        for number in absent:
            if store is not None and store.check([f"{number}{SUMMARY}"]):
                found[number] = decode(Rank, json.loads(store.get(f"{number}{SUMMARY}").partition(b"\n")[2]))

    def _whole(self, rank: int) -> bytes:
        for folder in self._folders:
            if (path := folder / f"rank-{rank}{WHOLE}").exists():
                return path.read_bytes()
        store = self._open_store()
        num_chunks = int(store.get(f"{rank}{SUMMARY}").partition(b"\n")[0])
        return b"".join(store.get(f"{rank}{WHOLE}{number}") for number in range(num_chunks))

    def _open_store(self) -> Any:
        """Return the store that torchrun's agent holds, or None."""
        launch = read_launch()
        if self._store is None and launch.has_store and launch.meets_at is not None:
            from torch._C._distributed_c10d import TCPStore
            from torch.distributed.distributed_c10d import PrefixStore

            with contextlib.suppress(RuntimeError, OSError):  # the agent is gone
                store = TCPStore(
                    *launch.meets_at, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S)
                )
                self._store = PrefixStore(f"flatout/evidence/{os.environ.get(ATTEMPT, '0')}", store)
        return self._store


def _is_read(folder: Path) -> bool:
    """Return whether rank 0 reads a folder; a mark of a dead process on this host is stale."""
    try:
        mark = json.loads((folder / MARK).read_bytes())
        return mark["host"] != socket.gethostname() or psutil.pid_exists(int(mark["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False
