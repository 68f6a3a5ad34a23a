"""A week of eight GPUs at one sample a second, written with a simulated clock."""

from __future__ import annotations

import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from flatout.monitor.past.history import HistoryWriter, replay
from flatout.monitor.sample import GpuSample, HostSample, JobSample, ProcessSample, Sample

NUM_GPUS = 8
START_S = 1.7e9
SECONDS_PER_DAY = 86400


def sample_of(second: int, noise: random.Random) -> Sample:
    """A busy machine whose every figure moves: nothing here compresses better than a real run."""
    return Sample(
        time_s=START_S + second + noise.random() / 1000,
        span_s=1.0 + noise.random() / 1000,
        host=HostSample(
            cpu_share=noise.random(),
            cores=96.0,
            memory_used_bytes=noise.randrange(2**38),
            memory_total_bytes=2**40,
            memory_limited_by="the machine",
            shm_free_bytes=noise.randrange(2**38),
            disk_read_bytes_per_s=noise.random() * 1e9,
            disk_write_bytes_per_s=noise.random() * 1e9,
            network_received_bytes_per_s=noise.random() * 1e9,
            network_sent_bytes_per_s=noise.random() * 1e9,
        ),
        gpus=tuple(_gpu(index, second, noise) for index in range(NUM_GPUS)),
        processes=tuple(
            ProcessSample(
                pid=40_000 + index,
                gpu_index=index,
                name="python3",
                gpu_memory_bytes=noise.randrange(2**37),
                sm_share=noise.random(),
                cpu_cores=noise.random() * 4,
                memory_bytes=noise.randrange(2**35),
            )
            for index in range(NUM_GPUS)
        ),
        job=JobSample(
            pid=40_000,
            name="train",
            steps=second * 4,
            samples=second * 128,
            step_s=noise.random(),
            steps_per_s=noise.random() * 10,
            samples_per_s=noise.random() * 320,
            since_step_s=noise.random(),
            phases={"wait": noise.random(), "rest": noise.random()},
            device_phases={"wait": noise.random(), "rest": noise.random()},
            loss=noise.random(),
            learning_rate=noise.random() / 1000,
            allocated_bytes=noise.randrange(2**37),
            reserved_bytes=noise.randrange(2**37),
            peak_allocated_bytes=noise.randrange(2**37),
            gpu_index=0,
            visible_gpus=tuple(range(NUM_GPUS)),
            energy_per_step_j=noise.random() * 1000,
            energy_per_sample_j=noise.random() * 10,
        ),
    )


def _gpu(index: int, second: int, noise: random.Random) -> GpuSample:
    return GpuSample(
        index=index,
        name="NVIDIA H200",
        uuid=f"GPU-{index:08d}-bb37-74c5-28e6-909b2c7e2234",
        utilisation_share=noise.random(),
        sm_active_share=noise.random(),
        sm_occupancy_share=noise.random(),
        tensor_active_share=noise.random(),
        memory_bandwidth_share=noise.random(),
        memory_used_bytes=noise.randrange(2**37),
        memory_total_bytes=150754820096,
        power_w=noise.random() * 700,
        power_limit_w=700.0,
        energy_j=3e8 + second * 600.0,
        temperature_c=40.0 + noise.randrange(40),
        sm_clock_hz=1980e6 - noise.randrange(500) * 1e6,
        sm_clock_max_hz=1980e6,
        memory_clock_hz=3201e6,
        throttle_reasons=("power cap",) if noise.random() < 0.3 else (),
        pcie_received_bytes_per_s=noise.random() * 5e10,
        pcie_sent_bytes_per_s=noise.random() * 5e10,
    )


def write_week(*, days: float) -> dict[str, Any]:
    """Bytes on disk at the most, memory of this process at quarters of the time, seconds to write."""
    noise = random.Random(0)
    num = int(days * SECONDS_PER_DAY)
    process = psutil.Process()
    memory, largest, spent_s = [], 0, 0.0
    with TemporaryDirectory() as name:
        folder = Path(name)
        writer = HistoryWriter(folder)
        for second in range(num):
            sample = sample_of(second, noise)
            start = time.process_time()
            writer(sample)
            spent_s += time.process_time() - start
            if second % max(num // 4, 1) == 0:
                memory.append(process.memory_info().rss)
            if second % 1000 == 0:
                largest = max(largest, _size(folder))
        writer.close()
        largest = max(largest, _size(folder))
        num_replayed = sum(1 for _ in replay(folder))
    return {
        "days": days,
        "gpus": NUM_GPUS,
        "samples": num,
        "disk_bytes": largest,
        "rss_bytes_by_quarter": memory,
        "write_cpu_s_per_sample": spent_s / num,
        "samples_replayed": num_replayed,
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
