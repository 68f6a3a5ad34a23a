"""Jobs far larger than usual: does a diagnosis end in its time, and is its evidence small?

    python benchmarks/diagnosis/large.py [--only NAME] [--seconds 30] [--save]

`modules` trains a model of 1,000 modules, `lines` one of 1,000 layers that are called at 1,000 lines;
`operators` takes steps of 50,000 operators, forward and backward.
What a diagnosis does before and after its time, above all importing torch and judging what it found, is in
the command's own seconds and not in `--seconds`; so what importing torch alone takes stands beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flatout.measure.evidence_file import load_evidence

HERE = Path(__file__).resolve().parent
MOST_BYTES = 5_000_000


# 250 blocks of four modules; 1,000 layers, each at a line of its own that makes a tensor as well.
BLOCKS = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear, self.relu = nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()

    def forward(self, x):
        return x + self.relu(self.linear(self.norm(x)))


model = nn.Sequential(*(Block(32) for _ in range(250)))
"""
LAYERS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(1000))

    def forward(self, x):
{lines}
        return x


model = Model()
""".format(
    lines="\n".join(f"        x = x + torch.tensor({n / 1e6}) * self.layers[{n}](x)" for n in range(1000))
)
# A recurrence written out: 12,500 passes of two operators, and as many in the backward pass.
RECURRENCE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.full((32,), 0.999)), nn.Parameter(torch.zeros(32))

    def forward(self, x):
        for _ in range(12_500):
            x = x * self.scale + self.shift
        return x


model = Model()
"""
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    x = torch.randn(16, 32)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
JOBS = {"modules": BLOCKS, "lines": LAYERS, "operators": RECURRENCE}


def diagnose(name: str, *, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "evidence.json"
        (Path(folder) / "train.py").write_text(f"import torch\nfrom torch import nn\n{JOBS[name]}{TRAIN}")
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imported_s, began_s = time.monotonic() - began_s, time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "flatout",
                "diagnose",
                "--seconds",
                str(seconds),
                "--save",
                path,
                "train.py",
            ],
            cwd=folder,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        took_s = time.monotonic() - began_s
        if done.returncode not in (0, 1) or not path.exists():
            return {"failed": done.stderr.strip()[-500:]}
        num_bytes, evidence = path.stat().st_size, load_evidence(path)
    row: dict[str, Any] = {"took_s": took_s, "beyond_s": took_s - seconds, "import_torch_s": imported_s}
    row |= {"evidence_bytes": num_bytes, "is_small": num_bytes < MOST_BYTES}
    row |= {"arms": len(evidence.counterfactuals), "not_measured": evidence.not_measured}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=JOBS)
    parser.add_argument("--seconds", type=float, default=30.0, help="for one diagnosis (default: 30)")
    parser.add_argument("--save", action="store_true", help="write results/large_HARDWARE_DATE.json")
    options = parser.parse_args()
    hardware = f"cpu-{os.cpu_count()}-cores"
    stamp: dict[str, Any] = {
        "load": os.getloadavg()[0],
        "hardware": hardware,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    names = [name for name in JOBS if options.only in (None, name)]
    jobs = {name: diagnose(name, seconds=options.seconds) for name in names}
    result = {"benchmark": "large", **stamp, "seconds": options.seconds, "jobs": jobs}
    print(json.dumps(result))
    for name, row in jobs.items():
        if "failed" in row:
            print(f"{name:12}failed: {row['failed']}")
            continue
        beyond = f"{row['beyond_s']:6.1f} s beyond {options.seconds:g} s"
        beyond += f" (import torch: {row['import_torch_s']:.1f} s)"
        print(f"{name:12}{beyond}{row['evidence_bytes'] / 1e6:8.2f} MB{row['arms']:4} arms")
    if options.save:
        path = HERE / "results" / f"large_{hardware}_{datetime.date.today().isoformat()}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
