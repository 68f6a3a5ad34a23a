from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

from flatout.monitor.fleet.nodes import Fleet, NodeState
from flatout.monitor.fleet.table import cells, document, follow, summary
from tests.support.monitor_web import HOSTILE, logged_run, sample


def test_every_node_has_a_line(tmp_path: Path) -> None:
    for number in range(3):
        logged_run(tmp_path, [sample(second) for second in range(9)], pid=number + 1, host=f"node-{number}")
    stream = io.StringIO()
    code = follow(Fleet([str(tmp_path)]), on_screen=False, as_json=False, once=True, stream=stream)
    lines = stream.getvalue().splitlines()
    assert code == 0
    assert lines[0].startswith("3 nodes: 3 running")
    assert [line.split()[0] for line in lines[2:]] == ["node-0", "node-1", "node-2"]


def test_what_a_node_calls_itself_cannot_reach_the_terminal() -> None:
    shown = cells(NodeState(node="\x1b[31m" + HOSTILE, run="\x07", state="running", silent_s=0.0))
    assert not any(ord(letter) < 32 for text in shown for letter in text)


def test_unknown_is_not_zero_and_a_silent_node_says_for_how_long() -> None:
    state = NodeState(node="a", run="train", state="silent", silent_s=75.0)
    assert cells(state)[2:6] == ["silent 1:15", "n/a", "n/a", "n/a"]
    assert str(summary([state])) == "1 node: 1 silent"


def test_a_page_that_does_not_answer_says_why() -> None:
    state = NodeState(node="a", run=None, state="silent", silent_s=None, problem="connection refused")
    assert cells(state)[:3] == ["a", "n/a", "silent: connection refused"]
    assert cells(dataclasses.replace(state, silent_s=75.0))[2] == "silent 1:15: connection refused"
    assert cells(dataclasses.replace(state, state="running"))[2] == "running"
    assert document([state])["nodes"][0]["problem"] == "connection refused"


def test_json_names_a_loss_that_is_no_number() -> None:
    states = [NodeState(node="a", run="train", state="running", silent_s=0.5, loss=math.nan)]
    made = json.loads(json.dumps(document(states), allow_nan=False))
    assert (made["format"], made["nodes"][0]["loss"]) == ("flatout-nodes", "nan")


def test_without_a_node_it_says_so(tmp_path: Path) -> None:
    stream = io.StringIO()
    follow(Fleet([str(tmp_path)]), on_screen=False, as_json=False, once=True, stream=stream)
    assert "no node" in stream.getvalue()
