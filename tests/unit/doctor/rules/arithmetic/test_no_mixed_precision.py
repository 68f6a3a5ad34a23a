from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.arithmetic.no_mixed_precision import detect
from flatout.measure.evidence import Gpu, Precision


def multiplying(made, *, autocast=3.0, device="cuda", **fields):
    return made.evidence(
        device=device,
        **{
            "kernels": made.kernels(matmul_s_by_dtype={"fp32": 0.1}, busy_share=0.9),
            "module_calls": (made.module_call(), made.module_call(place=made.place(41), host_s=0.001)),
            "counterfactuals": (made.counterfactual("autocast", autocast),),
            **fields,
        },
    )


def gpu(**changes):
    made = Gpu(
        name="NVIDIA A100",
        memory_bytes=80 * 2**30,
        compute_capability="8.0",
        peak_flops={"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
    )
    return dataclasses.replace(made, **changes)


def test_fires_at_the_training_forward(made):
    (finding,) = detect(multiplying(made))
    assert (finding.code, finding.name) == ("FO401", "no-mixed-precision")
    assert finding.place == made.place(40)
    assert finding.share == pytest.approx(0.5)
    assert finding.ceiling.speedup == pytest.approx(3.0)
    assert finding.safety == "lossy"
    assert "torch.bfloat16" in finding.fix


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [("9.0", "bfloat16"), ("8.0", "bfloat16"), ("7.5", "float16"), ("6.1", None), (None, None)],
)
def test_the_format_is_one_the_gpu_has(made, capability, dtype):
    findings = detect(multiplying(made, gpu=gpu(compute_capability=capability)))
    assert bool(findings) == (dtype is not None)
    if dtype:
        assert f"torch.{dtype}" in findings[0].fix
        assert ("GradScaler" in findings[0].fix) == (dtype == "float16")


def precision(**changes):
    made = Precision(parameter_dtypes=("float32",), autocast=None, tf32_matmul=False, bf16_supported=True)
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"parameter_dtypes": ("bfloat16",)},
        {"parameter_dtypes": ("float32", "bfloat16")},
        {"parameter_dtypes": ()},
    ],
)
def test_a_job_that_already_uses_16_bits_is_left_alone(made, changes):
    assert detect(multiplying(made, precision=precision(**changes))) == []


def test_the_call_that_runs_in_full_precision_is_named(made):
    student = made.module_call(autocast="bfloat16", host_s=1.0)
    head = made.module_call(place=made.place(41), host_s=0.01)
    mixed = {"precision": precision(autocast="bfloat16")}
    (finding,) = detect(multiplying(made, module_calls=(student, head), **mixed))
    assert finding.place == made.place(41)
    assert detect(multiplying(made, module_calls=(student,), **mixed)) == []


def test_look_alikes(made):
    assert detect(multiplying(made, autocast=1.0)) == []
    assert detect(multiplying(made, counterfactuals=())) == []  # it was not tried
    assert detect(multiplying(made, device="cpu")) == []
    assert detect(multiplying(made, precision=None)) == []
    assert detect(multiplying(made, gpu=None)) == []


def test_without_a_known_forward_there_is_no_place(made):
    (finding,) = detect(multiplying(made, module_calls=()))
    assert finding.place is None
