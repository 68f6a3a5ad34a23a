"""`flatout plan` where it cannot do its work: one clear line, exit code 2, nothing lost."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import planner as plans
from tests.support.measure import Ran, run

# The command as it is, with a straight line in the place of the memory room.
PROGRAM = """\
import sys
sys.path.insert(0, {root!r})
import flatout.planner.plan
from flatout.cli.app import main
from tests.support.planner import toy_maker
flatout.planner.plan.load_forecast = toy_maker()
main()
"""
ON_24GB = ("--model", "pkg:build", "--gpu-memory", "24GB")
APPLY = (*ON_24GB, "--apply", "--yes")


def plan(*arguments: str | Path, folder: Path, **popen: Any) -> Ran:
    root = str(Path(__file__).resolve().parents[2])
    program = PROGRAM.format(root=root)
    return run([sys.executable, "-c", program, "plan", *map(str, arguments)], folder=folder, **popen)


def only_line(ran: Ran) -> str:
    assert ran.code == 2, (ran.stdout, ran.stderr)
    assert (ran.stdout, ran.left) == ("", ())
    (line,) = ran.stderr.splitlines()
    return line.removeprefix("flatout: ")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return plans.write_curriculum(tmp_path)


def refused(conf: Path, *arguments: str) -> str:
    """What is said of a config that is left as it was."""
    before = plans.contents(conf)
    line = only_line(plan("fit", conf.name, *(arguments or APPLY), folder=conf.parent))
    assert plans.contents(conf) == before
    assert not (conf / ".flatout").exists()
    return line


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    assert only_line(plan("show", "absent.yaml", folder=tmp_path)).startswith(
        "no config at absent.yaml; give a"
    )
    assert list(tmp_path.iterdir()) == []


def test_yaml_that_does_not_parse(conf: Path) -> None:
    (conf / "config.yaml").write_text("a: [1\nb: {\n")
    assert refused(conf).startswith("config.yaml is not valid YAML: line 2: ")


def test_json_that_does_not_parse(conf: Path) -> None:
    (conf / "config.yaml").unlink()
    (conf / "config.json").write_text('{"per_device_train_batch_size": 4,}')
    assert refused(conf).startswith("config.json is not valid JSON: line 1: ")


def test_a_config_without_the_keys(conf: Path) -> None:
    (conf / "config.yaml").write_text("batchsize: 4\n")
    line = refused(conf)
    assert line.startswith("config.yaml has no batch_size (looked for ")
    assert line.endswith("nearest: batchsize; name it with --knob batch_size=KEY")


def test_a_key_that_is_not_there(conf: Path) -> None:
    line = refused(conf, *APPLY, "--knob", "batch_size=data.batch_size")
    assert line == "batch_size=data.batch_size: the config has no such key; nearest: data_loader.batch_size"


def test_a_read_only_file(conf: Path) -> None:
    (conf / "config.yaml").chmod(0o444)
    ran = plan("fit", conf.name, *APPLY, folder=conf.parent)
    assert ran.code == 2
    assert ran.stderr == (
        "flatout: conf/config.yaml is read-only; nothing was written; "
        "allow it with chmod u+w conf/config.yaml\n"
    )
    assert (conf / "config.yaml").read_bytes() == plans.CONFIG.encode()
    assert not (conf / ".flatout").exists()


def test_a_symbolic_link(conf: Path, tmp_path: Path) -> None:
    (conf / "config.yaml").rename(tmp_path / "real.yaml")
    (conf / "config.yaml").symlink_to(tmp_path / "real.yaml")
    ran = plan("fit", conf.name, *APPLY, folder=conf.parent)
    assert (ran.code, ran.stderr.count("\n")) == (2, 1)
    assert "is a symbolic link to" in ran.stderr
    assert (tmp_path / "real.yaml").read_bytes() == plans.CONFIG.encode()


def test_a_full_disk(conf: Path) -> None:
    """No file may grow past a limit that the config itself is beyond: the kernel refuses the write."""
    before = plans.contents(conf)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))

    ran = plan("fit", conf.name, *APPLY, folder=conf.parent, preexec_fn=limit)
    assert ran.code == 2, ran.stderr
    (line,) = ran.stderr.splitlines()
    assert line.startswith("flatout: could not write a file beside those to change: File too large")
    assert line.endswith("no file was changed")
    assert plans.contents(conf) == before
    assert only_line(plan("undo", conf.name, folder=conf.parent)).startswith("nothing to undo")


def test_a_second_apply_says_so_and_keeps_the_backup(conf: Path) -> None:
    before = plans.contents(conf)
    assert plan("fit", conf.name, *APPLY, folder=conf.parent).code == 0
    after = plans.contents(conf)
    second = plan("fit", conf.name, *APPLY, folder=conf.parent)
    assert second.code == 0
    assert second.said == ["flatout: nothing to change: conf/config.yaml already matches the plan"]
    assert plans.contents(conf) == after
    assert len(list((conf / ".flatout" / "backups").iterdir())) == 1
    assert plan("undo", conf.name, folder=conf.parent).code == 0
    assert plans.contents(conf) == before


def test_an_undo_over_own_changes(conf: Path) -> None:
    assert plan("fit", conf.name, *APPLY, folder=conf.parent).code == 0
    with (conf / "config.yaml").open("a") as file:
        file.write("\nmine: 1\n")
    changed = plans.contents(conf)
    line = only_line(plan("undo", conf.name, folder=conf.parent))
    assert (
        line
        == "config.yaml was changed since the plan was applied; nothing was restored; --force restores it"
    )
    assert plans.contents(conf) == changed


def test_no_gpu_an_unknown_gpu_and_a_bad_margin(conf: Path) -> None:
    assert "did you mean A100-" in refused(conf, "--model", "x", "--gpu", "A1000-80GB")
    assert refused(conf, *ON_24GB, "--margin", "85").startswith(
        "--margin 85 is not a share of the free memory"
    )


def test_a_model_that_is_not_named(conf: Path) -> None:
    assert refused(conf, "--gpu-memory", "24GB").startswith("a fit needs the model; name it with --model")


def test_a_job_that_does_not_fit(conf: Path) -> None:
    assert refused(conf, "--model", "x", "--gpu-memory", "2GB").startswith(
        "batch_size=1 needs 5.21 GiB in 01_stage"
    )
