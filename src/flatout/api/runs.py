"""Watch jobs, and list, report and compare the runs of every verb."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flatout.ground import OnProgress, ignore
from flatout.ground.errors import BadInput, import_extra

if TYPE_CHECKING:
    from flatout.monitor.past.compare import Comparison
    from flatout.monitor.past.engine_runs import EngineComparison, RunDigest
    from flatout.monitor.past.summary import Summary
    from flatout.monitor.sample import Sample
    from flatout.monitor.sinks.choice import SinkChoice


def watch_script(
    command: Sequence[str],
    *,
    module: bool = False,
    folder: Path | None = None,
    page: Mapping[str, Any] | None = None,
    **options: Any,
) -> NoReturn:
    """Replace this process by `command`, an unmodified script under watch; it keeps signals and exit code.

    `options` name the run, the rate of samples (`hz`) and further places to write them (`sinks`).  With
    `page` (host, port, token), a separate process serves a page of the run.
    """
    from flatout.ground.script.command import check_command
    from flatout.monitor.job.run_script import launch

    check_command(command, module=module)
    if page is not None:
        from flatout.monitor.web.page_process import start_page

        for needed in ("starlette", "uvicorn"):  # nothing starts if the extra is missing
            import_extra(needed, extra="web")
        start_page(root=folder, **_address(**page))
    launch(command, module=module, folder=folder, **options)


def sink_choice(
    *, jsonl: Path | None, csv: Path | None, tensorboard: Path | None, prometheus: int | None
) -> SinkChoice:
    """Choose where samples go, screen aside; paths become absolute: a script may change its folder."""
    from flatout.monitor.sinks.choice import SinkChoice

    files = {"jsonl": jsonl, "csv": csv, "tensorboard": tensorboard}
    absolute = {name: None if path is None else str(path.absolute()) for name, path in files.items()}
    return SinkChoice(**absolute, prometheus=prometheus)


def watch_live(
    *,
    on_screen: bool,
    as_json: bool = False,
    on_progress: OnProgress = ignore,
    **options: Any,
) -> int:
    """Show the machine and its job until the viewer or the job ends it; return the exit code."""
    from flatout.monitor.open_sampler import open_sampler
    from flatout.monitor.terminal.follow import follow_live

    with open_sampler(**options, on_progress=on_progress) as sampler:
        return follow_live(sampler, on_screen=on_screen, write=_writer(as_json))


def watch_once(*, on_progress: OnProgress = ignore, **options: Any) -> Sequence[Sample]:
    """Take the samples of one period: rates need two readings."""
    import time

    from flatout.monitor.open_sampler import open_sampler

    with open_sampler(**options, on_progress=on_progress) as sampler:
        sampler.take()
        time.sleep(sampler.period_s)
        sampler.take()
        return sampler.recent()


def watch_on_page(
    *,
    page: Mapping[str, Any],
    on_ready: OnProgress,
    on_progress: OnProgress = ignore,
    **options: Any,
) -> None:
    """Serve a page of the machine and its job until KeyboardInterrupt; `page` has host, port and token."""
    from flatout.monitor.open_sampler import open_sampler
    from flatout.monitor.web.server import serve

    with open_sampler(**options, on_progress=on_progress) as sampler, sampler:
        serve(sampler=sampler, root=options["log"], on_ready=on_ready, **_address(**page))


def watch_fleet(
    sources: Sequence[str],
    *,
    page: Mapping[str, Any] | None = None,
    on_ready: OnProgress = ignore,
    on_screen: bool = False,
    as_json: bool = False,
    once: bool = False,
) -> int:
    """Show all nodes of some run folders and pages, in the terminal or, with `page`, in a browser."""
    from flatout.monitor.fleet.nodes import Fleet

    fleet = Fleet(sources)
    if page is not None:
        from flatout.monitor.web.server import serve

        serve(fleet=fleet, on_ready=on_ready, **_address(**page))
        return 0
    from flatout.monitor.fleet.table import follow

    return follow(fleet, on_screen=on_screen, as_json=as_json, once=once, stream=sys.stdout)


def replay_run(run: str, *, root: Path | None, speed: float, on_screen: bool, as_json: bool = False) -> int:
    """Replay a run in the terminal; return the exit code."""
    from flatout.ground.runs import find_run
    from flatout.monitor.past.history import replay
    from flatout.monitor.past.playback import Playback
    from flatout.monitor.terminal.follow import follow_replay

    source = Playback(replay(find_run(run, root)), speed=speed)
    return follow_replay(source, on_screen=on_screen, title="replay", write=_writer(as_json))


def serve_run(run: str, *, root: Path | None, page: Mapping[str, Any], on_ready: OnProgress) -> None:
    """Serve a page of a recorded run until KeyboardInterrupt; `page` has host, port and token."""
    from flatout.ground.runs import find_run
    from flatout.monitor.web.server import serve

    serve(folders=[find_run(run, root)], root=root, on_ready=on_ready, **_address(**page))


def _address(host: str | None = None, port: int | None = None, token: bool = False) -> dict[str, Any]:
    return {"host": host or "127.0.0.1", "port": port or 0, "token": token}


def _writer(as_json: bool) -> Any:
    from flatout.monitor.terminal.follow import Lines, documents

    return documents(sys.stdout) if as_json else Lines(sys.stdout)


def list_runs(root: Path | None = None) -> Sequence[RunDigest]:
    """List the runs of every verb, the latest first, with what each reported last."""
    from flatout.monitor.past.engine_runs import digest_runs

    return digest_runs(root)


def report_run(
    run: str | Path, *, root: Path | None = None, html: Path | None = None, png: Path | None = None
) -> Summary | RunDigest:
    """Summarise a recorded run; also write its page and its plots to the given files."""
    from flatout.ground.runs import find_run, read_run

    folder = find_run(str(run), root)
    kind = read_run(folder).kind
    if kind != "watch":
        from flatout.monitor.past.engine_runs import digest_run

        if html or png:
            _report_engine(folder, kind, html=html, png=png)
        return digest_run(folder)
    from flatout.monitor.past.outline import read_outline
    from flatout.monitor.past.summary import summarise

    recorded = read_outline(folder)
    if png is not None:
        from flatout.monitor.past.charts import plot_run

        plot_run(recorded, png)
    if html is not None:
        from flatout.monitor.past.report import page
        from flatout.page.document import write_page

        write_page(page(recorded), html)
    return summarise(recorded)


def _report_engine(folder: Path, kind: str, *, html: Path | None, png: Path | None) -> None:
    if kind == "steer":
        from flatout.engines.steering.verbs import steer_report

        steer_report(folder, html=html, png=png)
    elif kind == "evolve":
        from flatout.engines.evolution.report import plot_run, write_report
        from flatout.engines.evolution.training.records import read_log

        if html is not None:
            write_report(folder, html)
        if png is not None:
            plot_run(read_log(folder), png, title=folder.name)
    else:
        instead = "flatout adapt evaluate writes its page" if kind == "adapt" else "omit --html and --png"
        raise BadInput(f"{folder.name} ran {kind}, which has no page or plots here", hint=instead)


def compare_runs(
    first: str | Path, second: str | Path, *, root: Path | None = None
) -> Comparison | EngineComparison:
    """Compare two runs of one verb; for watched runs, list the differences that exceed the noise."""
    from flatout.ground.runs import find_run, read_run

    folders = [find_run(str(run), root) for run in (first, second)]
    if any(read_run(folder).kind != "watch" for folder in folders):
        from flatout.monitor.past.engine_runs import compare_engines

        return compare_engines(*folders)
    from flatout.monitor.past.compare import compare
    from flatout.monitor.past.outline import read_outline

    return compare(*(read_outline(folder) for folder in folders))
