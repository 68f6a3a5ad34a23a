"""One line per node: in a view that fills the terminal, as text for pipes, or as JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flatout.ground.codec import encode, name_nonfinite
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
    """Return the words of one line."""
    shown = state.state
    if state.state == "silent" and state.silent_s is not None:
        shown = f"silent {show_time(state.silent_s)}"
    if state.state == "silent" and state.problem is not None:
        shown += f": {printable(state.problem)}"
    return [
        printable(state.node),
        show(None if state.run is None else printable(state.run)),
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
    """Show all nodes; the first line counts them."""
    if not states:
        return Text("no node has written or served anything yet")
    made = Table(*HEADS, box=None, pad_edge=False, title=summary(states), title_justify="left")
    for state in states:
        made.add_row(*map(Text, cells(state)), style=STYLES.get(state.state))
    return made


def summary(states: Sequence[NodeState]) -> Text:
    """Count the nodes by state: "2 nodes: 1 running, 1 silent"."""
    kinds = dict.fromkeys(state.state for state in states)
    counts = ", ".join(f"{sum(state.state == kind for state in states)} {kind}" for kind in kinds)
    return Text(f"{len(states)} node{'' if len(states) == 1 else 's'}: {counts}")


def document(states: Sequence[NodeState]) -> dict[str, Any]:
    nodes = [lean(name_nonfinite(encode(state))) for state in states]
    return {"format": "flatout-nodes", "version": 1, "nodes": nodes}


def follow(fleet: Fleet, *, on_screen: bool, as_json: bool, once: bool, stream: TextIO) -> int:
    """Show all nodes until the viewer quits, or once; return the exit code."""
    console = Console() if on_screen else Console(file=stream, width=200, color_system=None)
    fills_screen = on_screen and not once
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with (
        Keyboard(standard_input() if fills_screen else None) as keyboard,
        live if fills_screen else contextlib.nullcontext(),
    ):
        while True:
            states = fleet.look()
            if fills_screen:
                live.update(table(states), refresh=True)
            elif as_json:
                stream.write(json.dumps(document(states)) + "\n")
                stream.flush()
            else:
                console.print(table(states))
            if once or "q" in keyboard.wait(EVERY_S):
                return 0
            ended = obey(keyboard, lambda: None)
            if ended is not None:
                return ended
