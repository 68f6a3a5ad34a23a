"""The limits a container sets, which neither os.cpu_count() nor the machine's memory shows.

Linux keeps them in control groups.  A process is in one group per controller, named in /proc/self/cgroup;
groups are nested, and a limit of any group above binds as well, so the tightest on the way up counts.
Version 2 has one tree (cpu.max, memory.max); version 1 has one per controller (cpu.cfs_quota_us,
memory.limit_in_bytes); machines exist with both mounted.  /proc/self/mountinfo says where the trees hang
and which part of them can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

# Version 1 writes "no limit" as the largest multiple of the page size below 2**63.
NO_LIMIT_BYTES = 2**62
Limit = TypeVar("Limit", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitingGroups:
    """The groups that set the tightest limits between this process's group and the root.

    They are found once, then read again and again at little cost.
    """

    cores: float | None = None  # None: no limit is set
    cpu_folder: Path | None = None
    memory_bytes: int | None = None
    memory_folder: Path | None = None

    def cpu_used_s(self) -> float | None:
        """Read the CPU seconds that the group with the quota has used since it was made."""
        return None if self.cpu_folder is None else _cpu_used_s(self.cpu_folder)

    def memory_used_bytes(self) -> int | None:
        """Read the bytes of the group with the limit, without the cache it can drop."""
        return None if self.memory_folder is None else _memory_used(self.memory_folder)


def limiting_groups(root: Path = Path("/")) -> LimitingGroups:
    """Find the groups that bind this process; `root` is the root of the file system."""
    groups, mounts = _groups(root), list(_mounts(root))

    def tightest(
        controller: str, limit_of: Callable[[Path], Limit | None]
    ) -> tuple[Limit | None, Path | None]:
        folders = _folders(groups, mounts, controller=controller)
        found = [(limit, folder) for folder in folders if (limit := limit_of(folder)) is not None]
        return min(found, key=lambda each: each[0], default=(None, None))

    cores, cpu_folder = tightest("cpu", _quota)
    memory_bytes, memory_folder = tightest("memory", _memory_limit)
    return LimitingGroups(
        cores=cores, cpu_folder=cpu_folder, memory_bytes=memory_bytes, memory_folder=memory_folder
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mount:
    folder: Path
    top: PurePosixPath  # the group that the folder shows
    controllers: frozenset[str] | None  # None: version 2, which has all of them


def _read(path: Path) -> str | None:
    """Read a file; None if it is absent or hidden, as is common in containers."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _groups(root: Path) -> dict[str, PurePosixPath]:
    """Map each controller to this process's group; version 2 has the empty name."""
    groups = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            groups[controller] = PurePosixPath(path)
    return groups


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        options = frozenset(kinds[2].split(","))
        yield _Mount(
            folder=root / _unescape(fields[4]).lstrip("/"),
            top=PurePosixPath(_unescape(fields[3])),
            controllers=None if kinds[0] == "cgroup2" else options,
        )


def _unescape(text: str) -> str:
    """Undo mountinfo's escapes: it writes a space as \\040."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _folders(groups: dict[str, PurePosixPath], mounts: list[_Mount], *, controller: str) -> Iterator[Path]:
    """Yield the process's group and every visible group above it."""
    for mount in mounts:
        if mount.controllers is not None and controller not in mount.controllers:
            continue
        group = groups.get("" if mount.controllers is None else controller)
        if group is None:
            continue
        # A group outside the visible part ("/../other") leaves only the top of what can be seen.
        inside = group.relative_to(mount.top) if group.is_relative_to(mount.top) else PurePosixPath()
        steps = () if ".." in inside.parts else inside.parts
        for depth in range(len(steps), -1, -1):
            yield mount.folder.joinpath(*steps[:depth])


def _number(text: str | None) -> int | None:
    """Parse a whole number; None for "max", "-1" and anything else."""
    return int(text) if text is not None and text.strip().isdigit() else None


def _quota(folder: Path) -> float | None:
    """Read the cores that a group may use on average."""
    quota_text, _, period_text = (_read(folder / "cpu.max") or "").partition(" ")
    quota = _number(quota_text) or _number(_read(folder / "cpu.cfs_quota_us"))
    period = _number(period_text) or _number(_read(folder / "cpu.cfs_period_us"))
    return quota / period if quota and period else None


def _cpu_used_s(folder: Path) -> float | None:
    """Read CPU seconds: microseconds in cpu.stat (version 2), nanoseconds in cpuacct.usage (version 1)."""
    for line in (_read(folder / "cpu.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec" and (used_us := _number(value)) is not None:
            return used_us / 1e6
    used_ns = _number(_read(folder / "cpuacct.usage"))
    return None if used_ns is None else used_ns / 1e9


def _memory_limit(folder: Path) -> int | None:
    limit = _number(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
    return None if limit is None or limit >= NO_LIMIT_BYTES else limit


def _memory_used(folder: Path) -> int | None:
    used = _number(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes"))
    if used is None:
        return None
    lines = (_read(folder / "memory.stat") or "").splitlines()
    statistics = {name: _number(value) for name, _, value in (line.partition(" ") for line in lines)}
    droppable = statistics.get("total_inactive_file") or statistics.get("inactive_file") or 0
    return max(used - droppable, 0)
