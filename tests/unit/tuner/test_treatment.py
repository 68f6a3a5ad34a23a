"""Every treatment: what it is proposed for, and what it does to a job."""

from __future__ import annotations

import argparse
import gc
import io
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.ground.errors import BadInput
from flatout.measure.batches import arrays_of
from flatout.measure.evidence import (
    Compilation,
    Copy,
    Counterfactual,
    Evidence,
    Gpu,
    Host,
    Kernels,
    Lengths,
    Loader,
    Memory,
    ObservedJob,
    Place,
    Precision,
    Site,
    Spread,
    Step,
)
from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Dose, Switch, all_treatments, install, read_dose
from flatout.tuner.treatments.arithmetic._loss_scale import FIRST, LossScale
from flatout.tuner.treatments.arithmetic.compile import num_recompilations
from flatout.tuner.treatments.loading import kept_samples
from flatout.tuner.treatments.updates.merged_groups import parameters_of

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
    assert len(all_treatments()) >= 22
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
    assert 8 in proposed(evidence(loaders=(replace(eight, persistent_workers=False),)))["loader-workers"]
    assert 8 not in proposed(evidence(loaders=(replace(eight, persistent_workers=True),)))["loader-workers"]


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


@pytest.mark.parametrize(("own", "count"), [({}, 1), ({"num_workers": 1, "persistent_workers": True}, 0)])
def test_later_epochs_have_the_order_that_they_have_without_workers(
    patches: Patches, own: dict[str, Any], count: int
) -> None:
    def orders() -> list[list[float]]:
        torch.manual_seed(3)
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=8, shuffle=True, **own)
        return [torch.cat([x, torch.rand(1)]).tolist() for _epoch in range(3) for (x,) in loader]

    before = orders()
    install([Dose(name="loader-workers", value=count)], patches)
    assert orders() == before and len({str(each) for each in before}) == 3


def test_optimizers_are_fused_unless_the_script_chose(patches: Patches) -> None:
    model = nn.Linear(2, 2)
    install([Dose(name="fused-optimizer", value=True)], patches)
    assert torch.optim.AdamW(model.parameters(), lr=1e-3).defaults["fused"] is True
    grouped = torch.optim.AdamW([{"params": model.parameters()}])
    assert grouped.defaults["fused"] is True and len(grouped.param_groups[0]["params"]) == 2
    named = torch.optim.AdamW([{"params": model.named_parameters()}])
    assert named.defaults["fused"] is True and len(named.param_groups[0]["params"]) == 2
    for foreach in (False, True):  # the kernel takes the place of either
        looped = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        assert looped.defaults["fused"] is True and not looped.defaults["foreach"]
    assert torch.optim.SGD(model.parameters(), lr=0.1, fused=False).defaults["fused"] is False
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


