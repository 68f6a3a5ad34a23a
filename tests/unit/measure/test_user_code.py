from __future__ import annotations

import collections
import linecache
import os
import statistics
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from flatout.measure.evidence import Place
from flatout.measure.user_code import UserCode, framework_around

HERE = Path(__file__)


class Places(TorchFunctionMode):
    """Notes place and via of each torch function called."""

    def __init__(self, user_code: UserCode) -> None:
        super().__init__()
        self.user_code = user_code
        self.seen: dict[str, tuple[Place | None, str | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.__name__] = self.user_code.place(sys._getframe(1))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def user_code() -> UserCode:
    return UserCode(str(HERE.parent))


def compiled(path: Path, source: str) -> dict[str, Any]:
    """The names a file at `path` defines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return executed(source, file=str(path))


def executed(source: str, *, file: str) -> dict[str, Any]:
    """The names `source` defines when it claims to be `file`."""
    names: dict[str, Any] = {}
    exec(compile(textwrap.dedent(source), file, "exec"), names)
    return names


CALLER = """
def call(function):
    return function()
"""


def frame_here() -> FrameType:
    return sys._getframe(1)


def test_a_user_line_is_its_own_place(user_code: UserCode) -> None:
    place, via = user_code.place(frame_here())
    line = frame_here().f_lineno - 1
    assert place == Place(file=HERE.name, line=line, function="test_a_user_line_is_its_own_place")
    assert via is None


def test_places_are_interned(user_code: UserCode) -> None:
    found = [user_code.place(frame_here())[0] for _ in range(2)]
    assert found[0] is found[1]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("stack", lambda x: torch.stack([x, x])),
        ("split", lambda x: torch.split(x, 1)),
        ("pad", lambda x: F.pad(x, (1, 1))),
        ("embedding", lambda x: F.embedding(torch.tensor([0]), x)),
        ("__rsub__", lambda x: 1.0 - x),
        ("softmax", lambda x: F.softmax(x, dim=-1)),
        ("detach", torch.no_grad()(lambda x: x.detach())),
    ],
)
def test_a_torch_function_called_by_the_user_is_direct(
    user_code: UserCode, name: str, call: Callable[[torch.Tensor], object]
) -> None:
    mode = Places(user_code)
    x = torch.randn(2, 2, requires_grad=True)
    with mode:
        call(x)
    place, via = mode.seen[name]
    assert place is not None and place.file == HERE.name
    assert via is None


def test_a_library_module_is_named_relative_to_its_package(user_code: UserCode) -> None:
    mode = Places(user_code)
    linear = torch.nn.Linear(2, 2)
    with mode:
        linear(torch.randn(1, 2))
    place, via = mode.seen["linear"]
    assert place is not None and place.file == HERE.name
    assert via is not None and via.startswith("torch/nn/modules/linear.py:")


def test_a_functional_under_a_module_shows_the_module(user_code: UserCode) -> None:
    mode = Places(user_code)
    embedding = torch.nn.Embedding(3, 2)
    with mode:
        embedding(torch.tensor([1]))
    assert (mode.seen["embedding"][1] or "").startswith("torch/nn/modules/sparse.py:")


def test_the_standard_library_is_a_library(user_code: UserCode) -> None:
    seen = []

    class Watched(float):
        def as_integer_ratio(self) -> tuple[int, int]:
            frame = sys._getframe(1)  # statistics.py
            seen.append(user_code.place(frame))
            return super().as_integer_ratio()

    statistics.mean([Watched(1.0), Watched(2.0)])
    place, via = seen[0]
    assert place is not None and place.file == HERE.name
    assert via is not None and via.startswith("statistics.py:")


def test_a_virtual_environment_below_the_project_is_a_library(tmp_path: Path) -> None:
    user_code = UserCode(str(tmp_path))
    installed = tmp_path / ".venv/lib/python3.12/site-packages/package/module.py"
    library = compiled(installed, CALLER)["call"]
    user = compiled(tmp_path / "train.py", "def main(call, function):\n    return call(function)\n")["main"]
    place, via = user(library, lambda: user_code.place(sys._getframe(1)))
    assert place == Place(file="train.py", line=2, function="main")
    assert via == "package/module.py:3"


def test_an_installed_package_can_be_the_job_itself(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    user_code = UserCode(str(packages / "trainer"))
    library = compiled(packages / "library/module.py", CALLER)["call"]
    user = compiled(packages / "trainer/loop.py", "def main(call, f):\n    return call(f)\n")["main"]
    place, via = user(library, lambda: user_code.place(sys._getframe(1)))
    assert (str(place), via) == ("loop.py:2", "library/module.py:3")


def test_this_package_is_neither_user_nor_library(tmp_path: Path) -> None:
    import flatout

    user_code = UserCode(str(tmp_path))
    folder = Path(flatout.__path__[0])
    names = executed(CALLER, file=str(folder / "measure" / "made_up.py"))
    user = compiled(tmp_path / "train.py", "def main(call, function):\n    return call(function)\n")["main"]
    place, via = user(names["call"], lambda: user_code.place(sys._getframe(1)))
    assert (str(place), via) == ("train.py:2", None)


def test_generated_code_is_skipped(tmp_path: Path) -> None:
    user_code = UserCode(str(tmp_path))
    names = executed(CALLER, file="<generated>")
    user = compiled(tmp_path / "train.py", "def main(call, function):\n    return call(function)\n")["main"]
    place, via = user(names["call"], lambda: user_code.place(sys._getframe(1)))
    assert (str(place), via) == ("train.py:2", None)


def test_text_that_is_executed_names_its_own_line(tmp_path: Path) -> None:
    text = """
    import dataclasses

    @dataclasses.dataclass
    class Batch:
        rows: list = dataclasses.field(default_factory=lambda: print)

        def __post_init__(self):
            pass

    def call(function):
        return function()

    made = start()
    """
    made: list[UserCode] = []
    names: dict[str, Any] = {"start": lambda: made.append(UserCode(str(tmp_path)))}
    exec(textwrap.dedent(text), names)
    (user_code,) = made
    place, via = names["call"](lambda: user_code.place(sys._getframe(1)))
    assert (str(place), via) == ("<string>:12", None)
    assert user_code.sources([place]) == {}
    assert not user_code.is_user(names["Batch"].__init__.__code__)  # dataclasses wrote it
    user = compiled(tmp_path / "train.py", "def main(at):\n    return eval('at()', {'at': at})\n")["main"]
    place, _ = user(lambda: user_code.place(sys._getframe(1)))
    assert str(place) == "<string>:1"


def test_the_text_that_started_a_process_is_nobodys(tmp_path: Path) -> None:
    names: dict[str, Any] = {"folder": str(tmp_path), "UserCode": UserCode, "sys": sys}
    exec("place, _ = UserCode(folder).place(sys._getframe())", names)
    assert names["place"] is None or names["place"].file != "<string>"


def test_a_file_outside_the_folder_keeps_its_absolute_path(tmp_path: Path) -> None:
    user_code = UserCode(str(tmp_path / "job"))
    user = compiled(tmp_path / "shared" / "model.py", CALLER)["call"]
    place, _ = user(lambda: user_code.place(sys._getframe(1)))
    assert place.file == os.path.realpath(tmp_path / "shared" / "model.py")


def test_a_relative_script_is_found_after_the_job_changed_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    user_code = UserCode(str(tmp_path))
    names = executed(CALLER, file="train.py")
    monkeypatch.chdir(tmp_path / "elsewhere")
    place, _ = names["call"](lambda: user_code.place(sys._getframe(1)))
    assert str(place) == "train.py:3"


def test_equal_functions_of_two_files_are_told_apart(tmp_path: Path) -> None:
    user_code = UserCode(str(tmp_path))
    calls = [compiled(tmp_path / name, CALLER)["call"] for name in ("one.py", "two.py")]
    assert calls[0].__code__ == calls[1].__code__
    places = [call(lambda: user_code.place(sys._getframe(1)))[0] for call in calls]
    assert [place.file for place in places] == ["one.py", "two.py"]


def test_functions_are_named_by_class_and_comprehensions_by_their_function(user_code: UserCode) -> None:
    class Model:
        def forward(self) -> list[Place | None]:
            return [user_code.place(sys._getframe(0))[0] for _ in range(1)]

    (place,) = Model().forward()
    assert place is not None and place.function is not None
    assert place.function.endswith("Model.forward")


def test_without_user_code_there_is_no_place(tmp_path: Path) -> None:
    user_code = UserCode(str(tmp_path))
    library = compiled(tmp_path / "site-packages" / "library.py", CALLER)["call"]
    seen: list[tuple[Place | None, str | None]] = []
    thread = threading.Thread(target=library, args=(lambda: seen.append(user_code.place(sys._getframe(1))),))
    thread.start()
    thread.join()
    assert seen == [(None, "library.py:3")]


def test_the_root_as_the_jobs_folder_does_not_make_the_library_the_users() -> None:
    user_code = UserCode("/")
    assert not user_code.is_user(torch.nn.Linear.forward.__code__)
    assert not user_code.is_user(collections.Counter.most_common.__code__)
    assert user_code.is_user(frame_here.__code__)


def test_a_file_and_line_as_a_place(tmp_path: Path) -> None:
    user_code = UserCode(str(tmp_path))
    place = user_code.place_at(str(tmp_path / "package" / "model.py"), line=3, function="Model.forward")
    assert place == Place(file=os.path.join("package", "model.py"), line=3, function="Model.forward")
    assert user_code.is_user_file(str(tmp_path / "package" / "model.py"))
    assert not user_code.is_user_file(torch.__file__)
    assert not user_code.is_user_file("<string>")


def test_asking_for_a_place_in_library_code_does_not_make_it_the_users(user_code: UserCode) -> None:
    code = torch.nn.Linear.forward.__code__
    assert user_code.place_in(code).line == code.co_firstlineno
    assert not user_code.is_user(code)


def test_sources_give_the_lines_around_each_place(tmp_path: Path) -> None:
    user_code = UserCode(str(tmp_path))
    (tmp_path / "train.py").write_text("".join(f"line {number}\n" for number in range(1, 21)))
    linecache.checkcache()
    places = [
        Place(file="train.py", line=12),
        Place(file="train.py", line=2),
        Place(file="gone.py", line=1),
        None,
    ]
    sources = user_code.sources(places, context=2)
    assert list(sources) == ["train.py"]
    assert list(sources["train.py"]) == ["1", "2", "3", "4", "10", "11", "12", "13", "14"]
    assert sources["train.py"]["10"] == "line 10"


@pytest.mark.parametrize(
    ("file", "framework"),
    [
        ("/lib/site-packages/transformers/trainer.py", "transformers"),
        ("/lib/site-packages/lightning/pytorch/loops/fit_loop.py", "lightning"),
        ("/lib/site-packages/pytorch_lightning/loops/fit_loop.py", "lightning"),
        ("/lib/site-packages/transformers/models/bert/modeling_bert.py", None),
        ("/home/ada/train.py", None),
    ],
)
def test_a_framework_is_known_by_the_file_of_its_loop(file: str, framework: str | None) -> None:
    call = executed(CALLER, file=file)["call"]
    assert call(lambda: framework_around(sys._getframe())) == framework
