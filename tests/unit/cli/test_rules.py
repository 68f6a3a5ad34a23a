from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from flatout.cli.rules import rules
from flatout.doctor.rule import SECTIONS, all_rules
from flatout.errors import BadInput


def run(*arguments: str):
    app = typer.Typer()
    app.command()(rules)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_the_table_has_every_rule():
    result = run()
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + len(all_rules())
    for rule, line in zip(all_rules(), lines[1:], strict=True):
        assert line.split()[:2] == [rule.code, rule.name]
        assert rule.summary.replace("`", "") in line


@pytest.mark.parametrize("asked", ["FO301", "fo301", "tensor-created-in-loop"])
def test_one_rule_is_explained(asked):
    result = run(asked)
    assert result.exit_code == 0
    assert "FO301 tensor-created-in-loop" in result.stdout
    assert all(head in result.stdout for head in SECTIONS)
    assert "self.kind_embedding(kinds)" in result.stdout


def test_json_holds_the_same():
    document = json.loads(run("--json").stdout)
    assert (document["format"], document["version"]) == ("flatout-rules", 1)
    assert [entry["code"] for entry in document["rules"]] == [rule.code for rule in all_rules()]
    (entry,) = json.loads(run("FO301", "--json").stdout)["rules"]
    assert tuple(entry["sections"]) == SECTIONS


def test_an_unknown_rule_is_the_users_error():
    result = run("FO999")
    assert isinstance(result.exception, BadInput)
