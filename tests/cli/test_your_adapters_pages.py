"""The pages on a classifier, a PEFT adapter and a task of one's own, executed from top to bottom."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import random
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from flatout.cli.app import application
from flatout.testing.adapter_tasks import AdapterTaskContract
from tests.support.adapters import save_tiny

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
ONE_SCREEN = 60  # lines, as of the pages on a task and a judge
WITH_A_TEST = 80  # a task, its settings, its commands and its test
WORDS = {  # of the small tokenizer, so that a small encoder can tell them apart
    "account": ("of", "in"),
    "billing": ("film", "story"),
    "delivery": ("lives", "keeps"),
    "praise": ("man", "sieht"),
    "returns": ("def", "return"),
}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with rows of five classes and an encoder that is small: what the pages have before them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    save_tiny(tmp_path / "minilm")
    draw = random.Random(0)
    with (tmp_path / "tickets.jsonl").open("w") as file:
        for number in range(400):
            label = draw.choice(list(WORDS))
            text = f"{draw.choice(WORDS[label])} {draw.choice(WORDS[label])} order {number}"
            print(json.dumps({"text": text, "label": label}), file=file)
    kept = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - kept:
        if name == "tags":
            del sys.modules[name]


def flatout(line: str) -> str:
    done = CliRunner().invoke(application(), shlex.split(line)[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}"
    return done.stdout


def execute(name: str) -> tuple[dict[str, str], dict[str, Any], str]:
    """Run a page: (what each command said, the names its Python left, what its Python printed)."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (WITH_A_TEST if name == "your_adapter_task" else ONE_SCREEN)
    said: dict[str, str] = {}
    names: dict[str, Any] = {"__name__": "page"}
    printed = io.StringIO()
    blocks = BLOCK.findall(text)
    assert blocks
    for language, title, code in blocks:
        if title:
            Path(title).parent.mkdir(exist_ok=True)
            Path(title).write_text(code)
        elif language == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile(code, name, "exec"), names)
        elif language == "text":
            for line in code.splitlines():
                if not line.startswith("flatout fetch"):  # the desk has a model
                    said[line] = flatout(line)
    return said, names, printed.getvalue()


def test_a_classifier_of_ones_own_is_trained_and_answers_the_same_without_flatout(desk: Path) -> None:
    said, names, printed = execute("your_classifier")
    (desk / "made").mkdir()
    with contextlib.chdir(desk / "made"):
        runpy.run_path(str(desk / "make_tickets.py"))
    made, given = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (desk / "made" / "tickets.jsonl", desk / "tickets.jsonl")
    )
    assert {row["label"] for row in made} == set(WORDS) and len({row["text"] for row in made}) == len(given)
    assert made[0].keys() == given[0].keys()
    scored = json.loads((desk / "runs" / "tickets" / "evaluation.json").read_text())
    assert set(scored["classes"]["tickets"]) == set(WORDS)
    assert scored["scores"][0]["by_task"]["tickets"]["accuracy"] > 80  # chance is 20
    texts = names["texts"]
    ours = [
        json.loads(flatout(f"flatout adapt predict runs/tickets {shlex.quote(text)} --json"))
        for text in texts
    ]
    assert printed.strip() == str([each["answers"][0]["text"] for each in ours])
    assert texts[0] in next(line for line in said if "predict" in line)


def test_a_peft_adapter_goes_in_and_comes_out(desk: Path) -> None:
    _, names, _ = execute("your_peft_adapter")
    config = json.loads((desk / "exported" / "tickets" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16)
    assert {name.rpartition(".")[2] for name in config["target_modules"]} == {"query", "value"}
    assert names["model"].peft_config["default"].r == 8
    # A step that moves nothing: what went in comes out, bit for bit.
    still = "--set phase1.steps=1 --set phase1.lr=1.0e-60 --set phase1.weight_decay=0"
    flatout(f"flatout adapt train tickets.yaml --phase 1 --out runs/still {still}")
    flatout("flatout adapt export runs/still --to still")
    given, found = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (desk / "my-adapter", desk / "still/tickets")
    )
    assert given.keys() == found.keys() and all(given[name].equal(found[name]) for name in given)


def test_a_task_of_ones_own_is_thirty_lines_learns_and_keeps_the_contract(desk: Path) -> None:
    said, _, _ = execute("your_adapter_task")
    code = (desk / "tasks" / "tags.py").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 33
    assert "urgent" in said['flatout adapt predict runs/tags "urgent number 7"']
    spec = importlib.util.spec_from_file_location("page_test_tags", desk / "test_tags.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
    held: AdapterTaskContract = module.TestTags()
    tests = [name for name in dir(held) if name.startswith("test_")]
    assert len(tests) >= 8
    for name in tests:
        getattr(held, name)()