def test_the_collector_works_as_ever_at_the_exit() -> None:
    script = """
import atexit, gc
atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count()))
import torch
from flatout.measure.patches import Patches
from flatout.tuner.treatment import Dose, install
install([Dose(name="garbage-every", value=2)], Patches())
weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
torch.optim.SGD([weight]).step()
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["False True", "True 0"] and ran.stderr == ""


def test_garbage_is_collected_between_steps_and_seldom(patches: Patches) -> None:
    install([Dose(name="garbage-every", value=2)], patches)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collections: list[str] = []
    gc.callbacks.append(lambda phase, _info: collections.append(phase))
    try:
        optimizer.step()
        assert not gc.isenabled()
        collections.clear()
        for _step in range(4):
            optimizer.step()
            gc.collect()  # by the script, after each step
        assert collections.count("start") == 2
        gc.collect()  # once more, without a step
        assert collections.count("start") == 3
    finally:
        gc.callbacks.pop()
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


def test_a_number_of_threads_holds_against_the_scripts_own_until_it_is_undone(patches: Patches) -> None:
    before = torch.get_num_threads()
    try:
        install([Dose(name="threads", value=1)], patches)
        torch.set_num_threads(3)  # by the script
        assert torch.get_num_threads() == 1
        patches.undo()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_model_is_compiled_at_its_first_call(patches: Patches) -> None:
    install([Dose(name="compile", value="default")], patches)
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2))
    assert model._compiled_call_impl is not None


def test_compiled_functions_run_as_they_are_written(patches: Patches) -> None:
    frames: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        frames.append("compiled")
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    install([Dose(name="uncompiled", value=True)], patches)
    assert double(torch.ones(2)).tolist() == [2, 2] and not frames
    patches.undo()
    assert double(torch.ones(2)).tolist() == [2, 2] and frames == ["compiled"]
    switch = switch_of("uncompiled", True, patches)
    for is_on in (True, False, True):
        switch.on() if is_on else switch.off()
        assert double(torch.ones(3 if is_on else 2)).tolist() == [2] * (3 if is_on else 2)
    switch.off()
    assert frames == ["compiled"]  # the code that was compiled before is used again


def test_compiled_jobs_run_uncompiled_unless_that_was_seen_to_be_slower() -> None:
    compiled = Compilation(num_steps=10, steps_s=1.0, functions=(), breaks=())
    assert "uncompiled" not in proposed(evidence())
    assert "uncompiled" in proposed(evidence(compilation=compiled))
    slower = Counterfactual(
        label="uncompiled", kind="uncompiled", baseline="real", step_s=0.2, baseline_step_s=0.1,
        speedup=0.5, speedup_low=0.4, speedup_high=0.6, num_steps=9, num_blocks=3,
    )  # fmt: skip
    assert "uncompiled" not in proposed(evidence(compilation=compiled, counterfactuals=(slower,)))


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


@pytest.mark.parametrize(("optimizer_type", "foreach"), [("AdamW", None), ("AdamW", False), ("SGD", True)])
def test_a_switched_optimizer_goes_on_as_it_would_have(
    patches: Patches, optimizer_type: str, foreach: bool | None
) -> None:
    def trained(switches: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = getattr(torch.optim, optimizer_type)(model.parameters(), lr=0.1, foreach=foreach)
        switch = switch_of("fused-optimizer", True, patches)
        for step in range(6):
            model(torch.ones(2, 4)).sum().backward()
            if switches and step == 2:
                switch.on()
                assert optimizer.param_groups[0]["fused"] is True
            if switches and step == 4:
                switch.off()
                assert optimizer.param_groups[0]["fused"] is None
                assert optimizer.param_groups[0]["foreach"] is foreach
            optimizer.step()
        return list(model.parameters())

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


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


# Loading


def waiting_for_workers(**changes: Any) -> Evidence:
    waits = Spread(num=10, mean_s=0.05, median_s=0.01, p95_s=0.2, max_s=0.4)
    given = {"num_workers": 1, "wait_s": waits, "fetch_s": replace(waits, mean_s=0.1), "cpu_s": 0.09}
    return evidence(loaders=(replace(LOADER, **{**given, **changes}),), host=Host(cores=4, memory_bytes=None))


def test_workers_get_longer_queues_where_waits_are_uneven_and_threads_where_cores_are_left() -> None:
    found = proposed(waiting_for_workers())
    assert found["prefetch-factor"] == [4, 8] and found["worker-threads"] == [4]
    assert proposed(waiting_for_workers(prefetch_factor=4))["prefetch-factor"] == [8]
    even = Spread(num=10, mean_s=0.05, median_s=0.05, p95_s=0.06, max_s=0.06)
    assert "prefetch-factor" not in proposed(waiting_for_workers(wait_s=even))
    for changes in (
        {"num_workers": 4},
        {"cpu_s": 0.01},
        {"num_workers": 0},
    ):  # no core left; a disk; no worker
        assert "worker-threads" not in proposed(waiting_for_workers(**changes))


def threads_of(_batch: Any) -> int:
    return torch.get_num_threads()


def seed_of(worker: int) -> None:
    torch.manual_seed(worker)


def test_queues_and_threads_are_those_of_the_workers_that_another_treatment_made(patches: Patches) -> None:
    doses = {"prefetch-factor": 5, "loader-workers": 1, "worker-threads": 2}
    install([Dose(name=name, value=value) for name, value in doses.items()], patches)
    loader = DataLoader(range(3), collate_fn=threads_of, worker_init_fn=seed_of)  # type: ignore[arg-type]
    assert (loader.num_workers, loader.prefetch_factor) == (1, 5)
    assert list(loader) == [2, 2, 2]
    patches.undo()
    install([Dose(name="prefetch-factor", value=5)], patches)
    assert DataLoader(range(3)).prefetch_factor is None  # type: ignore[arg-type]


def test_batches_are_copied_ahead_where_copies_take_time(
    patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = (Copy(kind="HtoD pageable", calls_per_step=2, total_s=0.01),)
    assert proposed(on_gpu(kernels=replace(KERNELS, copies=copies)))["device-prefetch"] == [2]
    assert "device-prefetch" not in proposed(on_gpu()) and "device-prefetch" not in proposed(evidence())
    install([Dose(name="device-prefetch", value=2)], patches)
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]  # a job without a GPU
    asked: list[Any] = []

    def prefetched(plain: Any, device: Any, *, ahead: int) -> Any:
        asked.append((device, ahead))
        return plain

    patches.undo()
    monkeypatch.setattr("flatout.data.prefetch", prefetched)
    install([Dose(name="device-prefetch", value=3)], patches)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert asked == [(torch.device("cuda", 1), 3)]


def test_only_shuffled_batches_of_one_size_lose_their_last_one(patches: Patches) -> None:
    steps = tuple(replace(evidence().steps[0], rows=rows) for rows in (8, 8, 3))
    assert proposed(evidence(steps=steps))["drop-last"] == [True]
    assert "drop-last" not in proposed(evidence())
    data = TensorDataset(torch.arange(10))
    install([Dose(name="drop-last", value=True)], patches)
    assert len(DataLoader(data, batch_size=4, shuffle=True)) == 2
    assert len(DataLoader(data, 4, True)) == 2
    assert len(DataLoader(data, batch_size=4)) == 3  # always the same rows would be lost
    assert len(DataLoader(data, batch_size=16, shuffle=True)) == 1  # nothing would be left


class Counted(Dataset[Any]):
    """Counts how often each sample is fetched."""

    def __init__(self, make: Callable[[int], Any], size: int = 20) -> None:
        self.make, self.size, self.num_fetched = make, size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.num_fetched += 1
        return self.make(index)


def epochs_of(loader: DataLoader[Any], number: int) -> list[Any]:
    torch.manual_seed(0)
    return [batch for _ in range(number) for batch in loader]


def test_samples_are_offered_to_be_kept_where_trials_reach_the_second_epoch() -> None:
    def spread(mean_s: float) -> Spread:
        return Spread(num=10, mean_s=mean_s, median_s=mean_s, p95_s=mean_s, max_s=mean_s)

    slow = replace(LOADER, fetch_s=spread(0.05))
    assert proposed(evidence(loaders=(slow,)))["kept-samples"] == [True]
    for other in (
        LOADER,
        replace(slow, num_workers=2),
        replace(slow, streams=True),
        replace(slow, takes_many=True),
        replace(slow, num_batches=1000),
        replace(slow, fetch_s=spread(0.001)),
    ):
        assert "kept-samples" not in proposed(evidence(loaders=(other,)))
    assert "kept-samples" not in proposed(evidence(loaders=(slow, slow)))


@pytest.mark.parametrize(
    "make",
    [
        lambda index: (torch.full((2,), float(index)), index),
        lambda index: {"x": np.full(2, index), "name": [str(index), np.float32(index)]},
    ],
)
def test_samples_are_kept_and_the_script_may_change_its_own(patches: Patches, make: Any) -> None:
    plain = epochs_of(DataLoader(Counted(make), batch_size=4, shuffle=True), 3)
    install([Dose(name="kept-samples", value=True)], patches)
    data = Counted(make)
    found = epochs_of(DataLoader(data, batch_size=4, shuffle=True), 3)
    assert repr(found) == repr(plain) and data.num_fetched == 20 + 2 * 8
    whole = DataLoader(data, batch_size=20, collate_fn=list)
    for _epoch in range(2):
        for number, sample in enumerate(next(iter(whole))):
            array = arrays_of(sample)[0]
            assert array.tolist() == [number, number]
            array += 100  # as a collate function that augments does
    assert data.num_fetched == 20 + 4 * 8


def test_samples_that_differ_from_epoch_to_epoch_are_not_kept(patches: Patches) -> None:
    own = np.random.default_rng(0)
    epoch = [0]
    makes: list[Callable[[int], Any]] = [
        lambda index: torch.rand(2) + index,
        lambda index: random.random() + index,
        lambda index: np.random.rand() + index,
        lambda index: own.random() + index,
        lambda index: torch.nn.Parameter(torch.ones(2)).sum(),
        lambda index: np.array([index], dtype=object),
    ]
    install([Dose(name="kept-samples", value=True)], patches)
    for make in makes:
        data = Counted(make)
        epochs_of(DataLoader(data, batch_size=4, shuffle=True, collate_fn=list), 3)
        assert data.num_fetched >= 3 * 20 - 1, makes.index(make)
    data = Counted(lambda index: index + 100 * (epoch[0] // 3))
    loader = DataLoader(data, batch_size=4)
    for epoch[0] in range(6):  # it changes in the fourth
        assert torch.cat(list(loader)).tolist() == [index + 100 * (epoch[0] // 3) for index in range(20)]
    assert len(list(DataLoader(Counted(lambda index: index), batch_size=4, num_workers=1))) == 5


def test_no_more_samples_are_kept_than_fit(patches: Patches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_samples, "MEMORY_SHARE", 1e-9)
    install([Dose(name="kept-samples", value=True)], patches)
    data = Counted(lambda index: torch.full((2,), index))
    found = epochs_of(DataLoader(data, batch_size=4), 2)
    assert data.num_fetched == 40 and torch.equal(found[0], found[5])


# Arithmetic


def test_larger_micro_batches_are_offered_to_steps_of_several_batches_alike() -> None:
    steps = tuple(replace(evidence().steps[0], num_batches=4, num_backwards=4) for _ in range(3))
    offered = proposed(evidence(steps=steps), "parser.add_argument('--accumulate')")
    assert offered["larger-micro-batches"] == ["8x4=32x1", "8x4=16x2"]
    ahead = (replace(steps[0], num_batches=3), *steps)  # as Accelerate fetches at the end of an epoch
    assert "larger-micro-batches" in proposed(evidence(steps=ahead), "accumulate")
    assert "larger-micro-batches" not in proposed(evidence(steps=steps))  # nothing names the number
    uneven = (*steps, replace(steps[0], num_batches=1, num_backwards=1))
    assert "larger-micro-batches" not in proposed(evidence(steps=uneven), "accumulate")
    assert "larger-micro-batches" not in proposed(evidence(), "accumulate")


def test_the_largest_micro_batches_that_certainly_fit_are_among_those_offered() -> None:
    steps = (replace(evidence().steps[0], num_batches=64, num_backwards=64),)
    gpu = Gpu(name="G", memory_bytes=100, compute_capability="8.0")

    def offered(peak_bytes: int) -> list[Any]:
        memory = Memory(num_steps=1, peak_bytes=peak_bytes, growth_bytes_per_step=0.0)
        known = replace(on_gpu(steps=steps), gpu=gpu, memory=memory)
        return [*proposed(known, "accumulate")["larger-micro-batches"]]

    assert offered(1) == ["8x64=512x1", "8x64=256x2", "8x64=128x4"]  # all of them fit
    assert offered(20) == ["8x64=512x1", "8x64=128x4", "8x64=32x16"]  # four times 20 bytes fit into 100
    assert offered(90) == offered(1)  # nothing is certain


def test_size_and_number_of_micro_batches_change_together_or_not_at_all(patches: Patches) -> None:
    def parse(*more: str, **defaults: int) -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        for name, value in {"batch-size": 8, "eval-batch-size": 8, "accum": 4, **defaults}.items():
            parser.add_argument(f"--{name}", type=int, default=value)
        return vars(parser.parse_args(more))

    install([Dose(name="larger-micro-batches", value="8x4=16x2")], patches)
    assert parse() == {"batch_size": 16, "eval_batch_size": 8, "accum": 2}
    assert parse("--accum", "3") == {"batch_size": 8, "eval_batch_size": 8, "accum": 3}
    assert parse(world_batch_size=8)["batch_size"] == 8  # which of them is meant?
    patches.undo()
    assert parse()["batch_size"] == 8


def test_frameworks_that_accumulate_get_larger_micro_batches(patches: Patches, tmp_path: Path) -> None:
    from accelerate import Accelerator
    from transformers import TrainingArguments

    install([Dose(name="larger-micro-batches", value="8x4=32x1")], patches)
    data = TensorDataset(torch.arange(64))
    assert DataLoader(data, batch_size=8).batch_size == 8  # made before anybody accumulates
    arguments = TrainingArguments(output_dir=str(tmp_path), gradient_accumulation_steps=4, use_cpu=True)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (32, 1)
    other = TrainingArguments(output_dir=str(tmp_path), gradient_accumulation_steps=2, use_cpu=True)
    assert (other.per_device_train_batch_size, other.gradient_accumulation_steps) == (8, 2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    assert accelerator.gradient_accumulation_steps == 1
    assert DataLoader(data, batch_size=8).batch_size == 32


def test_the_gpu_decides_between_bf16_and_fp16() -> None:
    old = replace(on_gpu(), gpu=Gpu(name="T4", memory_bytes=None, compute_capability="7.5"))
    assert proposed(on_gpu())["autocast"] == ["bfloat16"] and proposed(old)["autocast"] == ["float16"]
    assert "autocast" not in proposed(old, source="scaler = GradScaler()")
    older = replace(old, gpu=Gpu(name="P100", memory_bytes=None, compute_capability="6.0"))
    assert "autocast" not in proposed(older)


def test_a_scaled_loss_leaves_gradients_as_the_script_expects_them_and_skips_what_is_not_finite(
    patches: Patches,
) -> None:
    def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        for part in x.chunk(2):  # accumulation
            model(part).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    plain = gradients(model, x)
    under_way = torch.optim.SGD(model.parameters(), lr=1.0)
    scale = LossScale()
    scale.install(patches)
    for one, other in zip(plain, gradients(model, x), strict=True):
        assert torch.allclose(one, other, rtol=1e-5)
    small = torch.ones(1, dtype=torch.float16, requires_grad=True)
    (small.float() * 1e-9).sum().backward()
    assert small.grad is not None and small.grad.item() > 0  # it would be 0 without the scale
    (grad,) = torch.autograd.grad(model(x).sum(), model.bias)
    assert grad.tolist() == [8.0, 8.0]  # asked for directly, it was never scaled
    before = model.weight.detach().clone()
    (model(x) * float("inf")).sum().backward()
    under_way.step()
    assert torch.equal(model.weight, before) and scale.num_skipped == 1 and scale.scale == FIRST / 2
    gradients(model, x)
    under_way.step()
    assert not torch.equal(model.weight, before)


def test_compilation_is_given_up_when_it_is_repeated(
    patches: Patches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert proposed(on_gpu())["compile"] == ["default", "reduce-overhead"]
    assert "compile" not in proposed(
        on_gpu(compilation=Compilation(functions=(), breaks=(), num_steps=1, steps_s=1))
    )
    monkeypatch.setattr(
        nn.Module, "compile", lambda module, **_: setattr(module, "_compiled_call_impl", module.forward)
    )
    install([Dose(name="compile", value="default")], patches)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert model._compiled_call_impl is not None
    num = num_recompilations() + 7
    monkeypatch.setattr("flatout.tuner.treatments.arithmetic.compile.num_recompilations", lambda: num)
    optimizer.step()
    assert model._compiled_call_impl is None and "giving up" in capsys.readouterr().err
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_eager_attention_of_a_hugging_face_model_becomes_one_kernel(patches: Patches) -> None:
    transformers = pytest.importorskip("transformers")
    eager = 'AutoModel.from_pretrained(x, attn_implementation="eager")'
    assert proposed(evidence(), source=eager)["attention"] == ["sdpa"]
    assert "attention" not in proposed(evidence(), source=f"{eager}(output_attentions=True)")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertModel(config).train()
    assert model.config._attn_implementation == "eager"
    install([Dose(name="attention", value="sdpa")], patches)
    model(torch.ones(1, 3, dtype=torch.int64))
    assert model.config._attn_implementation == "sdpa"


# Updates


def test_optimizers_update_lists_and_groups_with_the_same_options_as_one(patches: Patches) -> None:
    looping = replace(KERNELS, optimizer="for-loop")
    assert "foreach-optimizer" in proposed(on_gpu(kernels=looping))
    assert "foreach-optimizer" not in proposed(on_gpu()) | proposed(evidence(kernels=looping))
    source = 'AdamW([{"params": layer.parameters()} for layer in model])'
    assert "merged-groups" in proposed(evidence(), source=source)
    assert "merged-groups" not in proposed(evidence(), source=f"{source}; optimizer.load_state_dict(x)")
    layers = [nn.Linear(2, 2) for _ in range(4)]
    install([Dose(name=name, value=True) for name in ("foreach-optimizer", "merged-groups")], patches)
    groups: list[dict[str, Any]] = [{"params": layer.parameters()} for layer in layers[:3]]
    groups.insert(1, {"params": layers[3].weight, "lr": 0.5})
    made = torch.optim.AdamW(groups, lr=0.1, foreach=False)
    assert [(len(group["params"]), group["lr"]) for group in made.param_groups] == [(6, 0.1), (1, 0.5)]
    given = [*layers[0].parameters(), layers[3].weight, *layers[1].parameters(), *layers[2].parameters()]
    assert list(map(id, parameters_of(made))) == list(map(id, given))  # as trials compare them
    assert made.param_groups[0]["foreach"] is True
    assert torch.optim.SGD(layers[0].parameters(), lr=0.1, fused=True).param_groups[0]["foreach"] is None
    named = torch.optim.SGD([{"params": list(each.named_parameters())} for each in layers], lr=0.1)
    assert len(named.param_groups) == 4


# Memory, waits, ranks


def test_checkpointed_activations_are_kept_and_computed_once(patches: Patches) -> None:
    source = "from torch.utils.checkpoint import checkpoint"
    assert proposed(evidence(), source=source)["no-checkpointing"] == [True]
    full = replace(
        on_gpu(memory=Memory(num_steps=1, peak_bytes=75, growth_bytes_per_step=0)),
        gpu=Gpu(name="G", memory_bytes=100, compute_capability="8.0"),
    )
    assert "no-checkpointing" not in proposed(full, source=source)
    install([Dose(name="no-checkpointing", value=True)], patches)
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    calls: list[int] = []

    def double(x: torch.Tensor, *, by: int) -> torch.Tensor:
        calls.append(by)
        return x * by

    x = torch.ones(2, requires_grad=True)
    checkpoint(double, x, by=2, use_reentrant=False).sum().backward()
    assert calls == [2] and x.grad is not None and x.grad.tolist() == [2.0, 2.0]
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    assert torch.equal(checkpoint_sequential(layers, 2, x, use_reentrant=False), layers(x))


def test_segments_grow_where_lengths_vary(patches: Patches) -> None:
    lengths = Lengths(num_samples=8, mean=3, max=9, padded_share=0.5, bucketed_share=0.1)
    ragged = on_gpu(loaders=(replace(LOADER, lengths=lengths),))
    assert proposed(ragged)["expandable-segments"] == [True] and proposed(ragged)["compile"] == ["dynamic"]
    assert "expandable-segments" not in proposed(on_gpu())
    install([Dose(name="expandable-segments", value=True)], patches)  # without a GPU nothing happens


def test_progress_bars_are_drawn_once_a_second(patches: Patches) -> None:
    tqdm = pytest.importorskip("tqdm")
    assert proposed(evidence(), source="from tqdm import tqdm")["progress-bars"] == [1]
    install([Dose(name="progress-bars", value=1)], patches)
    written = io.StringIO()
    with tqdm.tqdm(total=50, file=written) as bar:
        begun = len(written.getvalue())
        for number in range(50):
            bar.update()
            bar.set_postfix(loss=number)
            bar.set_description("epoch")
        assert bar.mininterval == 1.0 and len(written.getvalue()) == begun
    assert "50/50" in written.getvalue() and "loss=49" in written.getvalue()


def test_a_mask_is_compared_once_and_again_after_it_changed(
    patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.modules import transformer

    source = "nn.TransformerEncoder(layer, 2)(x, mask=mask)"
    assert proposed(evidence(), source=source)["causal-mask"] == [True]
    assert "causal-mask" not in proposed(evidence(), source=source.replace("mask)", "mask, is_causal=True)"))
    asked: list[Any] = []
    real = transformer._generate_square_subsequent_mask
    monkeypatch.setattr(
        transformer,
        "_generate_square_subsequent_mask",
        lambda *args, **kwargs: asked.append(args) or real(*args, **kwargs),
    )
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0), 1, enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, dropout=0.0), 1)
    x, causal = torch.randn(4, 1, 8), nn.Transformer.generate_square_subsequent_mask(4)
    masks = {"floats": causal, "bools": causal.isinf(), "open": torch.zeros(4, 4)}
    asked.clear()
    plain = {name: (encoder(x, mask), decoder(x, x, mask)) for name, mask in masks.items()}
    assert len(asked) == 2 * len(masks)
    told: list[Any] = []
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        forward = kind.forward
        monkeypatch.setattr(
            kind,
            "forward",
            lambda *args, forward=forward, **kwargs: (
                told.append(kwargs.get("is_causal", kwargs.get("tgt_is_causal"))) or forward(*args, **kwargs)
            ),
        )
    install([Dose(name="causal-mask", value=True)], patches)
    asked.clear()
    for _ in range(3):
        for name, mask in masks.items():
            found = encoder(x, mask), decoder(x, x, mask)
            assert all(torch.equal(*both) for both in zip(found, plain[name], strict=True))
            assert told[-2:] == [name != "open"] * 2
    assert len(asked) == len(masks)
    causal.zero_()
    assert torch.equal(encoder(x, causal), plain["open"][0]) and told[-1] is False
    assert len(asked) == len(masks) + 1
    encoder(x, mask=torch.zeros(4, 4), is_causal=False)
    assert len(asked) == len(masks) + 1  # the script says it
    patches.undo()
    encoder(x, causal)
    assert len(asked) == len(masks) + 2


def test_gradients_are_exchanged_once_per_step_and_before_an_early_one(
    patches: Patches, tmp_path: Path
) -> None:
    source = "model = DistributedDataParallel(model)"
    steps = (replace(evidence().steps[0], num_backwards=3),)
    ranks = evidence(steps=steps, job=replace(JOB, world_size=2))
    assert proposed(ranks, source=f"# without no_sync\n{source}")["no-sync"] == [3]
    for more in (
        "find_unused_parameters=True",
        "with model.no_sync():",
        "optimizer.step(closure)",
        "GradScaler()",
    ):
        assert "no-sync" not in proposed(ranks, source=f"{source} {more}")
    assert "no-sync" not in proposed(evidence(steps=steps), source=source)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    model: Any = None
    optimizer: Any = None
    try:
        install([Dose(name="no-sync", value=3)], patches)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for number in range(5):  # 3, then an epoch ends after 2
            model(torch.ones(1, 2)).sum().backward()
            seen.append(model.require_backward_grad_sync)
            if number in (2, 4):
                assert model.module.weight.grad is not None
                optimizer.step()
                assert model.module.weight.grad.tolist() == [[3.0, 3.0] if number == 2 else [2.0, 2.0]]
                optimizer.zero_grad()
        assert seen == [False, False, True, False, False]
    finally:
        patches.undo()
        # the group has to go last: a model that ends it waits for its threads, and they for Python's lock
        del model, optimizer
        gc.collect()
        dist.destroy_process_group()


def test_the_page_about_tuning_lists_every_treatment_with_its_class() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "tune.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w-]+)` \|.*\| (exact|reordered|lossy) \|[^|]+\|$", text, flags=re.MULTILINE)
    assert dict(listed) == {name: each.safety for name, each in all_treatments().items()}
