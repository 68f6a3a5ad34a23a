"""What a trace knows of its GPU, and says where it does not."""

from __future__ import annotations

from flatout.hardware.simulated import simulated_device
from flatout.memory.cuda.target import capability_of, multiprocessors_of, workspaces_for
from flatout.memory.predict.estimate import NO_WORKSPACES


def test_the_capability_is_that_of_the_device() -> None:
    assert capability_of(None) is None
    assert capability_of(simulated_device("H200")) == (9, 0)
    assert capability_of(simulated_device("T4")) == (7, 5)


def test_multiprocessors_are_those_of_the_datasheet() -> None:
    assert multiprocessors_of(simulated_device("A100-80GB")) == 108
    assert multiprocessors_of(simulated_device("24GB")) is None
    assert multiprocessors_of(None) is None


def test_an_assumed_number_of_multiprocessors_is_said() -> None:
    assert workspaces_for(simulated_device("A100-80GB")) is NO_WORKSPACES
    assert workspaces_for(None) is NO_WORKSPACES
    assumed = workspaces_for(simulated_device("24GB"))
    assert assumed.source == "assumed" and assumed.value == ()
    assert "132 multiprocessors" in assumed.reason
