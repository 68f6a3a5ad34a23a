"""The `flatout` command: its verbs, and what every verb does when it cannot do its work.

Results go to stdout, everything else to stderr.  Exit codes: 0 clean, 1 findings or a failed check,
2 the tool could not do its work (a bad flag, a FlatoutError, a defect of Flatout itself), 3 a check cannot
tell, 130 interrupted by Ctrl-C, 141 the reader of the output went away.

`--help` must cost no more than starting Python, so the modules of verbs import torch, rich and the rooms
inside their functions.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import flatout
from flatout.ground.atomic_files import refused_by_disk, unwritable
from flatout.ground.errors import FlatoutError, Interrupted, is_interrupt

CRASHED, INTERRUPTED, READER_GONE = 2, Interrupted.exit_code, 141


class Verb(TyperCommand):
    """A verb that also takes `--version`, and names its own options where they follow the script."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlatoutError as error:
            own = {option for each in self.params for option in each.opts if option.startswith("--")}
            after = [each.partition("=")[0] for each in (ctx.params.get("command") or ())[1:]]
            if passed := [each for each in after if each in own]:
                where = f"{', '.join(passed)} went to the script: options of flatout come before it"
                error.hint = f"{error.hint}; {where}" if error.hint else where
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        shared = [each for each in ctx.find_root().command.params if each.name == "version"]
        return [*super().get_params(ctx), *shared]


class Verbs(TyperGroup):
    """The group of all verbs; an error or an interrupt becomes one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            value = super().invoke(ctx)
            sys.stdout.flush()
        except FlatoutError as error:
            say_error(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as interrupt:
            typer.echo(f"flatout: {str(interrupt) or 'interrupted'}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise typer.Exit(READER_GONE) from None
        return value


class DefectsExitWithTwo:
    """Exit with 2 for a defect of Flatout: a traceback would exit with 1, the code for findings."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, (Exception, KeyboardInterrupt)) and is_interrupt(error):
            typer.echo("flatout: interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None
        if isinstance(error, Exception) and (refused := refused_by_disk(error)):
            name = "a file" if refused.filename is None else str(refused.filename)
            say_error(unwritable(name, refused))
            raise SystemExit(CRASHED) from None
        if isinstance(error, Exception):
            traceback.print_exception(error)
            typer.echo("flatout: this is a bug in flatout, not in your job", err=True)
            raise SystemExit(CRASHED) from None


def say_error(error: FlatoutError) -> None:
    with contextlib.suppress(OSError):  # stderr may be a file on a full disk; the exit code still tells
        if isinstance(error, Interrupted):
            typer.echo(err=True)  # after the terminal's ^C, or after half a line of a worker
        typer.echo(f"flatout: {error.line}", err=True)


def _open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that a service or a shell (`>&-`) has closed.

    Child processes, and the script that this process becomes, inherit the closed stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def _discard_output() -> None:
    """Discard output that cannot be written, because the interpreter flushes again when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> None:
    """Run the `flatout` command."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal gets a question mark, not a traceback
    try:
        with DefectsExitWithTwo():
            application()(prog_name="flatout")
    finally:
        _discard_output()


def application() -> typer.Typer:
    """Make the command with all its verbs."""
    from flatout.cli.adapt import adapt
    from flatout.cli.devices import devices
    from flatout.cli.diagnose import diagnose, rules
    from flatout.cli.evolve import evolve
    from flatout.cli.fetch import fetch
    from flatout.cli.plan import plan
    from flatout.cli.report import compare, report
    from flatout.cli.steer import steer
    from flatout.cli.tune import check, run, tune
    from flatout.cli.watch import watch

    # Plain help: typer's rich help costs as much CPU time as everything else together.
    app = typer.Typer(
        cls=Verbs,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(top)
    # Whatever follows the script, options included, belongs to the script.
    to_the_script = {"allow_interspersed_args": False}
    of_a_script: dict[str, Any] = {
        "options_metavar": "[OPTIONS] (SCRIPT | -m MODULE)",
        "context_settings": to_the_script,
    }
    app.command(cls=Verb, **of_a_script)(diagnose)
    app.command(cls=Verb, **of_a_script)(tune)
    app.command(cls=Verb, **of_a_script)(run)
    app.command(cls=Verb, **of_a_script)(check)
    for verb in (rules, devices, fetch, evolve, report, compare):
        app.command(cls=Verb)(verb)
    for name, group in (("plan", plan), ("steer", steer), ("adapt", adapt)):
        for command in group.registered_commands:
            command.cls = Verb
        app.add_typer(group, name=name)
    app.command(
        cls=Verb, options_metavar="[OPTIONS] [--run (SCRIPT | -m MODULE)]", context_settings=to_the_script
    )(watch)
    return app


def all_verbs() -> Iterator[tuple[str, Any]]:
    """Yield every verb's name and its command, groups opened: ("plan fit", ...)."""
    group: Any = typer.main.get_command(application())
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        yield from [(name, command)] if inner is None else [(f"{name} {each}", inner[each]) for each in inner]


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"flatout {flatout.__version__}")
        raise typer.Exit()


def top(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_say_version,
            is_eager=True,
            expose_value=False,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Find out why a PyTorch job wastes its GPU, prove it by measurement, and fix what is proven.

    \b
    Examples:
      flatout diagnose train.py --epochs 3        run an unmodified script and say why it is slow
      flatout diagnose --html report.html -m pkg.train
      flatout diagnose --evidence run.json        the same findings from a saved file, on any machine
      flatout rules FO301                         what a finding means and how to fix it
      flatout tune train.py --epochs 3            try fixes and keep what is proven faster
      flatout run train.py --epochs 3             run the script with what tune kept
      flatout check --base main train.py          is this version slower than main?
      flatout plan fit conf/ --gpu A100-80GB --model pkg.train:build
      flatout fetch smollm2 ./smollm2             download a small real model
      flatout evolve --model ./smollm2 --task arithmetic --out runs/sums
      flatout steer search --model ./smollm2 --questions syc.jsonl --out runs/syc
      flatout adapt train five.yaml --phase all   train adapters for five tasks in one batch, then a router
      flatout watch --run train.py                show a live line under any script, and log the run
      flatout report train --html run.html        show a finished run as one page
      flatout compare 4711 4802                   compare two runs: what differs, and what is noise
      flatout devices                             show the GPUs and the share of the host a job may use

    Exit codes: 0 no findings, 1 findings, 2 flatout could not do its work, 130 interrupted.
    """
