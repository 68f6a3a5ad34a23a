"""`flatout watch`: the machine and its job, live, in a terminal, as lines, in a browser, or played again.

What is watched is one of: the machine with its latest job, a process (--pid), a script that is started
(--run), or a run that is over (--replay).  Whatever stands after a script belongs to the script.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.errors import BadInput, import_extra

if TYPE_CHECKING:
    from flatout.monitor.open_sampler import WatchOptions
    from flatout.monitor.sample import Sample

DEFAULT_SPEED = 60.0
LOOPBACK = "127.0.0.1"
NARROW = 64


def watch(
    command: Annotated[list[str] | None, typer.Argument(metavar="ARGS", hidden=True)] = None,
    pid: Annotated[int | None, typer.Option("--pid", metavar="PID", help="Watch this process.")] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run a script under watch, with the live line below its output.")
    ] = False,
    module: Annotated[bool, typer.Option("-m", help="With --run: a module, as python -m does.")] = False,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="With --run: what to call it.")] = None,
    replay: Annotated[
        str | None, typer.Option(metavar="RUN", help="Play a run again; --list shows them.")
    ] = None,
    speed: Annotated[
        float | None, typer.Option(metavar="N", help="Of a replay; 60, the default: a minute per second.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the runs that are kept.")] = False,
    once: Annotated[bool, typer.Option("--once", help="One sample, then end.")] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="JSON instead of a picture: a document, or one a line.")
    ] = False,
    hz: Annotated[float, typer.Option(metavar="N", help="Samples a second, 0.1 to 10.")] = 1.0,
    log: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep a log here, or look for runs here; default .flatout/runs."),
    ] = None,
    jsonl: Annotated[Path | None, typer.Option(metavar="FILE", help="Append samples as JSON lines.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write samples as a table.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIR", help="Write TensorBoard events.")] = None,
    prometheus: Annotated[
        int | None, typer.Option(metavar="PORT", help="Serve /metrics on the loopback; 0: any port.")
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Serve a page with live charts on the loopback.")
    ] = False,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="With --web: another address; asks for a token.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="PORT", help="With --web; default: any free.")
    ] = None,
) -> None:
    """Show what the GPUs, the host and a job do, and what bounds the job.

    Without options: all GPUs of this machine and the latest job that runs under Flatout, full screen; in a
    pipe, a line per second. A job reports its steps when it was started with --run or iterates over
    flatout.watch(loader). Keys: q quit, s sort, tab next GPU, p processes, space hold, ? help.

    \b
    Examples:
      flatout watch
      flatout watch --run train.py --epochs 3     the script, the live line below it, and a log
      flatout watch --web --run train.py          and its page, while it runs
      flatout watch --pid 4711
      flatout watch --once --json
      flatout watch --web
      flatout watch --list
      flatout watch --replay train --speed 60

    Exit codes: 0 the viewer or the job ended it, 2 flatout could not do its work, 130 interrupted. With --run
    the script's own.
    """
    _check(
        command,
        modes={"--pid": pid is not None, "--run": run, "--replay": replay is not None, "--list": list_all},
        needs={
            "--run": {"-m": module, "--name": name is not None},
            "--replay": {"--speed": speed is not None},
            "--web": {"--host": host is not None, "--port": port is not None},
        },
        is_web=web,
        one_answer=once or json_output,
    )
    from flatout.monitor.sinks.choice import SinkChoice

    sinks = SinkChoice(
        jsonl=_path(jsonl), csv=_path(csv), tensorboard=_path(tensorboard), prometheus=prometheus
    )
    if run:
        if web:
            _page_beside(command or [], module=module, log=log, host=host, port=port)
        _run(command or [], module=module, name=name, hz=hz, log=log, sinks=sinks)
    elif list_all:
        _list(log, json_output=json_output)
    elif replay is not None:
        raise typer.Exit(
            _replay(
                replay,
                root=log,
                speed=DEFAULT_SPEED if speed is None else speed,
                web=web,
                json_output=json_output,
                host=host,
                port=port,
            )
        )
    else:
        from flatout.monitor.open_sampler import WatchOptions

        options = WatchOptions(pid=pid, hz=hz, log=log, sinks=sinks)
        if once:
            _once(options, json_output=json_output)
        elif web:
            _web(options, host=host, port=port)
        else:
            raise typer.Exit(_live(options, json_output=json_output))


def _check(
    command: Sequence[str] | None,
    *,
    modes: dict[str, bool],
    needs: dict[str, dict[str, bool]],
    is_web: bool,
    one_answer: bool,
) -> None:
    """Every combination without a meaning, before anything starts."""
    chosen = [flag for flag, given in modes.items() if given]
    if len(chosen) > 1:
        raise BadInput(f"{' and '.join(chosen)} ask for different things", hint="give one of them")
    if command and not modes["--run"]:
        raise BadInput(f"{command[0]!r} is not an option", hint=f"flatout watch --run {command[0]}")
    if modes["--run"] and not command:
        raise BadInput("--run needs a script", hint="flatout watch --run train.py ARGS…")
    given = {**modes, "--web": is_web}
    for needed, flags in needs.items():
        lonely = [flag for flag, is_given in flags.items() if is_given and not given[needed]]
        if lonely:
            raise BadInput(f"{lonely[0]} has a meaning beside {needed} only")
    if is_web and (modes["--list"] or one_answer):
        raise BadInput("--web serves a page, and does not print one answer", hint="give one of them")
    if one_answer and modes["--run"]:
        raise BadInput(
            "--run leaves stdout to the script", hint="--jsonl FILE keeps the samples; --once needs no script"
        )


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())  # a script may change its folder


def _run(
    command: list[str], *, module: bool, name: str | None, hz: float, log: Path | None, sinks: Any
) -> None:
    from flatout.api import watch_script

    if module:
        from flatout.cli.diagnose import check_module

        check_module(command[0])
    watch_script(command, module=module, name=name, hz=hz, folder=log, sinks=sinks)


def _page_beside(
    command: Sequence[str], *, module: bool, log: Path | None, host: str | None, port: int | None
) -> None:
    """Before this process becomes the script; nothing starts where the script or the extra is missing."""
    from flatout.measure.run.launch import check_command
    from flatout.monitor.web.page_process import start_page

    check_command(command, module=module)
    for needed in ("starlette", "uvicorn"):
        import_extra(needed, extra="web")
    start_page(root=log, host=host or LOOPBACK, port=port or 0)


def _live(options: WatchOptions, *, json_output: bool) -> int:
    from flatout.monitor.open_sampler import open_sampler
    from flatout.monitor.terminal.follow import Documents, Lines, follow_live

    on_screen = sys.stdout.isatty() and not json_output
    write = Documents(sys.stdout) if json_output else Lines(sys.stdout)
    with open_sampler(options, on_note=_say) as sampler:
        return follow_live(sampler, on_screen=on_screen, write=write)


def _once(options: WatchOptions, *, json_output: bool) -> None:
    """The second sample: rates need two readings, one period apart."""
    import time

    from flatout.monitor.open_sampler import open_sampler

    with open_sampler(options, on_note=_say) as sampler:
        sampler.take()
        time.sleep(sampler.period_s)
        sample = sampler.take()
        if json_output:
            import json

            sys.stdout.write(json.dumps(sample.to_json(), indent=2) + "\n")
        else:
            _picture(sampler.recent())


def _picture(samples: Sequence[Sample]) -> None:
    from rich.console import Console

    from flatout.monitor.terminal.screen import Screen

    Console(highlight=False).print(Screen(samples=samples, is_still=True))


def _web(options: WatchOptions, *, host: str | None, port: int | None) -> None:
    from flatout.monitor.open_sampler import open_sampler
    from flatout.monitor.web.server import serve

    with open_sampler(options, on_note=_say) as sampler, sampler:
        serve(sampler=sampler, root=options.log, host=host or LOOPBACK, port=port or 0, on_ready=_say_page)


def _replay(
    wanted: str,
    *,
    root: Path | None,
    speed: float,
    web: bool,
    json_output: bool,
    host: str | None,
    port: int | None,
) -> int:
    from flatout.monitor.past.history import replay
    from flatout.monitor.past.playback import Playback
    from flatout.monitor.terminal.follow import Documents, Lines, follow_replay
    from flatout.runs import find_run

    folder = find_run(wanted, root)
    if web:
        from flatout.monitor.web.server import serve

        serve(folders=[folder], root=root, host=host or LOOPBACK, port=port or 0, on_ready=_say_page)
        return 0
    on_screen = sys.stdout.isatty() and not json_output
    write = Documents(sys.stdout) if json_output else Lines(sys.stdout)
    source = Playback(replay(folder), speed=speed)
    return follow_replay(source, on_screen=on_screen, title="replay", write=write)


def _list(root: Path | None, *, json_output: bool) -> None:
    from flatout.codec import encode
    from flatout.runs import list_runs, runs_folder, state_of

    found = list_runs(root)
    if json_output:
        import json

        runs = [{"folder": str(path), "state": state_of(run), **encode(run)} for path, run in found]
        document = {"format": "flatout-runs", "version": 1, "runs": runs}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    if not found:
        typer.echo(f"no runs in {root or runs_folder()}")
        return
    import datetime
    import time

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from flatout.page.printable import printable
    from flatout.page.scales import show_time

    table = Table(
        box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=True
    )
    table.add_column("run", overflow="fold")  # whole, because other verbs are given it
    console = Console(highlight=False)
    is_narrow = console.width < NARROW  # a run begins with its date, and ends with its script
    for head in ("state", "lasted") if is_narrow else ("state", "lasted", "started"):
        table.add_column(head, no_wrap=True)
    if not is_narrow:
        table.add_column("command", overflow="ellipsis", ratio=1)  # has what is left
    for path, run in found:
        state = state_of(run)
        ended_s = run.ended_s or (time.time() if state == "running" else None)
        started = datetime.datetime.fromtimestamp(run.started_s)
        cells = [
            Text(printable(path.name)),
            Text(state),
            Text("n/a" if ended_s is None else show_time(ended_s - run.started_s)),
            Text(f"{started:%Y-%m-%d %H:%M}"),
            Text(printable(_shown(run.command)), no_wrap=True, overflow="ellipsis"),
        ]
        table.add_row(*cells[: len(table.columns)])
    console.print(table)


def _shown(command: Sequence[str]) -> str:
    """Without the folder of the interpreter, which is long and says little."""
    return " ".join([Path(command[0]).name, *command[1:]] if command else [])


def _say_page(address: str) -> None:
    _say(f"the page is at {address} (Ctrl-C ends it)")


def _say(message: str) -> None:
    typer.echo(f"flatout: {message}", err=True)
