"""The tree of errors: as drawn, with exit codes, and with the extra to install."""

from __future__ import annotations

import re

import pytest

from flatout.ground import errors
from flatout.ground.errors import (
    LONGEST_LINE,
    BadInput,
    FlatoutError,
    MissingExtra,
    first_line,
    import_extra,
    is_interrupt,
)


def tree(error: type[FlatoutError]) -> list[type[FlatoutError]]:
    return [error, *(found for child in error.__subclasses__() for found in tree(child))]


def test_the_drawing_in_the_docstring_is_the_tree() -> None:
    drawn: dict[str, int] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([ │├└─]+)(\w+)  +\S", line)
        if match:
            drawn[match[2]] = (len(match[1]) - 4) // 4
    known = {
        error.__name__: len(error.__mro__) - len(FlatoutError.__mro__)
        for error in tree(FlatoutError)
        if not error.__name__.startswith("_")  # one that its own module raises and catches
    }
    assert len(known) >= 7
    assert drawn == known


@pytest.mark.parametrize("error", tree(FlatoutError))
def test_an_error_ends_the_command_with_neither_clean_nor_findings(error: type[FlatoutError]) -> None:
    assert error.exit_code not in (0, 1)


def test_an_error_reads_as_message_and_next_step() -> None:
    error = BadInput("batch_size=0 is below 1", hint="give a positive number")
    assert str(error) == "batch_size=0 is below 1 (give a positive number)"
    assert str(BadInput("no such file")) == "no such file"
    assert (error.message, error.hint) == ("batch_size=0 is below 1", "give a positive number")


def test_an_installed_module_is_imported() -> None:
    import json

    assert import_extra("json", extra="web") is json


def test_a_missing_module_names_the_extra_to_install() -> None:
    with pytest.raises(MissingExtra, match=r"'no_such_package' is not installed .*flatout\[web\]"):
        import_extra("no_such_package.part", extra="web")


def test_a_module_that_fails_on_another_import_is_not_called_missing(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pathlib

    folder = pathlib.Path(str(tmp_path))
    (folder / "breaks_inside.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        import_extra("breaks_inside", extra="web")


def test_an_interrupt_is_found_below_what_a_library_made_of_it() -> None:
    def cleaned_up() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("did not possess lock")  # noqa: B904 - as Optuna's lock does

    with pytest.raises(RuntimeError) as found:
        cleaned_up()
    assert is_interrupt(found.value)
    assert is_interrupt(KeyboardInterrupt())
    assert not is_interrupt(RuntimeError("of its own"))
    assert not is_interrupt(None)


def test_of_somebody_elses_error_the_first_line_is_shown_and_not_too_much_of_it() -> None:
    assert first_line(ValueError("no such size\nand a stack")) == "no such size"
    assert first_line(ValueError()) == ""
    assert len(first_line(ValueError("a backend, " * 200))) == LONGEST_LINE + 1
