"""The vocabulary of a trace."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import get_args

import numpy as np
import pytest

from flatout.memory.jobs.job import StepPhase
from flatout.memory.trace.record import COMPONENTS, Component, Storage, Trace


def test_the_order_of_components_names_each_once() -> None:
    assert sorted(COMPONENTS) == sorted(get_args(Component))
    assert len(set(COMPONENTS)) == len(COMPONENTS)


def test_the_phases_are_those_of_a_step() -> None:
    from flatout.memory.jobs import step

    assert get_args(StepPhase) == get_args(step.StepPhase)


def test_a_trace_is_compared_by_identity_and_cannot_be_changed() -> None:
    storage = Storage(num_bytes=4, component="parameters", phase="setup", op="parameter")
    first, second = (
        Trace(sizes={"batch_size": 1}, storages=(storage,), events=np.array([0, ~0]), marks=())
        for _ in range(2)
    )
    assert first != second  # arrays have no single answer
    assert first.storages == second.storages
    assert (storage.module, storage.formula) == (None, None)
    with pytest.raises(FrozenInstanceError):
        storage.num_bytes = 8  # type: ignore[misc]
