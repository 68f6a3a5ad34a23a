"""`flatout tune` on a script whose loader waits, and `flatout run` with what it kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import psutil

from flatout.measure.evidence_file import save_evidence
from tests.support.warm_python import DRIVER, warm
from tests.unit.tuner.test_treatment import evidence

SCRIPT = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 160
    def __getitem__(self, index):
        time.sleep(0.008)  # a disk
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, (x.sum() > 0).long()

if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(Slow(), batch_size=4, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "model.pt")
    print("weights", sum(p.double().sum().item() for p in model.parameters()))
"""


def flatout(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm().run("python", "-c", DRIVER, warm().bin / "python", *arguments, cwd=folder)


def test_a_waiting_loader_gets_workers_and_the_script_computes_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    save_evidence(evidence(), tmp_path / "evidence.json")
    given = ("--only", "loader-workers=2", "--evidence", "evidence.json", "--json")
    done = flatout(tmp_path, "tune", *given, "train.py")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    kept = [each for each in document["tried"] if each["answer"] == "kept"]
    assert len(kept) == 1 and kept[0]["gain"]["low"] > 1.03  # more of it on a machine that is not busy
    assert kept[0]["reason"] == "batches, losses, gradients and parameters are equal bit for bit"
    assert "loader-workers 2: time" in done.stderr
    written = tomllib.loads((tmp_path / "flatout.toml").read_text())
    assert [each["name"] for each in written["treatments"]] == ["loader-workers"]
    assert not (tmp_path / "model.pt").exists()
    ran = flatout(tmp_path, "run", "train.py")
    plain = warm().run("python", "train.py", cwd=tmp_path)
    assert ran.returncode == 0 and ran.stdout == plain.stdout != ""
    assert (tmp_path / "model.pt").exists()


def test_what_cannot_be_tuned_is_said_in_one_line(tmp_path: Path) -> None:
    for arguments, words in (
        (("tune",), "no script given"),
        (("tune", "nothing.py"), "no script at nothing.py"),
        (("run", "nothing.py"), "no script at nothing.py"),
    ):
        done = flatout(tmp_path, *arguments)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_an_interrupt_leaves_no_process_and_no_folder_and_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    save_evidence(evidence(), tmp_path / "evidence.json")
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, "-m", "flatout", "tune", "--evidence", "evidence.json", "train.py"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch")},
        stderr=subprocess.PIPE,
        text=True,
    )
    journal = tmp_path / ".flatout" / "train-tuning.jsonl"
    until(lambda: journal.exists() and len(psutil.Process(process.pid).children()) == 1)
    [trial] = psutil.Process(process.pid).children()
    until(lambda: any((tmp_path / "scratch").iterdir()))
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130 and "--resume continues" in told and "Traceback" not in told
    until(lambda: not trial.is_running())
    assert [path.name for path in (tmp_path / "scratch").iterdir() if "trials" in path.name] == []
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "evidence.json", ".flatout", "scratch"}
    assert journal.read_text().startswith('{"format": "flatout-tuning-journal"')


def until(happens: Callable[[], bool]) -> None:
    for _ in range(2000):
        if happens():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen")
