"""The machine that a proof was made on, and whether this one differs.

One GPU name is not one machine: behind a slow host the same GPU launches kernels half as fast, and a
treatment that saves launches gains twice as much.  So the proof records two latencies beside the hardware: of
one launch, and of one value read back.  A separate process measures them, because a process that has used a
GPU keeps a part of its memory.
"""

from __future__ import annotations

import functools
import json
import platform
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from flatout import __version__
from flatout.ground.packages import installed_version
from flatout.ground.script.main import start_command
from flatout.measure.evidence import Evidence

MODULE = "flatout.tuner.results.machine"
LAUNCHES, REPEATS = 200, 7
LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Hardware and versions; unknown is None."""

    device: str  # the GPU's name, or "cpu"
    cpu: str
    cores: float | None = None  # cores that a job may use
    launch_s: float | None = None  # from one tiny operation to the next, on the host
    device_to_host_s: float | None = None  # to read one value that is ready; None on a CPU
    python: str = ""
    torch: str = ""
    flatout: str = ""


def machine_of(evidence: Evidence) -> Machine:
    """Return the machine that a job was measured on, which is this one."""
    job, host = evidence.job, evidence.host
    launch_s, read_s = measure_apart()
    return Machine(
        device=job.device_name or job.device,
        cpu=host.cpu_model or platform.processor() or "unknown",
        cores=host.cores,
        launch_s=launch_s,
        device_to_host_s=read_s,
        python=job.python,
        torch=job.torch,
        flatout=__version__,
    )


def differences(proven: Machine) -> list[str]:
    """Describe how this machine differs from that of a proof; what cannot be read does not differ."""
    from flatout.hardware.host import read_host
    from flatout.hardware.nvml import read_gpus

    host, gpus = read_host(), read_gpus().gpus
    gpu = gpus[0].name if gpus else None
    found = []
    if proven.device != "cpu" and proven.device != gpu:
        found.append(f"{gpu or 'no GPU'} instead of {proven.device}")
    if host.cpu_model and proven.cpu not in ("unknown", host.cpu_model):
        found.append(f"{host.cpu_model} instead of {proven.cpu}")
    if host.cores and proven.cores and round(host.cores) != round(proven.cores):
        found.append(f"{host.cores:g} cores instead of {proven.cores:g}")
    torch = installed_version("torch")
    if torch and proven.torch and torch.partition("+")[0] != proven.torch.partition("+")[0]:
        found.append(f"torch {torch} instead of {proven.torch}")
    return found


@functools.cache
def measure_apart() -> tuple[float | None, float | None]:
    """Measure the latencies in another process; None if that fails."""
    try:
        done = subprocess.run(
            start_command(MODULE, ""), capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        launch_s, read_s = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, None
    return launch_s, read_s


def main(_at_start: Collection[str]) -> None:
    print(json.dumps(measure()))


def measure() -> tuple[float, float | None]:
    """Return the seconds of one launch, and of one value read from a GPU: medians of a few."""
    import torch

    on_gpu = torch.cuda.is_available()
    value = torch.ones(1, device="cuda" if on_gpu else "cpu")

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def launch() -> None:
        for _ in range(LAUNCHES):
            value.add_(1)

    def read() -> None:
        for _ in range(LAUNCHES):
            value.item()

    launch_s = _median_s(launch, wait) / LAUNCHES
    return launch_s, _median_s(read, wait) / LAUNCHES if on_gpu else None


def _median_s(action: Callable[[], Any], wait: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        wait()
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)  # without the wait: only the host's time
    return sorted(times)[REPEATS // 2]
