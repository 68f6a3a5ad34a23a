"""Errors of the user's own code: named as theirs, with the line they come from."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from flatout.ground.errors import BadInput, FlatoutError, MissingExtra
from flatout.ground.user_code import calling, import_named, import_user_module, load_plugins


def raised(what: str, code: str, path: Path) -> FlatoutError:
    """The error that comes of running `code` as the file `path`."""
    path.write_text(code)
    with pytest.raises(FlatoutError) as caught, calling(what):
        exec(compile(code, str(path), "exec"), {})
    return caught.value


def test_type_message_and_line_are_the_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    error = raised("my_models:build", "def f():\n    return {}['width']\nf()\n", path)
    assert isinstance(error, BadInput)
    assert error.message == "my_models:build raised KeyError: 'width'"
    assert error.hint == f"at {path}:2"


def test_the_line_is_the_users_even_when_a_library_raised(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    error = raised("build", "import json\n\njson.loads('{')\n", path)
    assert error.hint == f"at {path}:3"
    assert "JSONDecodeError" in error.message


def test_a_syntax_error_names_its_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("a = 1\nif a\n")
    with pytest.raises(BadInput) as caught, calling("importing broken"):
        compile(path.read_text(), str(path), "exec")
    assert caught.value.hint == f"at {path}:2"
    assert "SyntaxError" in caught.value.message


def test_an_exit_is_told_with_its_message() -> None:
    with pytest.raises(BadInput, match="build ended the program: no such stage"), calling("build"):
        raise SystemExit("no such stage")


def test_an_exit_without_a_word_is_told_and_forked_processes_keep_theirs(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    code = (
        "import os\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "os._exit(3)\n"
    )
    end_process = os._exit
    error = raised("the judge", code, path)
    assert error.message == "the judge ended the program: os._exit(3)" and error.hint == f"at {path}:6"
    assert os._exit is end_process


def test_errors_of_ours_and_interrupts_pass_unchanged() -> None:
    ours = BadInput("clear already")
    with pytest.raises(BadInput) as caught, calling("build"):
        raise ours
    assert caught.value is ours
    with pytest.raises(KeyboardInterrupt), calling("build"):
        raise KeyboardInterrupt


def test_success_is_silent() -> None:
    with calling("json"):
        assert json.loads("1") == 1


@pytest.mark.parametrize("package", ["transformers", "peft", "lightning"])
def test_a_missing_optional_package_is_named_with_the_command_that_brings_it(package: str) -> None:
    with pytest.raises(MissingExtra) as caught, calling("importing mine"):
        raise ModuleNotFoundError("...", name=f"{package}.models")
    assert str(caught.value) == (
        f"importing mine needs the package {package!r}, which is not installed (pip install {package})"
    )


def test_any_other_missing_module_is_the_users_error() -> None:
    with pytest.raises(BadInput, match="No module named 'flatout_no_such_thing'"), calling("importing mine"):
        importlib.import_module("flatout_no_such_thing")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_code_that_wants_a_gpu_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    error = raised("the batch maker", "import torch\ntorch.ones(2).cuda()\n", path)
    assert error.message.startswith("the batch maker needs a GPU: ")
    assert error.hint == f"create everything on the CPU, Flatout moves it; at {path}:2"


def test_a_module_is_found_where_we_are_and_an_absent_one_is_told_from_one_that_lacks_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here_user_code.py").write_text("VALUE = 3\n")
    (tmp_path / "needy_user_code.py").write_text("import absent_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert import_user_module("here_user_code", hint="").VALUE == 3
    with pytest.raises(BadInput, match=r"there is no module 'no_such_user_code' \(look elsewhere\)"):
        import_user_module("no_such_user_code", hint="look elsewhere")
    with pytest.raises(BadInput, match="ModuleNotFoundError: No module named 'absent_package'"):
        import_user_module("needy_user_code", hint="look elsewhere")


def test_an_object_is_named_by_its_module_or_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_user_code.py").write_text("def judge(): pass\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = import_named(f"{tmp_path}/named_user_code.py:judge", what="judge")
    assert found is import_named("named_user_code:judge", what="judge")
    with pytest.raises(BadInput, match=r"named_user_code\.py has no 'juge' .*py:judge"):
        import_named(f"{tmp_path}/named_user_code.py:juge", what="judge")
    with pytest.raises(BadInput, match=r"there is no file absent\.py for the judge"):
        import_named("absent.py:judge", what="judge")


def install(folder: Path, entries: str) -> None:
    metadata = folder / "extra_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[flatout.test_group]\n{entries}")


def test_objects_by_the_names_of_their_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_plugins("flatout.test_group") == {}
    install(tmp_path, "second = json:loads\nfirst = json\n")
    monkeypatch.syspath_prepend(tmp_path)
    import json

    found = load_plugins("flatout.test_group")
    assert list(found) == ["first", "second"] and found == {"first": json, "second": json.loads}


def test_what_cannot_be_loaded_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "first = no_such_module_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match=r"extra-package adds 'first' to .*\(fix or uninstall extra-package"):
        load_plugins("flatout.test_group")
