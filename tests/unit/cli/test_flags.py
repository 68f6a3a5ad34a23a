"""Flags: their list is frozen, and a shared name has one meaning in every verb."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from flatout.cli import flags
from flatout.cli.app import all_verbs, application
from flatout.ground.errors import BadInput

# Whoever changes this table changes what users type: the CHANGELOG and docs say so too.
FLAGS = {
    "diagnose": "-m --evidence --save --html --json --keep-running --seconds",
    "tune": "-m --to --evidence --allow-lossy --only --patch --apply --undo --resume --ranks --ray --minutes"
    " --html --json",
    "run": "-m --with",
    "check": "-m --base --against --tolerance --pairs --json",
    "rules": "--json",
    "devices": "--datasheet --all --json",
    "fetch": "--source --json",
    "evolve": "--model --task --task-option --population --rank --sigma --lr --optimizer --epochs --prompts"
    " --rows --max-new-tokens --seed --device --out --resume --verify --set --json",
    "report": "--html --png --log --json",
    "compare": "--log --json",
    "watch": "--pid --run -m --name --replay --speed --from --list --once --json --hz --log --jsonl --csv"
    " --tensorboard --prometheus --web --host --port --token",
    "plan show": "--model --task --make-batch --gpu --gpu-memory --margin --ranks --mapping --knob --set"
    " --lengths --expandable-segments --no-expandable-segments --native --no-cache --json",
    "plan fit": "--model --task --make-batch --gpu --gpu-memory --margin --profile --effective --allow"
    " --choose --apply --yes -y --ranks --mapping --knob --set --lengths --expandable-segments"
    " --no-expandable-segments --native --no-cache --json",
    "plan undo": "--force",
    "steer extract": "--model --layers --position --store --store-limit --tier --device --dtype --json",
    "steer fit": "--model --out --method --layers --position --whole --store --seed --device --dtype --json",
    "steer search": "--model --questions --out --vectors --method --layers --position --strength --where"
    " --mode --span --sampler --toward --score --judge --max-new-tokens --trials --rungs --rows --seed"
    " --neutral --storage --study"
    " --workers --ray --join --worker"
    " --device --dtype --resume --set --json",
    "steer apply": "--model --run --vectors --layer --strength --mode --span --where --max-new-tokens"
    " --device --dtype --json",
    "steer import": "--to --json",
    "steer export": "--to --kind --json",
    "steer report": "--html --png --json",
    "adapt train": "--phase --resume --heads-only --model --out --device --set --json",
    "adapt status": "--json",
    "adapt evaluate": "--html --model --device --rows --split --top-k --threshold --json",
    "adapt predict": "--context --task --model --device --top-k --threshold --json",
    "adapt export": "--to --task --model --json",
}
VERBS = dict(all_verbs())


def options(command: Any) -> dict[str, Any]:
    return {
        name: each
        for each in command.params
        for name in (*each.opts, *each.secondary_opts)
        if name.startswith("-")
    }


def test_the_flags_are_these() -> None:
    assert {name: " ".join(options(command)) for name, command in VERBS.items()} == FLAGS


def shared() -> dict[str, Any]:
    """--json -> the declaration of flags.py."""
    found = {}
    for value in vars(flags).values():
        declared = [each for each in get_args(value)[1:] if isinstance(each, typer.models.OptionInfo)]
        found |= {name: each for each in declared for name in (each.default, *(each.param_decls or ()))}
    return found


def test_a_shared_flag_has_one_meaning_in_every_verb() -> None:
    declared = shared()
    assert {"--json", "--out", "--resume", "--set", "--device", "--gpu", "--html", "--yes"} <= set(declared)
    uses = 0
    for verb, command in VERBS.items():
        for name, option in options(command).items():
            if name in declared:
                assert option.help == declared[name].help, (verb, name)
                uses += 1
    assert uses > 50


@pytest.mark.parametrize("verb", FLAGS)
def test_every_verb_answers_help_and_version(verb: str) -> None:
    for flag, begins in (("-h", "Usage: "), ("--help", "Usage: "), ("--version", "flatout ")):
        answer = CliRunner().invoke(application(), [*verb.split(), flag])
        assert answer.exit_code == 0, answer.output
        assert answer.stdout.startswith(begins)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("flatout st", "steer"), ("flatout steer se", "search"), ("flatout plan fit --ap", "--apply")],
)
def test_a_shell_completes_verbs_and_flags(typed: str, offered: str) -> None:
    variables = {
        "_FLATOUT_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    answer = CliRunner().invoke(application(), prog_name="flatout", env=variables)
    assert offered in answer.stdout.split()


def test_pairs_are_read_as_in_yaml() -> None:
    given = flags.pairs(["a.b=3", "c=[1, x]", "d=on the left", "e="], flag="--set")
    assert given == {"a.b": 3, "c": [1, "x"], "d": "on the left", "e": None}
    with pytest.raises(BadInput, match="is not KEY=VALUE"):
        flags.pairs(["sigma"], flag="--set")
    with pytest.raises(BadInput, match="is not valid YAML"):
        flags.pairs(["sigma=["], flag="--set")
