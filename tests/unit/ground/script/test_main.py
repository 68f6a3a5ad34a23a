"""A script run as `__main__`; tests/cli/test_what_a_script_sees.py compares it with plain `python`."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flatout.ground.script.main import (
    AfterImport,
    after_import,
    leave_out_own_frames,
    run_as_main,
    start_command,
)


@pytest.fixture(autouse=True)
def _process_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("argv", "orig_argv", "path", "meta_path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])


def test_modules_beside_a_script_go_before_those_that_were_imported_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "early.py").write_text("whose = 'the user'")
    (tmp_path / "late.py").write_text("whose = 'the user'")
    (tmp_path / "bare").mkdir()
    script = tmp_path / "script.py"
    script.write_text("import bare, early, late, sys\nsys.seen = [m.whose for m in (early, late, bare)]")
    for name in ("early", "late", "late.part", "bare"):
        module = ModuleType(name)
        module.whose = "Python"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "seen", None, raising=False)
    run_as_main([str(script)], module=False, at_start={*sys.modules} - {"late", "late.part", "bare"})
    assert sys.seen == ["Python", "the user", "Python"]  # type: ignore[attr-defined]
    assert "late.part" not in sys.modules


def test_a_folder_with_a_main_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "__main__.py").write_text("import sys; print(__name__, __spec__.name, sys.path[0], sys.argv)")
    run_as_main([str(tmp_path), "x"], module=False, at_start=sys.modules)
    assert capsys.readouterr().out == f"__main__ __main__ {tmp_path} {[str(tmp_path), 'x']}\n"


def test_bytecode_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import py_compile

    (tmp_path / "script.py").write_text("print('ran', __name__)")
    compiled = py_compile.compile(str(tmp_path / "script.py"), cfile=str(tmp_path / "script.pyc"))
    assert compiled is not None
    run_as_main([compiled], module=False, at_start=sys.modules)
    assert capsys.readouterr().out == "ran __main__\n"


def test_frames_of_ours_are_left_out_of_an_error_and_of_those_it_came_from(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("try:\n    {}['x']\nexcept KeyError as error:\n    raise OSError('no x') from error")
    with pytest.raises(OSError, match="no x") as raised:
        run_as_main([str(script)], module=False, at_start=sys.modules)
    error: BaseException | None = raised.value
    leave_out_own_frames(error)
    lines = []
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            lines.append((Path(trace.tb_frame.f_code.co_filename).name, trace.tb_lineno))
            trace = trace.tb_next
        error = error.__cause__
    assert lines == [("test_main.py", lines[0][1]), ("script.py", 4), ("script.py", 2)]


def test_options_of_python_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "_args_from_interpreter_flags", lambda: ["-O", "-W", "error"])
    command = start_command("a.module", "{}")
    assert command[:4] == [sys.executable, "-O", "-W", "error"]
    assert command[-1] == "{}" and "from a.module import main" in command[-2]


@pytest.fixture
def lately_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "lately_imported.py").write_text("value = 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lately_imported", raising=False)
    return "lately_imported"


def test_a_callback_after_an_import_comes_once_and_leaves_nothing(lately_imported: str) -> None:
    seen: list[ModuleType] = []
    after_import(lately_imported, seen.append)
    finder = sys.meta_path[0]
    assert isinstance(finder, AfterImport)
    first = importlib.import_module(lately_imported)
    assert importlib.import_module(lately_imported) is first
    assert seen == [first] and first.value == 3
    assert first.__spec__ is not None
    assert finder not in sys.meta_path
    assert type(first.__spec__.loader).__name__ == "SourceFileLoader"
    after_import(lately_imported, seen.append)  # it is there already
    assert seen == [first, first]
    del sys.modules["lately_imported"]


def test_several_wait_for_one_import_and_one_that_left_is_not_called(lately_imported: str) -> None:
    seen: list[str] = []
    leave = after_import(lately_imported, lambda _module: seen.append("left"))
    for name in ("one", "two"):
        after_import(lately_imported, lambda _module, name=name: seen.append(name))  # type: ignore[misc]
    leave()
    importlib.import_module(lately_imported)
    assert sorted(seen) == ["one", "two"]
    del sys.modules["lately_imported"]


def test_who_asks_for_a_package_without_importing_it_changes_nothing(lately_imported: str) -> None:
    """As transformers does before it imports torch."""
    seen: list[ModuleType] = []
    after_import(lately_imported, seen.append)
    for _ in range(2):
        assert importlib.util.find_spec(lately_imported) is not None
    assert seen == []
    assert importlib.import_module(lately_imported) is seen[0]
    del sys.modules["lately_imported"]
