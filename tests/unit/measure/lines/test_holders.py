from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._autograd import _get_sequence_nr

from flatout.measure.lines import holders
from flatout.measure.lines.holders import (
    Holder,
    container_sizes,
    does_not_grow,
    find_holder,
    graph_of,
    held_by_python,
    old_nodes,
    tensors_with_graph,
)
from flatout.measure.user_code import UserCode

HERE = Path(__file__)
USER_CODE = UserCode(str(HERE.parent))
KEPT_GLOBALLY: list[torch.Tensor] = []


@pytest.fixture(autouse=True, scope="module")
def something_kept(small_heap: None) -> None:
    """Scans pass over what the test process has loaded, this module's own names excepted."""
    KEPT_GLOBALLY.append(torch.ones(1))


class Trainer:
    def __init__(self) -> None:
        self.history: list[torch.Tensor] = []

    def log(self, tensor: torch.Tensor) -> None:
        self.history.append(tensor)

    def carry(self, tensor: torch.Tensor) -> None:
        self.state = tensor


def line_of(part: str) -> int:
    lines = HERE.read_text().splitlines()
    (number,) = [n for n, text in enumerate(lines, start=1) if text.strip().startswith(part)]
    return number


def made() -> torch.Tensor:
    return torch.ones(3)


def described(found: Holder | None) -> tuple[str, str | None] | None:
    return None if found is None else (found.name, str(found.place) if found.place else None)


def test_a_local_variable() -> None:
    plain_local = made()
    found = find_holder(gc_only(plain_local), USER_CODE)
    assert found is not None and found.name == "plain_local"
    place = found.place
    assert place is not None and place.line == line_of("plain_local = made()")
    assert place.function == "test_a_local_variable"


