"""The command: its verbs, what its help costs, and every way it can end."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import flatout
from flatout.cli.app import DefectsExitWithTwo, Verbs, application, main, say_error
from flatout.ground.errors import BadInput, Interrupted
from flatout.measure.evidence_file import save_evidence
from tests.support import doctor as builders


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(application(), arguments)


def ending_with(error: BaseException) -> Result:
    """The verdict of the real group over a verb that ends with `error`."""
    app = typer.Typer(cls=Verbs, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command()
    def verb() -> None:
        raise error

    @app.command()
    def other() -> None: ...

    return CliRunner().invoke(app, ["verb"])


def test_help_lists_every_verb_with_an_example() -> None:
    answer = invoke("--help")
    assert answer.exit_code == 0
    for verb in ("diagnose", "rules", "devices", "plan", "steer", "watch", "report", "compare"):
        assert f"\n  {verb} " in answer.stdout
        assert f"\n    flatout {verb}" in answer.stdout


@pytest.mark.parametrize(
    "verb", ["diagnose", "rules", "devices", "plan", "steer", "watch", "report", "compare"]
)
def test_every_verb_has_help(verb: str) -> None:
    answer = invoke(verb, "--help")
    assert answer.exit_code == 0
    assert answer.stdout.startswith(f"Usage: root {verb}") or f" {verb} " in answer.stdout.splitlines()[0]


@pytest.mark.parametrize("group", [[], ["plan"], ["steer"], ["adapt"]])
def test_a_list_of_commands_cuts_no_sentence(group: list[str]) -> None:
    _usage, _, commands = invoke(*group, "--help").stdout.partition("Commands:\n")
    lines = commands.splitlines()
    assert len(lines) >= 3 and all(line.endswith(".") and not line.endswith("...") for line in lines), lines


def test_help_imports_neither_torch_nor_rich() -> None:
    code = (
        "import sys; sys.argv = ['flatout', '--help']\n"
        "from flatout.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print('torch' in sys.modules, 'rich' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["False", "False"]


def test_version() -> None:
    answer = invoke("--version")
    assert (answer.exit_code, answer.stdout) == (0, f"flatout {flatout.__version__}\n")


@pytest.mark.parametrize(
    "arguments", [("--no-such-flag",), ("no-such-verb",), ("diagnose", "--no-such-flag", "x.py")]
)
def test_a_bad_flag_or_verb_ends_with_two(arguments: tuple[str, ...]) -> None:
    answer = invoke(*arguments)
    assert answer.exit_code == 2
    assert "Error" in answer.stderr


def test_an_error_is_one_line_with_its_hint() -> None:
    answer = ending_with(BadInput("there is no\nscript at x.py", hint="check the path"))
    assert answer.exit_code == 2
    assert answer.stderr == "flatout: there is no script at x.py; check the path\n"
    assert answer.stdout == ""


def test_an_error_decides_its_exit_code() -> None:
    class Peculiar(BadInput):
        exit_code = 77

    assert ending_with(Peculiar("odd")).exit_code == 77


def test_an_error_without_a_hint_ends_with_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    say_error(BadInput("odd"))
    assert capsys.readouterr().err == "flatout: odd\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("interrupted")])
def test_every_interrupt_ends_with_the_same_code(error: BaseException) -> None:
    answer = ending_with(error)
    assert (answer.exit_code, answer.stderr.lstrip("\n")) == (130, "flatout: interrupted\n")


def test_an_interrupt_while_the_verbs_are_imported_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> typer.Typer:
        raise KeyboardInterrupt

    monkeypatch.setattr("flatout.cli.app.application", interrupted)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "flatout: interrupted\n"


def test_every_help_that_names_exit_codes_names_the_one_of_an_interrupt() -> None:
    helps = [text for text in _helps() if "Exit codes:" in text]
    assert len(helps) >= 8
    assert all("130 interrupted" in " ".join(text.split()) for text in helps)


def _helps() -> Iterator[str]:
    def below(command: Any) -> Iterator[str]:
        yield command.help or ""
        for verb in getattr(command, "commands", {}).values():
            yield from below(verb)

    yield from below(typer.main.get_command(application()))


def test_a_defect_is_a_traceback_and_ends_with_two_not_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, DefectsExitWithTwo():
        raise ZeroDivisionError("ours")
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "ZeroDivisionError: ours" in said
    assert said.endswith("flatout: this is a bug in flatout, not in your job\n")


def test_a_wanted_exit_is_no_defect() -> None:
    with pytest.raises(SystemExit) as end, DefectsExitWithTwo():
        raise SystemExit(1)
    assert end.value.code == 1


def test_main_reads_the_arguments_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flatout", "--version"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("flatout ")


def test_a_reader_that_went_away_is_met_with_silence(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    save_evidence(builders.evidence(), path)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        command = [sys.executable, "-m", "flatout", "diagnose", "--json", "--evidence", str(path)]
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_a_stream_that_is_closed_stays_closed_for_a_script_and_breaks_no_verb(
    closed: str, tmp_path: Path
) -> None:
    """A service may close what it does not need; Python then has None in its place."""
    script = tmp_path / "look.py"
    script.write_text(
        "import sys\n"
        "seen = [name for name in ('stdin', 'stdout', 'stderr') if getattr(sys, name) is None]\n"
        "open('seen.txt', 'w').write(' '.join(seen))\n"
        "sys.exit(7)\n"
    )
    redirected = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-"}[closed]
    shell = ["sh", "-c", f'exec "$0" -m flatout watch --run "$1" {redirected}', sys.executable, str(script)]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "seen.txt").read_text() == closed
    assert "Traceback" not in done.stderr


def test_an_ascii_terminal_gets_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    save_evidence(builders.evidence(), path)
    command = [sys.executable, "-m", "flatout", "diagnose", "--evidence", str(path)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stdout.isascii()
    assert done.stderr == b""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_takes_no_more_is_no_defect(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    def in_a_library() -> None:
        try:
            raise OSError(number, os.strerror(number), "runs/log.jsonl")
        except OSError:
            raise RuntimeError("did not possess lock")  # noqa: B904 - as Optuna's lock does

    with pytest.raises(SystemExit) as end, DefectsExitWithTwo():
        in_a_library()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flatout: runs/log.jsonl cannot be written: {os.strerror(number)}; ")


@pytest.mark.parametrize(
    ("arguments", "streams"),
    [(("rules",), "stdout"), (("report", "no-such-run"), "stderr"), (("--help",), "stdout")],
)
def test_an_output_without_room_ends_with_two(arguments: tuple[str, ...], streams: str) -> None:
    with open("/dev/full", "w") as full:
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, streams: full}
        command = [sys.executable, "-m", "flatout", *arguments]
        done = subprocess.run(command, **given, text=True, check=False)  # type: ignore[call-overload]
    assert done.returncode == 2
    if streams == "stdout":
        (line,) = done.stderr.splitlines()
        assert "cannot be written: No space left on device" in line


def test_options_that_went_to_the_script_are_named_if_a_verb_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print()")
    answer = invoke("check", str(script), "--base=main", "--epochs", "3")
    assert answer.exit_code == 2
    assert "--base went to the script: options of flatout come before it" in answer.output
    assert "went to the script" not in invoke("check", str(script), "--epochs", "3").output
