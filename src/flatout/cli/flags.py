"""Options and arguments that several verbs share: one name, one meaning, one help text.

A verb writes `json_output: flags.Json = False` and nothing else about the flag.  Names are given to typer
explicitly, because some of its releases derive them from the metavar.

A flag of one verb alone is written where it is used, `lr: float | None = option("--lr", "X", "...")`, and
carries the name of the setting that it sets, so that `collect` finds what the user gave.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from flatout.ground.errors import BadInput


def flag(name: str, metavar: str, text: str) -> Any:
    """Declare an option with a value, inside `Annotated`."""
    return typer.Option(name, metavar=metavar, help=text)


def switch(name: str, text: str) -> Any:
    """Declare an option without a value, inside `Annotated`."""
    return typer.Option(name, help=text)


Json = Annotated[bool, switch("--json", "Print one JSON document.")]
Out = Annotated[
    str | None, flag("--out", "DIR", "Write everything to this folder; default .flatout/runs/NAME.")
]
Resume = Annotated[
    bool, switch("--resume", "Continue an interrupted run from its last checkpoint or finished trial.")
]
Set = Annotated[
    list[str] | None,
    flag("--set", "KEY=VALUE", "Override a setting of CONFIG, such as a.b=3; repeatable."),
]
Device = Annotated[str | None, flag("--device", "NAME", "Compute on auto (default), cpu or cuda.")]
Gpu = Annotated[
    str | None, flag("--gpu", "NAME", 'Plan for this GPU: "A100-80GB", "RTX 4090"; default: the one here.')
]
Html = Annotated[Path | None, flag("--html", "FILE", "Write the report as one self-contained page.")]
Png = Annotated[Path | None, flag("--png", "FILE", "Write the plots as a .png or .svg file.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Write without asking.")]
Dtype = Annotated[
    str | None, flag("--dtype", "NAME", "Compute in auto (default), float32, bfloat16 or float16.")
]
Seed = Annotated[int | None, flag("--seed", "N", "Set the seed of everything random.")]
Log = Annotated[Path | None, flag("--log", "DIR", "Use this folder of runs; default .flatout/runs.")]
Module = Annotated[bool, switch("-m", "Run a module, like python -m pkg.train.")]
Command = Annotated[list[str] | None, typer.Argument(metavar="ARGS", hidden=True)]
Config = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", help="A YAML file with settings, or a run folder.", show_default=False),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run: its folder, its name, or part of its name.")]


def option(name: str, metavar: str, text: str) -> Any:
    """Declare an option of one verb; it is None if the user does not give it."""
    return typer.Option(None, name, metavar=metavar, help=text, show_default=False)


def collect(ctx: typer.Context, *, apart: Iterable[str] = ()) -> dict[str, Any]:
    """Collect the settings that the user gave: parameters, except those in `apart`, and `--set`."""
    never = {"config", "settings", "resume", "json_output", *apart}
    said = {}
    for name, value in ctx.params.items():
        if name not in never and value is not None and value != ():  # repeatable, not given
            said[name] = list(value) if isinstance(value, tuple) else value
    return said | pairs(ctx.params.get("settings"), flag="--set")


def check_html(html: Path | None) -> None:
    """Raise BadInput if the page of --html cannot be written; called before long work starts."""
    if html is not None:
        check_output(html, flag="--html", name="report.html")


def check_output(path: Path, *, flag: str, name: str) -> None:
    """Raise BadInput if a flag's file cannot be written; `name` is suggested if the flag names a folder."""
    if path.is_dir():
        raise BadInput(f"{flag} {path} is a folder", hint=f"name a file in it: {path / name}")
    folder = next((parent for parent in path.absolute().parents if parent.exists()), None)
    if folder is None or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BadInput(f"{flag} {path} cannot be written", hint="choose a writable folder")


def pairs(texts: Iterable[str] | None, *, flag: str) -> dict[str, Any]:
    """Read KEY=VALUE texts; a value is written as in YAML."""
    return dict(_pair(text, flag=flag) for text in texts or ())


def _pair(text: str, *, flag: str) -> tuple[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    key, equals, value = text.partition("=")
    if not key or not equals:
        raise BadInput(f"{flag} {text!r} is not KEY=VALUE", hint=f"write {flag} KEY=VALUE")
    try:
        return key, YAML(typ="safe").load(value)
    except YAMLError:
        raise BadInput(f"{flag} {text!r}: the value is not valid YAML", hint="quote it as in YAML") from None
