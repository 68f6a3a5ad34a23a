"""What travels between processes, counted: per epoch of evolution, step of adapters, trial of a search.

    python benchmarks/scale/traffic.py [--save]

Tiny models run with the real engines.  What an engine sends is counted where it sends it (`sent_bytes` of
`engines/run/ranks.py`), and held against the formula that `docs/scale_figures.py` extrapolates with; the run
fails where they differ.  Bytes do not depend on the speed of the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "docs")]
from interleaved import report  # noqa: E402
from scale_figures import gradient_bytes, reward_bytes  # noqa: E402

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
POPULATION, PROMPTS, EPOCHS, STEPS, TRIALS = 16, 2, 2, 4, 12


def run(*command: str | Path, ranks: int = 1) -> str:
    """Run flatout, in several processes; return what it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    given = [*(launcher if ranks > 1 else []), "-m", "flatout", *map(str, command)]
    return subprocess.run(
        [sys.executable, *given], env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def example(script: str, *arguments: str | Path) -> None:
    made = [sys.executable, str(ROOT / "examples" / script), *map(str, arguments)]
    subprocess.run(made, env=ENVIRONMENT, check=True, capture_output=True)


def evolution(folder: Path, *, ranks: int) -> dict[str, Any]:
    """Bytes that the first rank sends per epoch."""
    example("evolution/tiny_model.py", folder / "model")
    settings = {"task_options": {"length": 2, "token_ids": True}, "model": str(folder / "model")}
    settings |= {"task": "digit-copy", "population": POPULATION, "prompts": PROMPTS, "epochs": EPOCHS}
    settings |= {"evaluate_every": 100, "device": "cpu", "out": str(folder / f"run-{ranks}")}
    (folder / "evolve.yaml").write_text(json.dumps(settings))
    found = json.loads(run("evolve", folder / "evolve.yaml", "--json", ranks=ranks))["sent_bytes"]
    counted, expected = found["rewards"] / EPOCHS, reward_bytes(POPULATION, PROMPTS, ranks=ranks)
    assert counted == expected, (counted, expected)
    return {"ranks": ranks, "population": POPULATION, "prompts": PROMPTS, "bytes_per_epoch": counted}


def adapters(folder: Path, *, ranks: int) -> dict[str, Any]:
    """Bytes that the first rank sends per step of phase 1."""
    example("adapters/tiny_encoder.py", folder / "encoder")
    changes = ["phase1.steps=4", "log_every=2", "phase1.evaluate_every=4", f"phase1.accumulate={ranks}"]
    given = [word for change in changes for word in ("--set", change)]
    out = folder / "adapters"
    options = ["--phase", "1", "--model", folder / "encoder", "--out", out, "--device", "cpu", *given]
    run("adapt", "train", ROOT / "examples" / "adapters" / "generated.yaml", *options, ranks=ranks)
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    sent = sum(row.get("sent_bytes") or 0 for row in rows)
    trained = trained_parameters(out)
    counted, expected = sent / STEPS, gradient_bytes(trained, ranks=ranks)
    assert abs(counted - expected) < 0.01 * expected, (counted, expected)
    return {"ranks": ranks, "trained_parameters": trained, "bytes_per_step": counted}


def trained_parameters(out: Path) -> int:
    """Weights of adapters, heads and their decoder, by the file that holds them."""
    from safetensors import safe_open

    path = next(out.glob("phase1/*/best.safetensors"))
    with safe_open(path, framework="np") as file:
        names = [name for name in file.keys() if name.startswith(("adapters/", "decoder/", "heads/"))]  # noqa: SIM118
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


def search(folder: Path) -> dict[str, Any]:
    """Bytes that a trial adds to the study and to the rows, which is all that workers share."""
    example("steering/tiny_model.py", folder)
    out = folder / "search"
    options = ["--questions", folder / "questions.jsonl", "--out", out, "--trials", TRIALS]
    options += ["--device", "cpu", "--max-new-tokens", "2"]
    run("steer", "search", "--model", folder / "model", *map(str, options))
    study = (out / "study.journal").stat().st_size
    rows = sum(path.stat().st_size for path in (out / "rows").rglob("*") if path.is_file())
    return {"trials": TRIALS, "study_bytes_per_trial": study / TRIALS, "rows_bytes_per_trial": rows / TRIALS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "evolution": [evolution(Path(folder), ranks=ranks) for ranks in (2, 3)],
            "adapters": [adapters(Path(folder), ranks=2)],
            "search": search(Path(folder)),
        }
    for name, row in rows.items():
        print(f"{name}: {row}")
    report("traffic", rows, folder=Path(__file__).parent, save=options.save)


if __name__ == "__main__":
    main()
