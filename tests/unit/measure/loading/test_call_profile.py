from __future__ import annotations

import cProfile
import pstats
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.measure.lines.counted_calls import count_creations
from flatout.measure.loading.call_profile import CallProfile
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode
from tests.support.measure import line_of

HERE = Path(__file__)
Samples = list[np.ndarray[Any, Any]]


def line(marker: str) -> int:
    return line_of(HERE, marker)


def profiled(function: Callable[[], Any]) -> dict[tuple[str, int], float]:
    """Calls per batch by function and line."""
    profile = CallProfile(UserCode(str(HERE.parent)))
    profile.start()
    try:
        function()
    finally:
        profile.stop()
    calls = profile.calls()
    assert all(call.place.file == HERE.name for call in calls)
    return {(call.function, call.place.line): call.calls_per_batch for call in calls}


def glue(samples: Samples) -> torch.Tensor:
    batch = samples[0]
    for sample in samples[1:]:
        batch = np.concatenate([batch, sample])  # at: concatenate
    return torch.from_numpy(batch)  # at: from numpy


def pad_and_cat(samples: Samples) -> torch.Tensor:
    longest = max(len(sample) for sample in samples)
    padded = [np.pad(sample, (0, longest - len(sample))) for sample in samples]  # at: pad
    batch = torch.tensor(padded[0])  # at: tensor
    for sample in padded[1:]:
        batch = torch.cat([batch, torch.as_tensor(sample)])  # at: cat
    return batch


SAMPLES: Samples = [np.arange(float(n)) for n in range(1, 9)]


def test_arrays_glued_one_by_one_are_counted_at_their_line() -> None:
    assert profiled(lambda: glue(SAMPLES)) == {
        ("numpy.concatenate", line("concatenate")): 7,
        ("torch.from_numpy", line("from numpy")): 1,
    }


def test_padding_and_torchs_own_gluing_are_counted_at_their_line() -> None:
    assert profiled(lambda: pad_and_cat(SAMPLES)) == {
        ("numpy.pad", line("pad")): 8,
        ("torch.tensor", line("tensor")): 1,
        ("torch.cat", line("cat")): 7,
        ("torch.as_tensor", line("cat")): 7,
    }


def test_what_a_library_glues_inside_is_its_own_business() -> None:
    """default_collate stacks; numpy.vstack concatenates: the user's line asked for one thing."""

    def work() -> None:
        torch.utils.data.default_collate([torch.zeros(3)] * 4)
        np.vstack([np.zeros(3)] * 4)  # at: vstack

    assert profiled(work) == {("numpy.vstack", line("vstack")): 1}


def test_a_list_that_is_appended_to_is_no_array() -> None:
    def work() -> None:
        rows: list[int] = []
        for i in range(9):
            rows.append(i)
            rows.insert(0, i)

    assert profiled(work) == {}


def test_calls_in_collate_are_told_from_calls_in_the_dataset() -> None:
    profile = CallProfile(UserCode(str(HERE.parent)))
    profile.start()
    np.concatenate([SAMPLES[0], SAMPLES[1]])
    profile.in_collate = True
    np.concatenate([SAMPLES[0], SAMPLES[1]])
    profile.stop()
    assert sorted(call.in_collate for call in profile.calls()) == [False, True]


def test_a_profiler_of_the_job_keeps_the_floor() -> None:
    """Also cProfile, which Python cannot put back once it is taken away."""
    own = cProfile.Profile()
    own.enable()
    try:
        profile = CallProfile(UserCode(str(HERE.parent)))
        profile.start()
        glue(SAMPLES)
        profile.stop()
        assert sys.getprofile() is own
    finally:
        own.disable()
    assert profile.calls() == ()
    assert any("glue" in str(function) for function in pstats.Stats(own).stats)  # type: ignore[attr-defined]


def test_nothing_is_left_on_afterwards() -> None:
    profiled(lambda: glue(SAMPLES))
    assert sys.getprofile() is None


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays")
def test_an_old_constructor_of_a_list_of_arrays_is_counted_also_inside_a_count_of_creations() -> None:
    def work() -> None:
        torch.LongTensor([np.arange(3)] * 4)  # at: long tensor
        torch.LongTensor([1, 2])

    expected = {("torch.LongTensor of arrays", line("long tensor")): 1}
    assert profiled(work) == expected
    noted: list[str] = []
    patches = Patches()
    count_creations(lambda name, *_: noted.append(name), patches)
    try:
        assert profiled(work) == expected
    finally:
        patches.undo()
    assert noted == ["LongTensor"] * 2
    assert any(kind is torch.LongTensor for kind in torch._tensor_classes)
