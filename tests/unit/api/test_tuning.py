from __future__ import annotations

import math
from pathlib import Path

import pytest

from flatout.api import tune_script
from flatout.ground.errors import BadInput


def test_a_tuning_starts_its_ranks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    started: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: started.append(command))
    with pytest.raises(BadInput, match="could not be diagnosed in several processes"):
        tune_script([str(script), "--lr", "1"], ranks=2)
    (command,) = started
    assert "--nproc-per-node=2" in command and command[-3:] == [str(script), "--lr", "1"]
    assert command[command.index("flatout") + 1] == "diagnose"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="starts its ranks itself"):
        tune_script([str(script)])


@pytest.mark.parametrize(("minutes", "seconds"), [(None, "60.0"), (10.0, "60.0"), (1.0, "15.0")])
def test_the_diagnosis_gets_a_quarter_of_the_minutes_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float | None, seconds: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    started: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: started.append(command))
    with pytest.raises(BadInput, match="could not be diagnosed"):
        tune_script([str(script)], ranks=2, minutes=minutes)
    (command,) = started
    assert command[command.index("--seconds") + 1] == seconds


def test_an_unknown_treatment_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(BadInput, match="no treatment 'lodaer-workers'") as raised:
        tune_script([str(tmp_path / "train.py")], only=["lodaer-workers=2"])
    assert raised.value.hint == "did you mean loader-workers?"


@pytest.mark.parametrize("minutes", [0.0, -1.0, math.nan])
def test_no_time_is_refused_before_anything_runs(minutes: float) -> None:
    with pytest.raises(BadInput, match="leaves no time"):
        tune_script(["absent.py"], minutes=minutes)
