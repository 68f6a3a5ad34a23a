"""What tuning gains on planted scripts beside mending them by hand, and what it keeps on decoys."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flatout import api
from flatout.doctor.rule import all_rules
from flatout.tuner.patches.patch import all_patches
from flatout.tuner.results.outcome import Tuning
from flatout.tuner.treatment import all_treatments

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "diagnosis"), str(ROOT / "tests" / "planted")]
from fixes import PLANTED, mended, needs_workers  # noqa: E402
from score import kebab, marks  # noqa: E402
from twins import Job, compare  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for trials too: the scripts that take turns have one thread

DECOY = re.compile(r"# decoy: ([a-z-]+)")
GUILTY_ANYWHERE = re.compile(r"# guilty(?! on cuda)")
ENOUGH = 0.9  # of what mending by hand gains

# Scripts for whose rule there are means, which answer another form of the fault than the one planted there.
OTHER_FORMS = {
    "costly_block": "progress-bars is for bars; the block here is a loop of the script's own",
    "hidden_library_sync": "causal-mask is for masks of attention; there a distribution checks its arguments",
    "evaluation_dominates": "it has no_grad already; to evaluate less often is the user's choice",
}

Item = dict[str, Any]


def rules() -> list[str]:
    """Name those for whose fault there is a treatment or a patch, and which costs something here."""
    found = sorted(path.parent.name for path in PLANTED.glob("*/planted.py") if _costs_here(path))
    return [rule for rule in found if means_of(rule) and rule not in OTHER_FORMS]


def _costs_here(script: Path) -> bool:
    return torch.cuda.is_available() or bool(GUILTY_ANYWHERE.search(script.read_text(encoding="utf-8")))


def means_of(rule: str) -> list[str]:
    """The treatments and patches for a rule, or for a folder of tests/planted."""
    name = kebab(rule.partition("__")[0])
    codes = [each.code for each in all_rules() if each.name == name]
    treatments = [each.name for each in all_treatments().values() if name in each.rules]
    return treatments + [each.name for each in all_patches().values() if set(codes) & set(each.answers)]


def planted_items(*, seconds: float, allow_lossy: bool) -> dict[str, Callable[[], Item]]:
    return {
        rule: lambda rule=rule: gain_of(rule, seconds=seconds, allow_lossy=allow_lossy)  # type: ignore[misc]
        for rule in rules()
    }


def decoy_items(*, seconds: float) -> dict[str, Callable[[], Item]]:
    """Clean twins and decoys hold what only looks like a fault: what would mend it must not be kept."""
    looks_like = {PLANTED / rule / "clean.py": [rule] for rule in rules()}
    for script in sorted((PLANTED / "decoys").glob("*.py")):
        looks_like[script] = DECOY.findall(script.read_text(encoding="utf-8"))
    means = {script: _means_without_fault(script, names) for script, names in looks_like.items()}
    return {
        script.parent.name if script.name == "clean.py" else f"decoy {script.stem}": (
            lambda script=script, names=names: kept_on_decoy(script, names, seconds=seconds)  # type: ignore[misc]
        )
        for script, names in means.items()
        if names
    }


def _means_without_fault(script: Path, rules: list[str]) -> list[str]:
    """What would mend these faults, but for what mends a fault that the script really has."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = script.read_text(encoding="utf-8")
    has = {name for mark in marks(source, rule="") if mark.holds_on(device) for name in mark.rules}
    helps = {name for rule in has for name in means_of(rule)}
    return sorted({name for rule in rules for name in means_of(rule)} - helps)


def gain_of(rule: str, *, seconds: float, allow_lossy: bool) -> Item:
    """Tune a planted script with what mends it; then let it and its mended form take turns."""
    with copy_of(PLANTED / rule / "planted.py") as folder:
        done = api.tune_script(
            ["planted.py"], patch=True, allow_lossy=allow_lossy, only=means_of(rule), seconds=seconds
        )
        workers = [each.value for each in done.prescription.treatments if each.name == "loader-workers"]
        count = int(workers[0]) if workers and needs_workers(rule) else 2
        (folder / "mended.py").write_text(mended(rule, workers=count), encoding="utf-8")
        jobs = Job(folder / "planted.py"), Job(folder / "mended.py")
        try:
            by_hand = compare(*jobs)
        finally:
            for job in jobs:
                job.end()
    tuned = done.total.ratio if done.total is not None else 1.0
    return {
        "tuned": tuned,
        "low": done.total.low if done.total is not None else None,
        "high": done.total.high if done.total is not None else None,
        "by_hand": by_hand.gain,
        "by_hand_low": by_hand.low,
        "by_hand_high": by_hand.high,
        "share": tuned / by_hand.gain,
        "means": means_of(rule),
        "kept": kept_of(done),
        "tried": {f"{each.name} {each.value}": f"{each.answer}: {each.reason}" for each in done.tried},
        "smallest_gain": done.smallest_gain,
        "num_runs": done.num_trials,
    }


def kept_on_decoy(script: Path, means: list[str], *, seconds: float) -> Item:
    with copy_of(script):
        done = api.tune_script([script.name], patch=True, allow_lossy=True, only=means, seconds=seconds)
    return {"means": means, "kept": kept_of(done), "right": not kept_of(done)}


def kept_of(done: Tuning) -> list[str]:
    found = [*done.prescription.treatments, *done.prescription.patches]
    return [each.name if each.value is True else f"{each.name} {each.value}" for each in found]


@contextmanager
def copy_of(script: Path) -> Iterator[Path]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        (folder / script.name).write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)
