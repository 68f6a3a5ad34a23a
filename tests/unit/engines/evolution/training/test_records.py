"""The log keeps every whole line through crashes and resumes, and says null for what is not known."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.engines.evolution.training.records import (
    KIND,
    EpochRecord,
    EvolutionState,
    checkpoints_of,
    read_log,
)
from flatout.engines.run.log import RunLog, log_path
from flatout.ground.errors import BadInput

RECORDS = [
    EpochRecord(epoch=0, reward_train=0.25, rewards_per_s=1000.5, failed_rows=2, elapsed_s=1.5),
    EpochRecord(
        epoch=1, reward_train=0.5, reward_heldout=0.4, statistics={"update_norm": 0.1, "cosine": None}
    ),
]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with RunLog(
        tmp_path / "run", KIND, settings={"sigma": 0.01, "model": Path("m")}, tensorboard=False
    ) as log:
        for record in RECORDS:
            log.write(record)
            # It is in the file before the next epoch begins.
            assert json.loads(log.path.read_text().splitlines()[-1])["epoch"] == record.epoch
    assert read_log(tmp_path / "run") == RECORDS
    header = json.loads(log.path.read_text().splitlines()[0])
    assert header == {
        "format": "flatout-evolution-log",
        "version": 1,
        "settings": {"sigma": 0.01, "model": "m"},
    }


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    with RunLog(tmp_path, KIND, tensorboard=False) as log:
        log.write(EpochRecord(epoch=0, reward_train=math.nan, statistics={"norm": math.inf}))
    line = log.path.read_text().splitlines()[1]
    assert "NaN" not in line and "Infinity" not in line
    assert read_log(tmp_path) == [EpochRecord(epoch=0, statistics={"norm": None})]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400))
def test_a_log_cut_anywhere_is_read_and_goes_on(tmp_path: Path, cut: int) -> None:
    folder = tmp_path / f"cut-{cut}"
    log_path(folder).unlink(missing_ok=True)
    with RunLog(folder, KIND, tensorboard=False) as log:
        log.write(RECORDS[0])
        log.write(RECORDS[1])
    content = log.path.read_bytes()
    cut = min(cut, len(content))
    log.path.write_bytes(content[:cut])
    whole = RECORDS[: max(0, content[:cut].count(b"\n") - 1)]
    assert read_log(folder) == whole
    with RunLog(folder, KIND, tensorboard=False) as log:
        log.write(RECORDS[1])
    assert read_log(folder) == [*whole[:1], RECORDS[1]]


def test_an_epoch_done_again_counts_as_done_last(tmp_path: Path) -> None:
    for reward in (0.1, 0.2):
        with RunLog(tmp_path, KIND, tensorboard=False) as log:
            log.write(EpochRecord(epoch=4, reward_train=reward))
    assert len(log.path.read_text().splitlines()) == 3
    assert read_log(tmp_path) == [EpochRecord(epoch=4, reward_train=0.2)]


def test_a_killed_run_keeps_its_lines(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from flatout.engines.evolution.training.records import KIND, EpochRecord\n"
        "from flatout.engines.run.log import RunLog\n"
        "log = RunLog(Path(sys.argv[1]), KIND, tensorboard=False)\n"
        "log.write(EpochRecord(epoch=0, reward_train=1.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert read_log(tmp_path) == [EpochRecord(epoch=0, reward_train=1.0)]


HEADER = '{"format": "flatout-evolution-log", "version": 1, "settings": {}}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "other"}\n', "not a log of an evolution run"),
        ("[]\n", "not a log of an evolution run"),
        ('{"format": "flatout-evolution-log", "version": 2}\n', "has version 2, this Flatout reads 1"),
        (HEADER + '{"epoch": 0}\n{"epo\n{"epoch": 1}\n', "jsonl:3 is damaged"),
        (HEADER + '{"epoch": "0"}\n', r"jsonl:2 is damaged: EpochRecord\.epoch is str"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, content: str, message: str) -> None:
    log_path(tmp_path).write_text(content)
    with pytest.raises(BadInput, match=message):
        read_log(tmp_path)


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        read_log(tmp_path / "nowhere")


def test_tensorboard_has_the_curves(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with RunLog(tmp_path, KIND, tensorboard=True) as log:
        for record in RECORDS:
            log.write(record)
    events = loading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("evolution/reward_train")] == [(0, 0.25), (1, 0.5)]
    assert [e.step for e in events.Scalars("evolution/reward_heldout")] == [1]
    assert {"evolution/update_norm", "evolution/failed_rows"} <= set(events.Tags()["scalars"])
    assert "evolution/cosine" not in events.Tags()["scalars"]


def test_without_tensorboard_a_log_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from flatout.engines.evolution.training.records import KIND, EpochRecord\n"
        "from flatout.engines.run.log import RunLog\n"
        "sys.modules['tensorboard'] = None\n"
        "with RunLog(Path(sys.argv[1]), KIND) as log: log.write(EpochRecord(epoch=0))\n"
        "assert 'torch' not in sys.modules\n"
        "try: RunLog(Path(sys.argv[1]), KIND, tensorboard=True)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert "MissingExtra" in done.stdout and "flatout[plots]" in done.stdout
    assert not (tmp_path / "tensorboard").exists()


def test_checkpoints_keep_their_names_and_their_state(tmp_path: Path) -> None:
    state = EvolutionState(
        epoch=3,
        config={"sigma": 0.1, "targets": ["a"], "rows": None},
        fingerprint="f",
        threads=1,
        rows=8,
        chunk_members=4,
        max_tokens=64,
        untrained_score=None,
        elapsed_s=1.5,
    )
    path = checkpoints_of(tmp_path).save(3, state=state, files={"tensors": {}})
    assert path == tmp_path / "checkpoints" / "epoch-000003"
    found = checkpoints_of(tmp_path).latest()
    assert found is not None and found.state == state
