"""Two processes against one for `flatout evolve` and `flatout adapt train`: efficiency, and where it is lost.

    python benchmarks/scale/efficiency_training.py [--verb evolve] [--rounds 3] [--save]

Two processes that lose nothing take half the time of one.  With T1 and T2 the seconds of a run by one process
and by two, efficiency is T1 / 2 T2, and what a phase p loses is (2 T2p - T1p) / 2 T2: these parts add up to
1 - efficiency.  Runs of one and of two alternate; seconds of a phase are medians over the rounds, without
what runs inside another phase.

Seconds are CPU time, of the busier of two processes, for which the other one waits: the clock on the wall
measures whoever else uses the cores.  Between machines the time of a message comes on top.  What a run does
once, whatever its length, does not count: starting Python, loading the model, drawing the plot.

On a GPU both processes share it.  Two take as long as one if sharing costs nothing: efficiency is T1 / T2 and
a phase loses (T2p - T1p) / T2, in seconds on the wall, since the GPU is nobody else's.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[0:0] = [str(HERE), str(HERE.parent)]
from interleaved import arguments, report  # noqa: E402
from nodes import ENVIRONMENT, VERBS  # noqa: E402

SETTINGS: dict[str, dict[str, Any]] = {
    "evolve": {
        "width": 128,
        "layers": 4,
        "population": 64,
        "prompts": 8,
        "rows": 64,
        "epochs": 6,
        "evaluate_every": 3,
        "evaluate_prompts": 32,
        "checkpoint_every": 3,
    },
    "adapt": {"width": 128, "layers": 4},
}
ON_GPU: dict[str, dict[str, Any]] = {
    "evolve": {
        **SETTINGS["evolve"],
        "device": "cuda",
        "mode": "graph",
        "width": 1024,
        "layers": 12,
        "population": 1024,
        "rows": 1024,
        "chunk_members": 128,
    },
    "adapt": {"device": "cuda", "graphs": False, "width": 768, "layers": 12},  # a replay has no phases
}
SHARES_GPU = torch.cuda.is_available()
ROOT = "rest"  # the whole of training, less what is timed by itself
# Why a phase loses what it loses.
REASONS = {
    "members": "shared out; chunks of equal size",
    "update": "every rank computes the whole update: weights never travel",
    "held out": "the first rank alone; the others wait for it in the next epoch",
    "plain inference": "every rank measures it, once",
    "steps": "shared out; each process packs half of the batches of a step",
    "held-out scores": "shared out by tasks: the longest decides",
    "features": "shared out",
    "router": "every process trains the whole router: it is small",
    "exchange": "sending and adding what others sent",
    "files": "checkpoints: the first process alone",
    ROOT: "batches, log, and what else is not shared out",
}


class Phases:
    """Seconds by phase; a phase inside another stops the outer one's clock, and none counts outside ROOT."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open: list[str] = []
        self._since_s = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        now_s = time.perf_counter() if SHARES_GPU else time.process_time()
        if self._open:
            self.seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(plain)
        def timed(*given: Any, **named: Any) -> Any:
            if not self._open and phase != ROOT:
                return plain(*given, **named)
            with self.phase(phase):
                return plain(*given, **named)

        setattr(owner, name, timed)


def run_rank(verb: str, config: Path, result: Path) -> None:
    """Run one rank of a job with its phases timed; the first writes them."""
    from flatout.engines.run.checkpoints import Checkpoints
    from flatout.engines.run.log import RunLog
    from flatout.engines.run.meeting import Meeting
    from flatout.engines.run.ranks import Ranks

    phases = Phases()
    phases.wrap(Checkpoints, "save", "files")
    phases.wrap(RunLog, "flush", "files")
    for name in ("gather", "sum_in_order", "share_weights"):
        phases.wrap(Ranks, name, "exchange")
    phases.wrap(Meeting, "gather", "exchange")
    given = json.loads(config.read_text())
    if verb == "evolve":
        _run_evolution(given, phases)
    else:
        _run_adapters(given, phases)
    result.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(phases.seconds))


