"""A watched loader whose batches were kept, as a real block leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.clock import Clock
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.loading.workers import LOG
from flatout.measure.patches import Patches
from flatout.measure.process.watch import ProcessWatch
from flatout.measure.user_code import UserCode

MakeContext = Callable[..., ArmContext]


@pytest.fixture
def watch() -> Iterator[LoaderWatch]:
    LOG.reset()
    patches = Patches()
    watch = LoaderWatch(Clock(), UserCode(str(Path(__file__).parent)))
    watch.install(patches)
    yield watch
    patches.undo()


@pytest.fixture
def keep(watch: LoaderWatch) -> Callable[..., Iterator[Any]]:
    """Train on the first batches of a loader and keep them; the iterator goes on from there."""

    def keep(loader: DataLoader[Any], num: int = 4) -> Iterator[Any]:
        watch.keeping = True
        batches = iter(loader)
        for _ in range(num):
            next(batches)
            watch.num_steps += 1
        watch.keeping = False
        return batches

    return keep


@pytest.fixture
def begin(watch: LoaderWatch) -> Callable[[Arm], None]:
    """Begin a block of an arm."""

    def begin(arm: Arm) -> None:
        watch.begin_serving(arm.serves)
        arm.begin()

    return begin


@pytest.fixture
def end(watch: LoaderWatch) -> Callable[[Arm], None]:
    """End it, and go on with real batches."""

    def end(arm: Arm) -> None:
        arm.end()
        watch.begin_serving(None)

    return end


@pytest.fixture
def context(watch: LoaderWatch) -> Iterator[MakeContext]:
    """What the instruments found, nothing but for what is given."""
    patches = Patches()
    found: dict[str, Any] = {
        "device": "cpu",
        "step_s": 1.0,
        "phases_s": {},
        "stacks": None,
        "sites": (),
        "module_calls": (),
        "kernels": None,
        "memory": None,
        "loaders": watch,
        "optimizer": None,
        "optimizers": (),
        "made_at": lambda optimizer: None,
        "attributed_step_s": None,
        "user_code": watch.user_code,
        "clock": watch.clock,
        "patches": patches,
        "left_out": None,
        "batch_statements": None,
        "num_backwards": lambda: 0,
        "outermost_types": frozenset(),
        "seconds_left": 60.0,
        "process": ProcessWatch(watch.clock, watch.user_code),
    }
    yield lambda **changes: ArmContext(**{**found, **changes})
    patches.undo()
