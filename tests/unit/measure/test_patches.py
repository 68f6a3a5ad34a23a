from __future__ import annotations

import inspect
import types
from collections.abc import Callable

import pytest
import torch

from flatout.measure.patches import Patches


class Base:
    def method(self) -> str:
        return "base"

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__


class Child(Base):
    pass


def test_what_was_replaced_comes_back_as_the_same_object() -> None:
    before = dict(Base.__dict__)
    patches = Patches()
    for name in ("method", "static", "of_class"):
        patches.replace(Base, name, lambda *_: "patched")
    assert Base().method() == "patched"
    patches.undo()
    assert all(Base.__dict__[name] is before[name] for name in ("method", "static", "of_class"))
    assert (Base().method(), Base.static(), Base.of_class()) == ("base", "static", "Base")


def test_an_inherited_attribute_is_not_left_behind_on_the_subclass() -> None:
    patches = Patches()
    patches.replace(Child, "method", lambda self: "patched")
    assert Child().method() == "patched"
    assert Base().method() == "base"
    patches.undo()
    assert "method" not in Child.__dict__
    assert Child().method() == "base"


def test_what_the_job_replaced_in_turn_stays() -> None:
    patches = Patches()
    patches.replace(Child, "method", lambda self: "ours")
    ours = Child.method
    Child.method = lambda self: f"theirs, {ours(self)}"  # type: ignore[method-assign]
    patches.undo()
    assert Child().method() == "theirs, ours"
    del Child.method


def test_modules_and_torch_types_are_restored() -> None:
    module = types.ModuleType("module")
    module.value = original = object()  # type: ignore[attr-defined]
    to = torch.Tensor.to
    in_dict = "to" in torch.Tensor.__dict__
    patches = Patches()
    patches.replace(module, "value", 1)
    patches.replace(torch.Tensor, "to", lambda *_: None)
    patches.undo()
    assert module.value is original  # type: ignore[attr-defined]
    assert torch.Tensor.to is to
    assert ("to" in torch.Tensor.__dict__) == in_dict


def test_the_newest_change_is_taken_back_first() -> None:
    seen: list[str] = []
    patches = Patches()
    original = Base.__dict__["method"]
    patches.on_undo(lambda: seen.append("first"))
    patches.replace(Base, "method", lambda self: "one")
    patches.replace(Base, "method", lambda self: "two")
    patches.on_undo(lambda: seen.append("last"))
    patches.undo()
    assert seen == ["last", "first"]
    assert Base.__dict__["method"] is original


def test_undoing_twice_does_nothing_more() -> None:
    seen: list[int] = []
    patches = Patches()
    patches.on_undo(lambda: seen.append(1))
    patches.undo()
    patches.undo()
    assert seen == [1]


def test_an_attribute_that_is_not_there_cannot_be_replaced() -> None:
    module = types.ModuleType("module")
    with pytest.raises(AttributeError):
        Patches().replace(module, "absent", 1)
    assert not hasattr(module, "absent")


def test_a_function_keeps_the_name_and_the_signature_of_what_it_stands_in_for() -> None:
    def init(loader: object, *args: object, **kwargs: object) -> None: ...

    signature = inspect.signature(torch.utils.data.DataLoader.__init__)
    patches = Patches()
    patches.replace(torch.utils.data.DataLoader, "__init__", init)
    try:
        assert torch.utils.data.DataLoader.__init__ is init
        assert inspect.signature(torch.utils.data.DataLoader.__init__) == signature
        assert init.__qualname__ == "DataLoader.__init__"
    finally:
        patches.undo()


def test_what_goes_around_a_method_is_given_it_first() -> None:
    patches = Patches()

    @patches.around(Base, "method")
    def twice(real: Callable[[Base], str], base: Base) -> str:
        return real(base) * 2

    assert Child().method() == "basebase" and Base.method.__qualname__ == "Base.method"
    patches.undo()
    assert Child().method() == "base"