def gc_only(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, through a frame that is gone again."""
    return tensor


def looked_up(tensors: Any) -> Holder | None:
    """The holder of what `tensors()` gives; nothing of the caller's names it."""
    frame = sys._getframe(1)
    return find_holder(tensors(), USER_CODE, frame=frame)


def test_a_list_in_a_local_variable() -> None:
    local_list: list[torch.Tensor] = []
    local_list.append(made())
    assert described(looked_up(lambda: gc.get_referents(local_list)[0])) == (
        "local_list",
        f"{HERE.name}:{line_of('local_list.append(made())')}",
    )


def test_an_attribute_of_the_users_class() -> None:
    trainer = Trainer()
    trainer.log(made())
    trainer.carry(made())
    in_list = looked_up(lambda: trainer.history[0])
    assert described(in_list) == ("self.history", f"{HERE.name}:{line_of('self.history.append(tensor)')}")
    assert in_list is not None and in_list.containers == (trainer.history,)
    direct = looked_up(lambda: trainer.state)
    assert described(direct) == ("self.state", f"{HERE.name}:{line_of('self.state = tensor')}")


def test_nested_containers_are_all_named() -> None:
    nested_log: dict[str, list[tuple[int, torch.Tensor]]] = {"loss": []}
    nested_log["loss"].append((0, made()))
    found = looked_up(lambda: nested_log["loss"][0][1])
    assert described(found) == ("nested_log", f"{HERE.name}:{line_of('nested_log[' + chr(34))}")
    assert found is not None
    assert found.containers == (nested_log["loss"][0], nested_log["loss"], nested_log)


def test_a_variable_of_a_closure() -> None:
    def hook_with_memory() -> Any:
        remembered: list[torch.Tensor] = []

        def hook(tensor: torch.Tensor) -> None:
            remembered.append(tensor)

        return hook

    hook = hook_with_memory()
    hook(made())
    found = looked_up(lambda: hook.__closure__[0].cell_contents[0])
    assert described(found) == ("remembered", f"{HERE.name}:{line_of('remembered.append(tensor)')}")


def test_a_variable_of_a_waiting_generator() -> None:
    def batches() -> Iterator[int]:
        prefetched = made()
        yield 1
        yield len(prefetched)

    generator = batches()
    next(generator)
    found = looked_up(lambda: generator.gi_frame.f_locals["prefetched"])  # type: ignore[attr-defined]
    assert found is not None and found.name == "prefetched"


def test_a_global_from_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module_file = tmp_path / "registry_of_outputs.py"
    module_file.write_text("import torch\nOUTPUTS = {}\n\ndef keep(k):\n    OUTPUTS[k] = torch.ones(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import registry_of_outputs  # type: ignore[import-not-found]

    registry_of_outputs.keep("a")
    found = looked_up(lambda: registry_of_outputs.OUTPUTS["a"])
    assert found is not None and found.name == "OUTPUTS"
    assert found.place is not None and found.place.line == 5
    assert found.place.function == "keep"


def test_a_tensor_that_only_a_graph_has_saved_has_no_holder() -> None:
    x = torch.ones(3, requires_grad=True)
    hidden = x.sin()
    result = hidden * hidden
    del hidden
    made_by_sine = [each for each in tensors_with_graph() if type(graph_of(each)).__name__ == "SinBackward0"]
    assert len(made_by_sine) == 1
    outside = sys._getframe().f_back
    assert find_holder(made_by_sine[0], USER_CODE, frame=outside, ignored=[made_by_sine]) is None
    made_by_sine.append(result)
    assert [each is result for each in held_by_python(made_by_sine, USER_CODE, frame=sys._getframe())] == [
        True
    ]


def test_frames_keep_no_copies_of_their_variables() -> None:
    short_lived, long_lived = made(), made()
    found = find_holder(long_lived, USER_CODE)
    assert found is not None and found.name == "long_lived"
    reference = weakref.ref(short_lived)
    del short_lived
    assert reference() is None


def test_a_functions_own_locals_are_left_alone() -> None:
    def function() -> dict[str, Any]:
        setting, kept = 3, made()
        settings = locals()
        find_holder(kept, USER_CODE)
        return settings

    assert function()["setting"] == 3


@pytest.mark.parametrize(
    ("container", "grow", "bounded"),
    [
        (deque([1], maxlen=5), lambda each: each.append(2), True),
        (deque([1]), lambda each: each.append(2), False),
        ([1], lambda each: each.append(2), False),
        ([1, 2], lambda each: each.append(each.pop(0)), True),
        ({"a": 1}, lambda each: each.update(b=2), False),
        ({"a": 1}, lambda each: each.update(a=2), True),
    ],
)
def test_bounded_holders(container: Any, grow: Any, bounded: bool) -> None:
    sizes = {id(container): len(container)}
    grow(container)
    assert does_not_grow(Holder(name="x", place=None, containers=((1, 2), container)), sizes) == bounded


def test_a_holder_without_containers_or_with_a_fresh_one_may_grow() -> None:
    assert not does_not_grow(Holder(name="x", place=None), {})
    assert not does_not_grow(Holder(name="x", place=None, containers=([1],)), {})


def test_container_sizes_are_those_of_live_containers() -> None:
    container = [made(), made(), made()]
    assert container_sizes()[id(container)] == 3


def test_old_nodes_are_those_made_before_a_number() -> None:
    x = torch.ones(3, requires_grad=True)
    old = x.sin().cos()  # two nodes
    mark = _get_sequence_nr()
    young = old.exp().sum()
    fresh = x.exp()
    assert [len(numbers) for numbers in old_nodes([old, young, fresh], before=mark)] == [2, 0, 0]
    assert [len(numbers) for numbers in old_nodes([young, old, fresh], before=mark)] == [2, 0, 0]
    assert [len(numbers) for numbers in old_nodes([x, fresh], before=mark)] == [0, 0]


def test_the_walk_over_a_graph_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, requires_grad=True)
    for _ in range(50):
        x = x.sin()
    monkeypatch.setattr(holders, "MOST_NODES", 20)
    (numbers,) = old_nodes([x], before=_get_sequence_nr())
    assert len(numbers) == 20


def test_tensors_with_graph_come_oldest_first() -> None:
    x = torch.ones(3, requires_grad=True)
    first, second = x.sin(), x.cos()
    mine = [each for each in tensors_with_graph() if each is first or each is second]
    assert [each is first for each in mine] == [True, False]
