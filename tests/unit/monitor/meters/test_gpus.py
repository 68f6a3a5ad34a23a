"""The meter over played GPUs: the driver's own histories, a GPU that is lost, a driver that is restarted."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flatout.monitor
from flatout.monitor.meters.gpus import LONGEST_RETRY_S, GpuMeter
from flatout.monitor.sample import GpuSample
from flatout.testing.played_nvml import (
    BINDINGS,
    NOT_SUPPORTED,
    PlayedGpu,
    PlayedNvml,
    RefusedAnswer,
    played_mig_gpu,
)
from tests.support.monitor_played import GIB, PlayedClock, played_gpu

UNINITIALIZED = RefusedAnswer(BINDINGS.NVML_ERROR_UNINITIALIZED)


def read(meter: GpuMeter, clock: PlayedClock, *, after_s: float = 1.0) -> tuple[GpuSample, ...]:
    clock.now_s += after_s
    return meter.read(clock.now_s, time_s=clock.wall())


def test_the_drivers_history_is_averaged_and_not_its_last_value() -> None:
    clock = PlayedClock()
    gpu = played_gpu(clock, busy=60)
    gpu.answers["nvmlDeviceGetUtilizationRates"] = SimpleNamespace(gpu=3, memory=0)
    (sample,) = read(GpuMeter(PlayedNvml(gpu)), clock)
    assert sample.utilisation_share == 0.6
    assert sample.memory_used_bytes == 8 * GIB
    assert sample.power_w == pytest.approx(500.0)
    assert sample.energy_j == pytest.approx(500 * clock.now_s)
    assert (sample.temperature_c, sample.sm_clock_hz, sample.throttle_reasons) == (38.0, 1980e6, ())


def test_a_value_of_the_history_counts_once() -> None:
    clock = PlayedClock()
    gpu = played_gpu(clock)
    old = SimpleNamespace(timeStamp=int(clock.wall() * 1e6), sampleValue=SimpleNamespace(uiVal=90))
    gpu.answers |= {
        "nvmlDeviceGetSamples": (BINDINGS.NVML_VALUE_TYPE_UNSIGNED_INT, [old]),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=10, memory=0),
    }
    meter = GpuMeter(PlayedNvml(gpu))
    shares = [read(meter, clock, after_s=0.5)[0].utilisation_share for _ in range(5)]
    assert shares == [0.9, 0.9, 0.9, 0.9, 0.1]


def test_a_history_is_read_every_other_second_and_whole() -> None:
    clock = PlayedClock()
    gpu = played_gpu(clock, busy=60)
    history, asked = gpu.answers["nvmlDeviceGetSamples"], []
    gpu.answers["nvmlDeviceGetSamples"] = lambda kind, since: [asked.append(since), history(kind, since)][1]
    meter = GpuMeter(PlayedNvml(gpu))
    shares = [read(meter, clock, after_s=0.5)[0].utilisation_share for _ in range(9)]
    assert shares == [0.6] * 9
    assert len(asked) == len(set(asked)) == 3


def test_what_moves_slowly_is_asked_now_and_then_and_stands_meanwhile() -> None:
    clock = PlayedClock()
    gpu = played_gpu(clock)
    meter = GpuMeter(PlayedNvml(gpu))
    read(meter, clock)
    asked, temperatures, processes = [], [], []
    for number in range(11):
        gpu.answers["nvmlDeviceGetTemperature"] = gpu.answers["nvmlDeviceGetTemperatureV"] = 40 + number
        before = gpu.num_asked
        temperatures.append(read(meter, clock)[0].temperature_c)
        asked.append(gpu.num_asked - before)
        processes.append(len(meter.rows))
    assert temperatures == [38.0] * 4 + [44.0] * 5 + [49.0] * 2
    assert max(asked[:4]) <= 6 < asked[4]
    assert len(set(processes)) == 1


def test_activity_of_the_processors_needs_two_readings() -> None:
    clock = PlayedClock()
    meter = GpuMeter(PlayedNvml(played_gpu(clock, sm=42)))
    assert read(meter, clock)[0].sm_active_share is None
    assert read(meter, clock)[0].sm_active_share == pytest.approx(0.42)


def test_a_gpu_without_performance_metrics_says_so() -> None:
    clock = PlayedClock()
    (sample,) = read(GpuMeter(PlayedNvml(played_gpu(clock, sm=None))), clock)
    assert sample.sm_active_share is None
    assert "Hopper" in sample.missing["sm_active_share"]


def test_a_lost_gpu_has_no_figures_and_is_asked_again_in_a_growing_rhythm() -> None:
    clock = PlayedClock()
    gpus = [played_gpu(clock), played_gpu(clock, number=1)]
    meter = GpuMeter(PlayedNvml(*gpus))
    assert [sample.lost for sample in read(meter, clock)] == [False, False]
    gpus[1].lost_after = gpus[1].num_asked
    asked = []
    for _ in range(30):
        samples = read(meter, clock)
        asked.append(gpus[1].num_asked)
        assert samples[0].utilisation_share == 0.95
        assert samples[1].lost
        assert (samples[1].utilisation_share, samples[1].memory_used_bytes) == (None, None)
        assert "lost" in samples[1].missing["utilisation_share"].lower()
    tries = [second for second, (a, b) in enumerate(itertools.pairwise(asked)) if b > a]
    assert tries == [0, 2, 6, 14]
    assert meter.notes == ["GPU 1 is lost: NVML: GPU is lost"]
    gpus[1].lost_after = None
    read(meter, clock, after_s=LONGEST_RETRY_S)
    assert meter.notes[-1] == "GPU 1 answers again"
    assert not read(meter, clock)[1].lost


def test_a_restarted_driver_is_connected_again_with_one_start_each() -> None:
    clock = PlayedClock()
    gpu = played_gpu(clock)
    nvml = PlayedNvml(gpu)
    meter = GpuMeter(nvml)
    for _ in range(5):
        read(meter, clock)
    assert nvml.calls.count("nvmlInit") == 1
    working = dict(gpu.answers)
    gpu.answers = dict.fromkeys(working, UNINITIALIZED)
    nvml.system["nvmlInit"] = RefusedAnswer(BINDINGS.NVML_ERROR_DRIVER_NOT_LOADED)
    (sample,) = read(meter, clock)
    assert (sample.utilisation_share, sample.memory_used_bytes) == (None, None)
    for _ in range(10):
        (sample,) = read(meter, clock)
        assert sample.lost
    assert nvml.calls.count("nvmlInit") < 7  # it was not asked every second
    gpu.answers = working
    nvml.system["nvmlInit"] = None
    (sample,) = read(meter, clock, after_s=LONGEST_RETRY_S)
    assert sample.utilisation_share == 0.95
    assert meter.notes == [
        "no GPU answers; reconnecting to the NVIDIA driver",
        "the NVIDIA driver answers again",
    ]


def test_a_machine_without_a_driver_is_a_sentence_and_no_gpus() -> None:
    clock = PlayedClock()
    nvml = PlayedNvml(nvmlInit=RefusedAnswer(BINDINGS.NVML_ERROR_LIBRARY_NOT_FOUND))
    meter = GpuMeter(nvml)
    assert read(meter, clock) == ()
    assert meter.refusal == "no NVIDIA driver: the NVML library is not on this machine"
    meter.close()


def test_instances_of_a_gpu_in_mig_mode_have_their_memory() -> None:
    clock = PlayedClock()
    meter = GpuMeter(PlayedNvml(played_mig_gpu()))
    samples = read(meter, clock)
    assert [sample.key for sample in samples] == [(0, None), (0, 0), (0, 2)]
    assert samples[1].memory_used_bytes == GIB
    assert "MIG" in samples[1].missing["utilisation_share"]


def test_visible_gpus_and_ids_are_nvmls_numbers() -> None:
    clock = PlayedClock()
    gpus = [played_gpu(clock, number=number) for number in range(3)]
    meter = GpuMeter(PlayedNvml(*gpus))
    read(meter, clock)
    assert meter.visible(None) == (0, 1, 2)
    assert meter.visible("2,0") == (2, 0)
    assert meter.visible("GPU-00000001") == (1,)
    assert meter.visible("") == ()
    assert meter.index_of("00000002-bb37-74c5-28e6-909b2c7e2234") == 2
    assert meter.index_of("GPU-00000001-bb37-74c5-28e6-909b2c7e2234") == 1
    assert (meter.index_of(None), meter.index_of("other")) == (None, None)


@pytest.mark.parametrize("refused", [NOT_SUPPORTED, RefusedAnswer(BINDINGS.NVML_ERROR_NO_PERMISSION)])
def test_every_question_may_be_refused(refused: RefusedAnswer) -> None:
    clock = PlayedClock()
    names = sorted(played_gpu(clock).answers)
    assert len(names) > 15
    for name in names:
        if name == "nvmlDeviceGetHandleByIndex":
            continue
        gpu = played_gpu(clock)
        gpu.answers[name] = refused
        (sample,) = read(GpuMeter(PlayedNvml(gpu)), clock)
        assert sample.index == 0


def test_a_gpu_that_does_not_open_is_lost_from_the_start() -> None:
    clock = PlayedClock()
    closed = PlayedGpu()
    closed.answers["nvmlDeviceGetHandleByIndex"] = RefusedAnswer(BINDINGS.NVML_ERROR_GPU_IS_LOST)
    meter = GpuMeter(PlayedNvml(played_gpu(clock), closed))
    samples = read(meter, clock)
    assert [sample.lost for sample in samples] == [False, True]


def test_every_question_of_the_room_is_one_of_the_bindings() -> None:
    asked: set[Any] = set()
    for path in Path(flatout.monitor.__file__).parent.rglob("*.py"):
        asked |= set(re.findall(r'"(nvml\w+|NVML_\w+)"', path.read_text()))
    assert len(asked) > 20
    assert not [name for name in asked if not hasattr(BINDINGS, name)]
