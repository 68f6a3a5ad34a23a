from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode
from torch.utils._device import DeviceContext

from flatout.measure.lines.function_modes import has_mode, insert_mode, remove_mode


class Noting(TorchFunctionMode):
    """Notes the names of the torch functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def stack() -> list[Any]:
    return list(_get_current_function_mode_stack())


@pytest.fixture
def mode() -> Iterator[Noting]:
    """A mode for one test; whatever a failing test leaves on the stack is taken off."""
    yield Noting()
    while stack():
        _pop_mode()


def test_a_mode_inserted_in_a_hook_stays_until_it_is_removed(mode: Noting) -> None:
    def hook() -> None:
        insert_mode(mode)

    hook()
    torch.zeros(1)
    assert has_mode(mode)
    assert remove_mode(mode)
    torch.ones(1)
    assert mode.seen == ["zeros"]
    assert stack() == []


def test_removing_twice_says_so(mode: Noting) -> None:
    insert_mode(mode)
    assert remove_mode(mode)
    assert not remove_mode(mode)
    assert not has_mode(mode)


def test_the_script_may_leave_its_own_mode_while_ours_is_on(mode: Noting) -> None:
    own = Noting()
    with own:
        insert_mode(mode)
        assert stack() == [mode, own]
        torch.zeros(1)
    assert stack() == [mode]
    torch.ones(1)
    assert remove_mode(mode)
    assert own.seen == ["zeros"]
    assert mode.seen == ["zeros", "ones"]


def test_ours_is_removed_from_below_the_scripts_own(mode: Noting) -> None:
    own = Noting()
    insert_mode(mode)
    with own:
        assert remove_mode(mode)
        assert stack() == [own]
        torch.zeros(1)
    assert stack() == []
    assert own.seen == ["zeros"]
    assert mode.seen == []


def test_a_device_context_of_the_script_ends_where_it_would(mode: Noting) -> None:
    with torch.device("meta"):
        insert_mode(mode)
        assert torch.zeros(1).device.type == "meta"
    assert stack() == [mode]
    assert torch.zeros(1).device.type == "cpu"
    assert remove_mode(mode)
    assert stack() == []
    assert mode.seen.count("zeros") == 2


def test_ours_is_removed_from_inside_a_device_context(mode: Noting) -> None:
    insert_mode(mode)
    with torch.device("meta"):
        assert torch.zeros(1).device.type == "meta"
        assert remove_mode(mode)
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"
    assert stack() == []
    assert "ones" not in mode.seen


def test_a_default_device_set_by_the_script_survives(mode: Noting) -> None:
    torch.set_default_device("meta")
    try:
        insert_mode(mode)
        assert isinstance(stack()[0], DeviceContext)
        assert torch.zeros(1).device.type == "meta"
        torch.set_default_device("cpu")
        assert torch.zeros(1).device.type == "cpu"
        torch.set_default_device("meta")
        assert remove_mode(mode)
        assert torch.zeros(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert stack() == []
