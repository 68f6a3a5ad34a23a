"""Each device gets the fastest format that it multiplies in hardware, and only float16 scales its losses."""

from __future__ import annotations

import pytest

from flatout.engines.adapters.lora.precision import choose_precision, needs_scaler
from flatout.hardware.matching import find_datasheet


@pytest.mark.parametrize(("gpu", "expected"), [("T4", "float16"), ("H200", "bfloat16")])
def test_a_gpu_gets_what_its_cores_multiply(gpu: str, expected: str) -> None:
    sheet = find_datasheet(gpu)
    assert sheet is not None
    major, minor = map(int, sheet.compute_capability.split("."))
    chosen = choose_precision("auto", device_type="cuda", capability=(major, minor))
    assert (chosen.value, chosen.source) == (expected, "datasheet")
    assert sheet.compute_capability in chosen.reason


def test_before_tensor_cores_and_on_a_cpu_it_is_float32() -> None:
    assert choose_precision("auto", device_type="cuda", capability=(6, 1)).value == "float32"
    assert choose_precision("auto", device_type="cpu", capability=None).value == "float32"


def test_what_is_given_is_taken() -> None:
    assert choose_precision("bfloat16", device_type="cpu", capability=None).value == "bfloat16"
    assert choose_precision("float32", device_type="cuda", capability=(9, 0)).reason == "it was given"


def test_only_float16_loses_small_gradients() -> None:
    assert [needs_scaler(each) for each in ("float32", "bfloat16", "float16")] == [False, False, True]
