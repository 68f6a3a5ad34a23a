"""Every treatment: what it is proposed for, and what it does to a job."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.ground.errors import BadInput
from flatout.measure.evidence import (
    Evidence,
    Gpu,
    Host,
    Kernels,
    Loader,
    ObservedJob,
    Place,
    Precision,
    Site,
    Step,
)
from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Dose, Switch, all_treatments, install, read_dose

JOB = ObservedJob(
    command=("train.py",), folder="x", started_at="", ended="measured", exit_code=0, error=None, device="cpu",
    device_name=None, python="3.11", torch="2.13", flatout="0", anchor="AdamW.step",
)  # fmt: skip
LOADER = Loader(
    place=None, dataset="D", num_workers=0, batch_size=8, pin_memory=False, persistent_workers=False,
    prefetch_factor=None, num_batches=10, trains=True,
)  # fmt: skip
KERNELS = Kernels(
    num_steps=1, step_s=0.1, busy_share=0.5, num_kernels=10, median_kernel_s=None, gap_s=None,
    sync_gap_s=None, num_syncs=None, by_category_s={"convolution": 0.05}, matmul_s_by_dtype={}, top=(),
)  # fmt: skip


def evidence(**changes: Any) -> Evidence:
    phases = {"wait": 0.05, "forward": 0.02, "backward": 0.02, "optimizer": 0.01, "rest": 0.0}
    steps = (Step(index=1, arm="real", block=0, step_s=0.1, phases_s=phases),)
    made = Evidence(
        job=JOB, host=Host(cores=2, memory_bytes=None), steps=steps, loaders=(LOADER,), kernels=KERNELS
    )
    return replace(made, **changes)


def on_gpu(**changes: Any) -> Evidence:
    copy = Site(
        kind="copy", op="to", place=Place(file="t.py", line=1), via=None, calls_per_step=1, pinned=False
    )
    return evidence(
        job=replace(JOB, device="cuda"),
        gpu=Gpu(name="G", memory_bytes=None, compute_capability="8.0"),
        precision=Precision(
            parameter_dtypes=("float32",), autocast=None, tf32_matmul=False, bf16_supported=True
        ),
        sites=(copy,),
        **changes,
    )


def proposed(known: Evidence, source: str = "") -> dict[str, list[Any]]:
    found = {
        name: list(each.propose(Case(evidence=known, source=source)))
        for name, each in all_treatments().items()
    }
    return {name: values for name, values in found.items() if values}


def test_names_are_those_of_the_files_and_safety_is_known() -> None:
    assert len(all_treatments()) >= 11
    for name, each in all_treatments().items():
        assert name == each.name and each.safety in ("exact", "reordered", "lossy") and each.summary
    assert read_dose("loader-workers=2") == Dose(name="loader-workers", value=2)
    assert (
        read_dose("compile=reduce-overhead").value == "reduce-overhead" and read_dose("compile").value is True
    )
    with pytest.raises(BadInput, match="no treatment 'magic'"):
        read_dose("magic")


def test_a_job_is_offered_what_suits_it() -> None:
    on_cpu = proposed(evidence())
    assert on_cpu["loader-workers"] == [1, 2, 4] or set(on_cpu["loader-workers"]) == {1, 2, 4}
    assert "autocast" not in on_cpu and "cudnn-benchmark" not in on_cpu and on_cpu["threads"] == [1, 2]
    gpu = proposed(on_gpu())
    assert {"autocast", "matmul-precision", "pinned-memory", "cudnn-benchmark", "channels-last"} <= gpu.keys()
    assert "threads" not in gpu and "no-debug-calls" not in gpu
    assert "no-debug-calls" in proposed(on_gpu(), source="torch.cuda.empty_cache()")
    calm = evidence(steps=(replace(evidence().steps[0], phases_s={"wait": 0.0001, "forward": 0.09}),))
    assert "loader-workers" not in proposed(calm) and "fused-optimizer" not in proposed(calm)
    eight = replace(LOADER, num_workers=8)
    assert 4 in proposed(evidence(loaders=(eight,)))["loader-workers"]
    assert 0 in proposed(evidence(loaders=(eight,)))["loader-workers"]


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    yield made
    made.undo()


def test_loaders_get_workers_that_stay_or_none(patches: Patches) -> None:
    data = TensorDataset(torch.arange(8))
    install([Dose(name="loader-workers", value=1)], patches)
    loader = DataLoader(data, batch_size=4)
    assert loader.num_workers == 1 and loader.persistent_workers
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    patches.undo()
    install([Dose(name="loader-workers", value=0)], patches)
    loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=4)
    assert loader.num_workers == 0 and len(list(loader)) == 2


def test_optimizers_are_fused_unless_the_script_chose(patches: Patches) -> None:
    model = nn.Linear(2, 2)
    install([Dose(name="fused-optimizer", value=True)], patches)
    assert torch.optim.AdamW(model.parameters(), lr=1e-3).defaults["fused"] is True
    assert torch.optim.AdamW([{"params": model.parameters()}]).defaults["fused"] is True
    assert torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).defaults["fused"] is None
    integers = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    assert torch.optim.SGD([integers], lr=0.1).defaults["fused"] is None


def test_the_forward_runs_in_bf16_with_weights_as_they_are_now(patches: Patches) -> None:
    install([Dose(name="autocast", value="bfloat16")], patches)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 4)
    before = model(x)
    assert before.dtype == torch.bfloat16
    before.float().sum().backward()
    optimizer.step()
    assert model.weight.dtype == torch.float32
    after = model(x)
    assert (before - after).float().mean().item() == pytest.approx(5.0, abs=0.1)  # 4 weights and a bias, by 1


def test_convolutions_get_their_channels_last(patches: Patches) -> None:
    seen: list[bool] = []
    install([Dose(name="channels-last", value=True)], patches)
    model = nn.Conv2d(3, 4, 3)
    model.register_forward_hook(
        lambda _module, inputs, _out: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    x = torch.randn(2, 3, 8, 8)
    expected = nn.functional.conv2d(x, model.weight, model.bias)
    model(x)
    assert torch.allclose(model(x), expected, atol=1e-5)
    assert model.weight.is_contiguous(memory_format=torch.channels_last) and seen[-1]


def test_debug_calls_do_nothing(patches: Patches) -> None:
    install([Dose(name="no-debug-calls", value=True)], patches)
    torch.autograd.set_detect_anomaly(True)
    assert not torch.is_anomaly_enabled()
    torch.cuda.empty_cache(), torch.cuda.synchronize()
    patches.undo()
    with torch.autograd.set_detect_anomaly(True):
        assert torch.is_anomaly_enabled()


def test_garbage_is_collected_between_steps_and_seldom(patches: Patches) -> None:
    install([Dose(name="garbage-every", value=2)], patches)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        optimizer.step()
        assert not gc.isenabled()
    finally:
        patches.undo()
        gc.unfreeze()
    assert gc.isenabled()


def test_settings_of_torch_are_made(patches: Patches) -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        install([Dose(name="threads", value=1), Dose(name="matmul-precision", value="high")], patches)
        assert torch.get_num_threads() == 1 and torch.get_float32_matmul_precision() == "high"
        install([Dose(name="cudnn-benchmark", value=True), Dose(name="pinned-memory", value=True)], patches)
        assert torch.backends.cudnn.benchmark
        assert DataLoader(TensorDataset(torch.ones(2))).pin_memory
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def test_a_model_is_compiled_at_its_first_call(patches: Patches) -> None:
    install([Dose(name="compile", value="default")], patches)
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2))
    assert model._compiled_call_impl is not None


def switch_of(name: str, value: Any, patches: Patches) -> Switch:
    make = all_treatments()[name].switch
    assert make is not None
    return make(patches, value)


def test_what_can_be_switched_is_as_before_when_it_is_off(patches: Patches) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def state() -> tuple[object, ...]:
        optimizer.step()
        kind = model(torch.ones(1, 4)).dtype
        torch.autograd.set_detect_anomaly(True)
        anomalies = torch.is_anomaly_enabled()
        torch.autograd.set_detect_anomaly(False)
        precision = torch.get_float32_matmul_precision()
        return kind, torch.get_num_threads(), precision, anomalies, gc.isenabled()

    values = {"autocast": "bfloat16", "threads": 2, "matmul-precision": "high", "garbage-every": 100}
    switched = {name: each for name, each in all_treatments().items() if each.switch is not None}
    assert {*values, "no-debug-calls"} <= switched.keys() and "compile" not in switched
    before = state()
    for name, changed in zip([*values, "no-debug-calls"], (0, 1, 2, 4, 3), strict=True):
        switch = switch_of(name, values.get(name, True), patches)
        for _ in range(2):
            assert state() == before, name
            switch.on()
            found = state()
            assert found[changed] != before[changed], name
            assert found[:changed] + found[changed + 1 :] == before[:changed] + before[changed + 1 :], name
            switch.off()
    assert state() == before


def test_a_script_that_imported_a_name_is_switched_all_the_same(patches: Patches) -> None:
    called: list[int] = []
    patches.replace(torch.cuda, "empty_cache", lambda: called.append(1))
    switch = switch_of("no-debug-calls", True, patches)
    imported = torch.cuda.empty_cache
    switch.on()
    imported()
    assert called == []
    switch.off()
    imported()
    assert called == [1]