def _run_evolution(given: dict[str, Any], phases: Phases) -> None:
    from flatout.engines.evolution.eggroll import Eggroll
    from flatout.engines.evolution.training import trainer
    from flatout.engines.evolution.training.answers import Answers

    phases.wrap(Answers, "of_members", "members")
    phases.wrap(Answers, "held_out", "held out")
    phases.wrap(Answers, "plain_tokens_per_s", "plain inference")
    phases.wrap(Eggroll, "tell", "update")
    phases.wrap(trainer.Trainer, "_train", ROOT)
    trainer.evolve(given)


def _run_adapters(given: dict[str, Any], phases: Phases) -> None:
    from flatout.engines.adapters import verbs
    from flatout.engines.adapters.lora.fused_step import FusedStep
    from flatout.engines.adapters.routing import features
    from flatout.engines.adapters.training.phase3_joint import JointStep
    from flatout.engines.adapters.training.validation import Validation

    phases.wrap(FusedStep, "__call__", "steps")
    phases.wrap(JointStep, "__call__", "steps")
    phases.wrap(Validation, "judge", "held-out scores")
    phases.wrap(features, "_compute", "features")
    verbs.TRAIN["phase2"] = _within(phases, "router", verbs.TRAIN["phase2"])
    phases.wrap(verbs, "_train_phases", ROOT)
    verbs.adapt(given)


def _within(phases: Phases, name: str, work: Callable[..., None]) -> Callable[..., None]:
    def timed(*given: Any) -> None:
        with phases.phase(name):
            work(*given)

    return timed


def timed_run(verb: str, settings: dict[str, Any], folder: Path, *, processes: int) -> dict[str, float]:
    config, result = folder / "run.json", folder / "seconds"
    folder.mkdir()
    config.write_text(json.dumps({**settings, "out": str(folder / "run")}))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    script = [str(Path(__file__).resolve()), "--rank", verb, str(config), str(result)]
    done = subprocess.run(
        [sys.executable, *launcher, *script], env=ENVIRONMENT, check=False, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{verb} failed:\n{done.stderr[-4000:]}")
    ranks = [json.loads(result.with_suffix(f".{rank}").read_text()) for rank in range(processes)]
    return max(ranks, key=lambda seconds: sum(seconds.values()))


def compare(runs: dict[int, list[dict[str, float]]]) -> dict[str, Any]:
    """Efficiency and what each phase loses of it."""
    names = sorted({name for each in (*runs[1], *runs[2]) for name in each})
    one, two = (
        {name: median(each.get(name, 0.0) for each in runs[processes]) for name in names}
        for processes in (1, 2)
    )
    used = 1 if SHARES_GPU else 2  # of what is paid for: one GPU, or the cores of two processes
    whole = used * sum(two.values())
    rows = [
        {
            "phase": name,
            "one_s": round(one[name], 3),
            "two_s": round(two[name], 3),
            "lost": round((used * two[name] - one[name]) / whole, 4),
            "reason": REASONS[name],
        }
        for name in names
    ]
    rows.sort(key=lambda row: -float(str(row["lost"])))
    return {"efficiency": round(sum(one.values()) / whole, 4), "phases": rows}


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = arguments(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--verb", choices=[*VERBS], action="append")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for verb in given.verb or VERBS:
            folder = Path(name) / verb
            folder.mkdir()
            settings = VERBS[verb][1](folder, **(ON_GPU if SHARES_GPU else SETTINGS)[verb])
            if SHARES_GPU:  # kernels are compiled once, and found in a cache from then on
                timed_run(verb, settings, folder / "first", processes=1)
            runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
            for number in range(1 if given.quick else given.rounds):
                for processes in (1, 2) if number % 2 == 0 else (2, 1):
                    place = folder / f"{number}-{processes}"
                    runs[processes].append(timed_run(verb, settings, place, processes=processes))
            found = compare(runs)
            print(f"{verb}: efficiency {found['efficiency']:.2f}")
            for row in found["phases"]:
                print(f"  {row['phase']:16} {row['one_s']:8.2f} s {row['two_s']:8.2f} s {row['lost']:+.3f}")
            result = {"rounds": len(runs[1]), "load_5_min": os.getloadavg()[1], **found}
            subject = f"efficiency-{'gpu-' if SHARES_GPU else ''}{verb}"
            report(subject, result, folder=HERE, save=given.save)


if __name__ == "__main__":
    main()
