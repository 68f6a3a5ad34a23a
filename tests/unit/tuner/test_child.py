from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flatout.tuner.results.prescription import Kept, Prescription, save_prescription

SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader
loader = DataLoader([1, 2])
print(sys.argv, __name__, loader.num_workers, torch.optim.SGD([torch.ones(1)], lr=1.0).defaults["fused"])
sys.exit(3)
"""


def kept(name: str, value: bool | int | str) -> Kept:
    return Kept(name=name, value=value, safety="exact", ratio=1.5, low=1.4, high=1.6, checked="")


def test_a_script_runs_under_its_prescription_and_is_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    treatments = (kept("loader-workers", 1), kept("fused-optimizer", True))
    save_prescription(Prescription(command=("train.py",), treatments=treatments), tmp_path / "flatout.toml")
    command = [sys.executable, "-m", "flatout", "run", "train.py", "--lr", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "['train.py', '--lr', '1'] __main__ 1 True\n"
    assert done.returncode == 3
    assert done.stderr.startswith("flatout: loader-workers 1, fused-optimizer; no proof")
