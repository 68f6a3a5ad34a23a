"""Single questions: the first answer wins, and every refusal leaves its reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flatout.hardware.nvml_questions import WHOLE_GPU_FIELDS, Questions, read_gpu_fields, text_of
from flatout.testing.played_nvml import BINDINGS, NOT_SUPPORTED, PlayedGpu, PlayedNvml


def questions_to(gpu: PlayedGpu, **options: Any) -> Questions:
    return Questions(PlayedNvml(gpu, **options), gpu)


def test_a_second_call_is_asked_only_when_the_first_is_refused() -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetCurrentClocksEventReasons"] = NOT_SUPPORTED
    gpu.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x4 | 0x40
    questions = questions_to(gpu)
    assert read_gpu_fields(questions)["throttle_reasons"] == ("power cap", "thermal limit (hardware)")
    assert questions.missing == {}


def test_a_function_that_the_bindings_lack_is_named() -> None:
    questions = questions_to(PlayedGpu(), absent=("nvmlDeviceGetPowerUsage",))
    assert read_gpu_fields(questions)["power_w"] is None
    assert questions.missing == {"power_w": "the installed nvidia-ml-py has no nvmlDeviceGetPowerUsage"}


def test_a_driver_older_than_the_bindings_is_a_refusal() -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetComputeRunningProcesses"] = BINDINGS.NVMLLibraryMismatchError("too old")
    questions = questions_to(gpu)
    assert read_gpu_fields(questions)["processes"] is None
    assert questions.missing["processes"] == "NVML: too old"


def test_a_defect_is_not_a_refusal() -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetName"] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        read_gpu_fields(questions_to(gpu))


def test_memory_without_the_reserved_part_says_so() -> None:
    questions = questions_to(PlayedGpu(), absent=("nvmlMemory_v2",))
    fields = read_gpu_fields(questions)
    assert fields["memory_used_bytes"] == 1295908864
    assert fields["memory_reserved_bytes"] is None
    assert questions.missing == {"memory_reserved_bytes": "this driver counts it as used"}


@pytest.mark.parametrize("value", [2**32 - 1, 2**64 - 1])
def test_nvmls_own_mark_for_no_value_is_not_a_number(value: int) -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetPowerUsage"] = value
    questions = questions_to(gpu)
    assert read_gpu_fields(questions)["power_w"] is None
    assert questions.missing == {"power_w": "NVML has no value for it"}


def test_unknown_throttle_bits_are_shown_and_idle_is_named() -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetCurrentClocksEventReasons"] = 0x1 | 0x1000
    assert read_gpu_fields(questions_to(gpu))["throttle_reasons"] == ("idle", "unknown (0x1000)")


def test_processes_of_both_kinds_are_joined_by_their_number() -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetComputeRunningProcesses"] = [
        SimpleNamespace(pid=9, usedGpuMemory=None),
        SimpleNamespace(pid=433, usedGpuMemory=5),
    ]
    gpu.answers["nvmlDeviceGetGraphicsRunningProcesses"] = [SimpleNamespace(pid=433, usedGpuMemory=7)]
    unnamed, named = read_gpu_fields(questions_to(gpu))["processes"]
    assert (named.kind, named.used_bytes, named.missing) == ("compute and graphics", 7, {})
    assert (unnamed.pid, unnamed.name, unnamed.used_bytes) == (9, None, None)
    assert set(unnamed.missing) == {"name", "used_bytes"}


def test_a_process_name_that_is_no_text_is_unknown() -> None:
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    fields = read_gpu_fields(questions_to(PlayedGpu(), nvmlSystemGetProcessName=error))
    assert fields["processes"][0].name is None
    assert "name" in fields["processes"][0].missing


def test_graphics_processes_may_be_unknown_where_compute_ones_are_known() -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetGraphicsRunningProcesses"] = NOT_SUPPORTED
    questions = questions_to(gpu)
    assert len(read_gpu_fields(questions)["processes"]) == 1
    assert set(questions.missing) == {"graphics_processes"}


def test_an_instance_is_not_asked_what_only_whole_gpus_know() -> None:
    gpu = PlayedGpu()
    questions = questions_to(gpu)
    fields = read_gpu_fields(questions, instance=True)
    assert not set(WHOLE_GPU_FIELDS) & set(fields)
    assert set(questions.missing) == set(WHOLE_GPU_FIELDS)


def test_old_bindings_answer_in_bytes() -> None:
    assert text_of(b"Tesla T4") == "Tesla T4"
    assert text_of("Tesla T4") == "Tesla T4"
    assert text_of(None) is None
