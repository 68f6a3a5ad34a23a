"""Control groups of both versions, nested, seen through a container's window, and damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.hardware.cgroup import LimitingGroups, limiting_groups

V2_MOUNT = "32 23 0:28 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)
NO_LIMIT_V1 = "9223372036854771712\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@dataclass(frozen=True, kw_only=True)
class CgroupLimits:
    """What the limiting groups say."""

    cores: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None


def read_limits(root: Path) -> CgroupLimits:
    groups = limiting_groups(root)
    return CgroupLimits(
        cores=groups.cores, memory_bytes=groups.memory_bytes, memory_used_bytes=groups.memory_used_bytes()
    )


def version_2(root: Path, *, group: str, files: dict[str, str], top: str = "/") -> CgroupLimits:
    write(root, {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": V2_MOUNT.format(top=top)})
    write(root, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    return read_limits(root)


def version_1(root: Path, *, group: str, files: dict[str, str], top: str = "/") -> CgroupLimits:
    lines = f"4:memory:{group}\n3:cpu,cpuacct:{group}\n1:name=systemd:/\n0::/\n"
    write(root, {"proc/self/cgroup": lines, "proc/self/mountinfo": V1_MOUNTS.format(top=top)})
    write(root, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    return read_limits(root)


def test_no_control_groups_set_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == CgroupLimits()


def test_version_2_in_its_own_namespace(tmp_path: Path) -> None:
    files = {
        "cpu.max": "150000 100000\n",
        "memory.max": "1000000\n",
        "memory.current": "700000\n",
        "memory.stat": "anon 1\ninactive_file 200000\n",
    }
    limits = version_2(tmp_path, group="/", files=files)
    assert limits == CgroupLimits(cores=1.5, memory_bytes=1000000, memory_used_bytes=500000)


def test_version_2_without_limits(tmp_path: Path) -> None:
    assert (
        version_2(tmp_path, group="/", files={"cpu.max": "max 100000\n", "memory.max": "max\n"})
        == CgroupLimits()
    )


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "pod/cpu.max": "200000 100000\n",
        "pod/memory.max": "500\n",
        "pod/memory.current": "50\n",
        "pod/job/cpu.max": "400000 100000\n",
        "pod/job/memory.max": "900\n",
        "pod/job/memory.current": "90\n",
        "pod/other/cpu.max": "10000 100000\n",
    }
    limits = version_2(tmp_path, group="/pod/job", files=files)
    assert limits == CgroupLimits(cores=2.0, memory_bytes=500, memory_used_bytes=50)


def test_version_1(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/docker/x/cpu.cfs_quota_us": "250000\n",
        "cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
        "memory/docker/x/memory.limit_in_bytes": "800\n",
        "memory/docker/x/memory.usage_in_bytes": "300\n",
        "memory/docker/x/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
        "memory/memory.limit_in_bytes": NO_LIMIT_V1,
    }
    limits = version_1(tmp_path, group="/docker/x", files=files)
    assert limits == CgroupLimits(cores=2.5, memory_bytes=800, memory_used_bytes=200)


def test_version_1_without_limits(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": NO_LIMIT_V1,
    }
    assert version_1(tmp_path, group="/", files=files) == CgroupLimits()


def test_a_container_that_sees_only_its_own_part(tmp_path: Path) -> None:
    """The mount shows /docker/x, so the group /docker/x/job is the folder job in it."""
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "100000",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "memory/job/memory.limit_in_bytes": "64",
    }
    limits = version_1(tmp_path, group="/docker/x/job", top="/docker/x", files=files)
    assert limits == CgroupLimits(cores=1.0, memory_bytes=64)


@pytest.mark.parametrize("group", ["/../other", "/elsewhere"])
def test_a_group_outside_the_window_falls_back_to_its_top(tmp_path: Path, group: str) -> None:
    limits = version_2(
        tmp_path, group=group, top="/" if ".." in group else "/docker/x", files={"memory.max": "77"}
    )
    assert limits.memory_bytes == 77


def test_both_versions_mounted_beside_each_other(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "800", "unified/cgroup.procs": "1\n"}
    version_1(tmp_path, group="/", files=files)
    mounts = V1_MOUNTS.format(top="/") + V2_MOUNT.format(top="/").replace("cgroup rw", "cgroup/unified rw")
    write(tmp_path, {"proc/self/mountinfo": mounts})
    assert read_limits(tmp_path) == CgroupLimits(memory_bytes=800)


def test_a_mount_point_with_a_space(tmp_path: Path) -> None:
    mount = "32 23 0:28 / /my\\040groups rw - cgroup2 cgroup2 rw\n"
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": mount, "my groups/memory.max": "5"})
    assert read_limits(tmp_path).memory_bytes == 5


@pytest.mark.parametrize("text", ["", "garbage", "0 100000", "100000 0", "-1 100000", "1.5 2", "\x00"])
def test_a_damaged_quota_is_no_limit(tmp_path: Path, text: str) -> None:
    assert version_2(tmp_path, group="/", files={"cpu.max": text, "memory.max": text}).cores is None


@given(
    quotas=st.lists(
        st.one_of(st.none(), st.integers(min_value=1000, max_value=10**7)), min_size=1, max_size=4
    )
)
def test_the_result_is_the_smallest_quota_of_any_depth(
    tmp_path_factory: pytest.TempPathFactory, quotas: list[int | None]
) -> None:
    root = tmp_path_factory.mktemp("tree")
    folders = ["/".join(["g"] * depth) for depth in range(len(quotas))]
    files = {
        f"{folder}/cpu.max".lstrip("/"): "max 100000" if quota is None else f"{quota} 100000"
        for folder, quota in zip(folders, quotas, strict=True)
    }
    limits = version_2(root, group=f"/{folders[-1]}", files=files)
    set_quotas = [quota / 100_000 for quota in quotas if quota is not None]
    assert limits.cores == min(set_quotas, default=None)


def test_the_group_with_the_tightest_quota_is_read_again_and_again(tmp_path: Path) -> None:
    version_2(
        tmp_path,
        group="/outer/inner",
        files={
            "outer/cpu.max": "100000 100000\n",
            "outer/cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
            "outer/inner/cpu.max": "300000 100000\n",
            "outer/inner/memory.max": "1000\n",
            "outer/inner/memory.current": "600\n",
        },
    )
    groups = limiting_groups(tmp_path)
    assert (groups.cores, groups.memory_bytes) == (1.0, 1000)
    assert (groups.cpu_used_s(), groups.memory_used_bytes()) == (2.5, 600)
    (tmp_path / "sys/fs/cgroup/outer/cpu.stat").write_text("usage_usec 3000000\n")
    assert groups.cpu_used_s() == 3.0


def test_version_1_counts_nanoseconds_in_the_twin_controller(tmp_path: Path) -> None:
    version_1(
        tmp_path,
        group="/",
        files={
            "cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/cpuacct.usage": "1500000000\n",
        },
    )
    assert limiting_groups(tmp_path).cpu_used_s() == 1.5


def test_groups_without_limits_tell_no_use(tmp_path: Path) -> None:
    groups = limiting_groups(tmp_path)
    assert groups == LimitingGroups()
    assert (groups.cpu_used_s(), groups.memory_used_bytes()) == (None, None)
    version_2(tmp_path, group="/", files={"cpu.max": "100000 100000\n", "cpu.stat": "usage_usec many\n"})
    assert limiting_groups(tmp_path).cpu_used_s() is None
