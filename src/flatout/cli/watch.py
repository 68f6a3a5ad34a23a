"""`flatout watch`: the machine and its job, live, in a terminal, as lines, in a browser, or played again.

What is watched is one of: the machine with its latest job, a process (--pid), a script that is started
(--run), a run that is over (--replay), or the nodes of a cluster (--from).  Whatever stands after a script
belongs to the script.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.cli import flags
from flatout.cli.flags import flag, option, switch
from flatout.cli.output import plain_console, print_json, say
from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from flatout.monitor.sample import Sample

DEFAULT_SPEED = 60.0
# What to watch: one of these.  Then flags that mean something only with another.  Each names its parameter.
MODES = {"--pid": "pid", "--run": "run", "--replay": "replay", "--from": "sources", "--list": "list_all"}
ONLY_WITH = {
    "--run": {"-m": "module", "--name": "name"},
    "--replay": {"--speed": "speed"},
    "--web": {"--host": "host", "--port": "port", "--token": "token"},
}
SHORTEST_COMMAND, SHORTEST_NAME = 16, 24  # columns of the list


def watch(
    ctx: typer.Context,
    command: flags.Command = None,
    pid: int | None = option("--pid", "PID", "Watch this process."),
    run: Annotated[
        bool, switch("--run", "Run a script under watch, with the live line below its output.")
    ] = False,
    module: flags.Module = False,
    name: str | None = option("--name", "TEXT", "With --run: name the run."),
    replay: str | None = option("--replay", "RUN", "Replay a run; --list shows their names."),
    speed: float | None = option("--speed", "N", "With --replay: play N times as fast; default 60."),
    sources: list[str] | None = option(
        "--from", "SOURCE", "Show all nodes of a shared folder of runs, or a node's page; repeatable."
    ),
    list_all: Annotated[bool, switch("--list", "List the runs.")] = False,
    once: Annotated[bool, switch("--once", "Take one sample and exit.")] = False,
    json_output: flags.Json = False,
    hz: Annotated[float, flag("--hz", "N", "Take N samples per second, 0.1 to 10.")] = 1.0,
    log: flags.Log = None,
    jsonl: Path | None = option("--jsonl", "FILE", "Append samples as JSON lines."),
    csv: Path | None = option("--csv", "FILE", "Write samples as a table."),
    tensorboard: Path | None = option("--tensorboard", "DIR", "Write TensorBoard events."),
    prometheus: int | None = option("--prometheus", "PORT", "Serve /metrics on loopback; 0: any free port."),
    web: Annotated[bool, switch("--web", "Serve a page with live charts on loopback.")] = False,
    host: str | None = option("--host", "ADDRESS", "With --web: bind to this address; requires a token."),
    port: int | None = option("--port", "PORT", "With --web: use this port; default: any free one."),
    token: Annotated[
        bool, switch("--token", "With --web: require a token on loopback too, on a machine with other users.")
    ] = False,
) -> None:
    """Show what GPUs, host and job are doing, and what limits the job.

    Without options, watch shows all GPUs of this machine and the latest job under Flatout, full screen; in a
    pipe, it prints a line per second. A job reports its steps if it was started with --run or iterates over
    flatout.watch(loader). --log keeps a log of what is watched. --json prints one line per sample.
    Keys: q quit, s sort, tab next GPU, p processes, space pause, ? help.

    \b
    Examples:
      flatout watch
      flatout watch --run train.py --epochs 3     run a script with a live line below it, and log it
      flatout watch --web --run train.py          also serve a page while it runs
      flatout watch --pid 4711
      flatout watch --once --json
      flatout watch --web
      flatout watch --list
      flatout watch --from /shared/runs           show all nodes that log to this folder
      flatout watch --web --from http://gpu-1:9400/TOKEN/ --from http://gpu-2:9400/TOKEN/
      flatout watch --replay train --speed 60

    Exit codes: 0 ended normally, 2 flatout could not do its work, 130 interrupted. With --run, the script's
    own code.
    """
    _check(ctx.params)
    import flatout.api as api

    page: dict[str, Any] = {"host": host, "port": port, "token": token}
    if list_all:
        _list(log, json_output=json_output)
        return
    look: dict[str, Any] = {"on_screen": sys.stdout.isatty() and not json_output, "as_json": json_output}
    if sources:
        where: dict[str, Any] = {"page": page, "on_ready": _say_page} if web else {**look, "once": once}
        raise typer.Exit(api.watch_fleet(sources, **where))
    if replay is not None:
        if web:
            api.serve_run(replay, root=log, on_ready=_say_page, page=page)
            return
        speed = DEFAULT_SPEED if speed is None else speed
        raise typer.Exit(api.replay_run(replay, root=log, speed=speed, **look))
    sinks = api.sink_choice(jsonl=jsonl, csv=csv, tensorboard=tensorboard, prometheus=prometheus)
    if run:
        assert command
        api.watch_script(
            command, module=module, name=name, hz=hz, folder=log, sinks=sinks, page=page if web else None
        )
    options: dict[str, Any] = {"pid": pid, "hz": hz, "log": log, "sinks": sinks, "on_progress": say}
    if once:
        _answer_once(api.watch_once(**options), json_output=json_output)
    elif web:
        api.watch_on_page(**options, on_ready=_say_page, page=page)
    else:
        raise typer.Exit(api.watch_live(**options, **look))


def _check(params: Mapping[str, Any]) -> None:
    """Refuse combinations of options that make no sense, before anything starts."""
    given = {name for name, value in params.items() if value not in (None, (), []) and value is not False}
    command, one_answer = params["command"], bool(given & {"once", "json_output"})
    chosen = [flag for flag, name in MODES.items() if name in given]
    if len(chosen) > 1:
        raise BadInput(f"{' and '.join(chosen)} exclude each other", hint="give one of them")
    if command and "run" not in given:
        raise BadInput(f"{command[0]!r} is not an option", hint=f"flatout watch --run {command[0]}")
    if "run" in given and not command:
        raise BadInput("--run needs a script", hint="flatout watch --run train.py ARGS…")
    for needed, options in ONLY_WITH.items():
        lonely = [flag for flag, name in options.items() if name in given]
        if lonely and MODES.get(needed, "web") not in given:
            raise BadInput(f"{lonely[0]} works only with {needed}", hint=f"add {needed}, or omit {lonely[0]}")
    if "web" in given and (one_answer or "list_all" in given):
        raise BadInput(
            "--web serves a page and prints no result", hint="omit --web, or omit --once, --json and --list"
        )
    if one_answer and "run" in given:
        raise BadInput(
            "--run leaves stdout to the script", hint="use --jsonl FILE to keep the samples, or omit --run"
        )


def _answer_once(samples: Sequence[Sample], *, json_output: bool) -> None:
    if json_output:
        print_json(samples[-1].to_json())
        return
    from flatout.monitor.terminal.screen import Screen

    plain_console().print(Screen(samples=samples, is_still=True))


def _list(root: Path | None, *, json_output: bool) -> None:
    from flatout import api

    found = api.list_runs(root)
    if json_output:
        print_json({"format": "flatout-runs", "version": 1, "runs": [each.to_json() for each in found]})
        return
    if not found:
        from flatout.ground.runs import runs_folder

        typer.echo(f"there are no runs in {root or runs_folder()}")
        return
    import datetime

    from flatout.ground.runs import show_state
    from flatout.ground.units import show, show_time
    from flatout.page.printable import printable

    rows = []
    for each in found:
        started = datetime.datetime.fromtimestamp(each.run.started_s)
        row = {
            "run": each.folder.name,
            "verb": each.run.kind,
            "state": show_state(each.run).partition(":")[0],
            "lasted": show_time(each.duration_s),
            "started": f"{started:%Y-%m-%d %H:%M}",
            "steps": show(each.steps),
            "last": "" if each.figure is None else f"{each.figure[0]} {each.figure[1]:.4g}",
            "command": _show_command(each.run.command),
        }
        rows.append({name: printable(text) for name, text in row.items()})
    for line in list_lines(rows, width=plain_console().width):
        typer.echo(line)


def list_lines(rows: Sequence[dict[str, str]], *, width: int) -> list[str]:
    """Write a table without wrapped lines: drop columns first, then shorten long names in the middle."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    names = list(widths)
    widths["command"] = SHORTEST_COMMAND
    for name in ("last", "steps", "started", "command", "verb", "lasted"):
        if sum(widths[each] + 2 for each in names) - 2 <= width:
            break
        names.remove(name)
    over = sum(widths[each] + 2 for each in names) - 2 - width
    widths["run"] = max(widths["run"] - max(over, 0), SHORTEST_NAME)
    if "command" in names:
        widths["command"] -= over
    shown = [dict(zip(names, names, strict=True)), *rows]
    cells = ([_cut(row[name], widths[name], middle=name == "run") for name in names] for row in shown)
    pad = [widths[name] for name in names]
    return [
        "  ".join(f"{cell:<{size}}" for cell, size in zip(row, pad, strict=True)).rstrip() for row in cells
    ]


def _cut(text: str, width: int, *, middle: bool) -> str:
    """Shorten a text at its end or, with `middle`, in its middle: both ends of a run's name identify it."""
    if len(text) <= width:
        return text
    end = width // 3 if middle else 0
    return f"{text[: width - end - 1]}…{text[len(text) - end :]}"


def _show_command(command: Sequence[str]) -> str:
    """Drop the folder of the interpreter, which is long and says little."""
    return " ".join([Path(command[0]).name, *command[1:]] if command else [])


def _say_page(address: str) -> None:
    say(f"the page is at {address} (Ctrl-C ends it)")
