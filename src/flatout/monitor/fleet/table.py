"""One line per node: in a view that fills the terminal, as text for pipes, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flatout.ground.codec import encode
from flatout.ground.units import show, show_share, show_time
from flatout.monitor.fleet.nodes import Fleet, NodeState
from flatout.monitor.sample import lean, show_loss
from flatout.monitor.terminal.follow import obey
from flatout.monitor.terminal.keyboard import Keyboard, standard_input
from flatout.page.printable import printable

EVERY_S = 1.0
HEADS = ("node", "run", "state", "steps", "steps/s", "loss", "GPUs", "util", "memory", "CPU", "bound by")
STYLES = {"silent": "bold yellow", "died": "bold red"}


def cells(state: NodeState) -> list[str]:
    """The words of one line."""
    shown = state.state
    if state.state == "silent" and state.silent_s is not None:
        shown = f"silent {show_time(state.silent_s)}"
    return [
        printable(state.node),
        printable(state.run),
        shown,
        show(state.steps),
        show(state.steps_per_s, "{:.3g}"),
        show_loss(state.loss),
        str(state.num_gpus),
        show_share(state.gpu_share),
        show_share(state.gpu_memory_share),
        show_share(state.cpu_share),
        show(state.bound),
    ]


def table(states: Sequence[NodeState]) -> RenderableType:
    """All nodes; the first line counts them."""
    if not states:
        return Text("no node has written or served anything yet")
    made = Table(*HEADS, box=None, pad_edge=False, title=summary(states), title_justify="left")
    for state in states:
        made.add_row(*map(Text, cells(state)), style=STYLES.get(state.state))
    return made


def summary(states: Sequence[NodeState]) -> Text:
    """2 nodes: 1 running, 1 silent; 12.3 steps/s together"""
    kinds = dict.fromkeys(state.state for state in states)
    counts = ", ".join(f"{sum(state.state == kind for state in states)} {kind}" for kind in kinds)
    return Text(f"{len(states)} node{'' if len(states) == 1 else 's'}: {counts}")


def document(states: Sequence[NodeState]) -> dict[str, Any]:
    nodes = [{**encode(state), "loss": _number(state.loss)} for state in states]
    return {"format": "flatout-nodes", "version": 1, "nodes": lean(nodes)}


def _number(loss: float | None) -> float | str | None:
    """JSON has no name for what is no number."""
    return loss if loss is None or loss - loss == 0 else str(loss)


def follow(fleet: Fleet, *, on_screen: bool, as_json: bool, once: bool, stream: TextIO) -> int:
    """Show all nodes until the viewer quits, or once; return the exit code."""
    console = Console() if on_screen else Console(file=stream, width=200, color_system=None)
    with Keyboard(standard_input() if on_screen and not once else None) as keyboard:
        live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
        if on_screen and not once:
            with live:
                return _show(fleet, keyboard, live)
        while True:
            states = fleet.look()
            if as_json:
                stream.write(json.dumps(document(states)) + "\n")
                stream.flush()
            else:
                console.print(table(states))
            if once:
                return 0
            keyboard.wait(EVERY_S)
            ended = obey(keyboard, lambda: None)
            if ended is not None:
                return ended


def _show(fleet: Fleet, keyboard: Keyboard, live: Live) -> int:
    while True:
        live.update(table(fleet.look()), refresh=True)
        if "q" in keyboard.wait(EVERY_S):
            return 0
        ended = obey(keyboard, lambda: None)
        if ended is not None:
            return ended
