"""What tuning gains on scripts as a beginner writes them, beside torch.compile and bf16 by hand.

    python benchmarks/tuning/beginners.py [--only NAME] [--form lossy|exact] [--seconds S] [--save FILE]
    python benchmarks/tuning/beginners.py --turns-only

Scripts: a convnet with augmentation, a language model, a fine-tuned classifier (all three in `beginners/`),
and examples/darkroom with patches.  Each is diagnosed once, tuned with lossy treatments allowed (where the
goal needs them) and without, for at most S seconds together; what both begin with runs once.  Then the
script, its form by hand and the script under what was kept take turns.  Beside the verdicts stands a peer's
rule on the same trials: the first run with a treatment against the one before it, kept if it is faster.  FILE
gets each tuning and each script's turns as they are done, beside what it holds already.  `--form` tunes in
one of the two ways alone, with all the seconds.

`--turns-only` tunes nothing: the turns of scripts under all treatments that suit them say what a tuning could
gain, in a minute or two each, and prove no numbers.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "diagnosis")]
from twins import Job, gain_between, take_turns  # noqa: E402

import flatout  # noqa: E402
from flatout import api  # noqa: E402
from flatout.hardware.host import read_host  # noqa: E402
from flatout.measure.evidence import Evidence  # noqa: E402
from flatout.tuner.results.outcome import Tuning  # noqa: E402
from flatout.tuner.results.prescription import Kept, Prescription, save_prescription  # noqa: E402
from flatout.tuner.search.times import NOISE  # noqa: E402
from flatout.tuner.search.tune import Tuner  # noqa: E402
from flatout.tuner.treatment import Dose, read_dose  # noqa: E402
from flatout.tuner.treatments.loading.loader_workers import MOST  # noqa: E402
from flatout.tuner.trial.meter import TrialResult  # noqa: E402
from flatout.tuner.verdict import Gain  # noqa: E402

GOALS = {"convnet": 3.0, "gpt": 6.0, "finetune": 4.0, "darkroom": 40.0}  # on an H200, lossy ones allowed
FOLDERS = {
    name: ROOT / "examples" / "darkroom" if name == "darkroom" else HERE / "beginners" for name in GOALS
}
DIAGNOSIS_S = {"darkroom": 40.0}  # its steps are long
SHORT_DIAGNOSIS_S = 22.0
MORE = {"darkroom": {"full": ["--batch-size", "32"]}}  # at 512 a step takes 13 s, and a proof half an hour
# Lossy treatments allowed, and not.  Where the goal needs none, all the time goes to the tuning without.
FORMS = {
    "convnet": ("exact",),
    "gpt": ("lossy", "exact"),
    "finetune": ("lossy", "exact"),
    "darkroom": ("exact",),
}
FIRST = 0.8  # of the seconds after the diagnosis, for the first of two
TURNS, TURN_S = 4, 1.5  # long ones: a loader that fetches ahead has a start in each
MOST_TURNS_S = 900.0  # with compilation
LOADER = ("loader-workers={cores}", "pinned-memory")
STEP = ("fused-optimizer", "compile=default")
SUITABLE = {
    "convnet": (*LOADER, "channels-last", "cudnn-benchmark", *STEP),
    "gpt": STEP,
    "finetune": (*LOADER, *STEP),
}
SUITABLE_LOSSY = ("matmul-precision=high", "autocast=bfloat16")

Item = dict[str, Any]


class Shared:
    """The trials that two tunings of one job begin with, which run once."""

    def __init__(self) -> None:
        self._first: defaultdict[str, deque[tuple[TrialResult, ...]]] = defaultdict(deque)
        self._known: defaultdict[str, deque[tuple[TrialResult, ...]]] = defaultdict(deque)

    def begin_again(self) -> None:
        self._known = self._first

    def find(self, key: str) -> tuple[TrialResult, ...] | None:
        if self._known[key]:
            return self._known[key].popleft()
        self._known = defaultdict(deque)  # from here on they differ
        return None

    def add(self, key: str, *results: TrialResult) -> None:
        self._first[key].append(results)


def examine(
    name: str,
    *,
    arms: Sequence[str],
    size: str,
    seconds: float | None,
    say: Callable[[str], None],
    save: Callable[[Item], None],
) -> None:
    """Tune a script where there is time for it, then let its forms take turns; save what is done."""
    began_s = time.monotonic()
    with copy_of(name) as script:
        command = [script.name, "--size", size, "--steps", "100000", *MORE.get(name, {}).get(size, ())]
        item: Item = {}
        if seconds is not None:
            for found in tune_all(name, command, arms, seconds=seconds, say=say):
                save(item := item | found)
        if name in SUITABLE:
            say("turns")
            if seconds is None:
                cores = min(MOST, round(read_host().cores or 1))
                texts = [each.format(cores=cores) for each in SUITABLE[name]]
                suitable = {"lossy": [*texts, *SUITABLE_LOSSY], "exact": texts}
                forms = {arm: suitable[arm] for arm in arms}
            else:
                forms = {arm: item[arm]["kept"] for arm in arms if item[arm].get("kept")}
            try:
                item["turns"] = turns_of(script, command[1:], forms)
            except (RuntimeError, OSError) as error:  # a form that ends does not cost the tunings
                item["turns"] = {"plain": {"error": f"{type(error).__name__}: {error}"}}
    save({**item, "size": size, "took_s": time.monotonic() - began_s})


def tune_all(
    name: str, command: list[str], arms: Sequence[str], *, seconds: float, say: Callable[[str], None]
) -> Iterator[Item]:
    """Diagnose a script, and tune it with or without lossy treatments, or both; yield what is done."""
    began_s = time.monotonic()
    found = api.diagnose_script(
        command,
        seconds=DIAGNOSIS_S.get(name, SHORT_DIAGNOSIS_S),
        script_stdout_to_stderr=True,
        on_progress=say,
    )
    yield {"step_s": found.evidence.step_s, "findings": [each.name for each in found.findings]}
    shared, until_s = Shared(), began_s + seconds
    for arm in arms:
        share = 1.0 if arm == arms[-1] else FIRST
        shared.begin_again()
        left_s = share * (until_s - time.monotonic())
        try:
            tuned = tune(
                found.evidence,
                command,
                allow_lossy=arm == "lossy",
                patch=name == "darkroom",
                within_s=left_s,
                shared=shared,
                say=lambda text, arm=arm: say(f"{arm}: {text}"),  # type: ignore[misc]
            )
        except Exception as error:  # noqa: BLE001 - the other arm is still of use
            tuned = {"error": f"{type(error).__name__}: {error}"}
        yield {arm: {**tuned, "seconds": seconds, "date": datetime.date.today().isoformat()}}


def tune(
    evidence: Evidence,
    command: list[str],
    *,
    allow_lossy: bool,
    patch: bool,
    within_s: float,
    shared: Shared,
    say: Callable[[str], None],
) -> Item:
    began_s = time.monotonic()
    tuner = Tuner(
        evidence,
        command,
        module=False,
        allow_lossy=allow_lossy,
        patch=patch,
        on_progress=say,
        journal=shared,  # type: ignore[arg-type]
        within_s=within_s,
    )
    done = tuner.run()
    return {
        "gain": gain_of(done.total),
        "kept": [text_of(each) for each in done.prescription.doses()],
        "kept_patches": [str(each) for each in done.prescription.patch_doses()],
        "tried": {
            str(each): {"answer": each.answer, "reason": each.reason, "gain": gain_of(each.gain)}
            for each in done.tried
        },
        "noise": gain_of(done.noise),
        "reproducible": done.reproducible,
        "peer": peer_rule(tuner, done),
        "num_trials": done.num_trials,
        "checked": dict(tuner.checks),
        "took_s": time.monotonic() - began_s,
    }


def peer_rule(tuner: Tuner, done: Tuning) -> Item:
    """What a rule of one run after the other would have kept of what was timed in pairs of runs."""
    labels = {NOISE, *map(str, done.tried)}
    faster = {
        label: median(pairs[0][0].blocks_s) / median(pairs[0][1].blocks_s)
        for label, pairs in tuner.times.pairs.items()
        if pairs and label in labels
    }
    ours = {str(each) for each in done.tried if each.answer == "kept"}
    return {
        "ratios": faster,
        "kept_if_faster": [label for label, ratio in faster.items() if ratio > 1],
        "of_these_not_proven": [label for label, ratio in faster.items() if ratio > 1 and label not in ours],
    }


def gain_of(gain: Gain | None) -> Item | None:
    return None if gain is None else {"ratio": gain.ratio, "low": gain.low, "high": gain.high}


def text_of(dose: Dose) -> str:
    return dose.name if dose.value is True else f"{dose.name}={dose.value}"


def turns_of(script: Path, arguments: list[str], forms: dict[str, list[str]]) -> Item:
    """The script by hand and under treatments, each against the script as it is."""
    start = functools.partial(Job, script, limit_s=MOST_TURNS_S)
    jobs = {"plain": start(arguments), "by hand": start([*arguments, "--by-hand"])}
    for arm, texts in forms.items():
        path = script.with_name(f"{arm}.toml")
        kept = [Kept(name=dose.name, value=dose.value) for dose in map(read_dose, texts)]
        save_prescription(Prescription(treatments=tuple(kept)), path)
        jobs[arm] = start(arguments, launcher=("-m", "flatout", "run", "--with", str(path)))
    found: Item = {}
    try:
        for arm, job in list(jobs.items()):
            try:
                job.wait_ready()
            except RuntimeError as error:
                found[arm] = {"error": str(error)}
                del jobs[arm]
        turns = take_turns(list(jobs.values()), turns=TURNS, turn_s=TURN_S)
        seconds = dict(zip(jobs, zip(*turns, strict=True), strict=True))
        for arm in jobs:
            gain = gain_between(seconds["plain"], seconds[arm])
            found[arm] = {"ratio": gain.gain, "low": gain.low, "high": gain.high, "step_s": gain.fast_s}
    finally:
        for job in jobs.values():
            job.end()
    return found


@contextmanager
def copy_of(name: str) -> Iterator[Path]:
    """The script in a folder of its own, which is where a tuning runs."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(FOLDERS[name], folder, dirs_exist_ok=True)
        os.chdir(folder)
        try:
            yield Path(folder) / ("train.py" if name == "darkroom" else f"{name}.py")
        finally:
            os.chdir(before)


def show(items: dict[str, Item]) -> None:
    for name, item in items.items():
        print(f"{name}, goal {GOALS[name]:g}x" + (f": {item['error']}" if "error" in item else ""))
        for arm in FORMS[name]:
            if arm in item:
                found = item[arm]
                kept = ", ".join([*found.get("kept", ()), *found.get("kept_patches", ())])
                print(f"  tuned, {arm:12}{show_gain(found.get('gain')):22} {kept or found.get('error', '')}")
                not_proven = found.get("peer", {}).get("of_these_not_proven")
                print(f"    kept by one run after another, not proven: {not_proven}")
        for arm, gain in item.get("turns", {}).items():
            print(f"  turns, {arm:12}{show_gain(gain)}")


def show_gain(gain: Item | None) -> str:
    if gain is None or "error" in gain:
        return "-"
    return f"{gain['ratio']:.2f}x [{gain['low']:.2f}, {gain['high']:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], choices=GOALS, help="repeatable")
    parser.add_argument("--form", choices=("lossy", "exact"), help="one of the two tunings alone")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each script (default: 300)")
    parser.add_argument("--turns-only", action="store_true", help="tune nothing, and prove nothing")
    parser.add_argument("--save", type=Path, metavar="FILE", help="where to write or add the figures")
    options = parser.parse_args()
    known = options.save is not None and options.save.exists()
    items: dict[str, Item] = json.loads(options.save.read_text(encoding="utf-8"))["items"] if known else {}
    for name in options.only or GOALS:
        began_s = time.monotonic()

        def say(text: str, name: str = name, began_s: float = began_s) -> None:
            print(f"{time.monotonic() - began_s:6.1f} s  {name}: {text}", file=sys.stderr, flush=True)

        def save(item: Item, name: str = name, before: Item = items.get(name, {})) -> None:  # noqa: B008
            turns = {**before.get("turns", {}), **item.get("turns", {})}
            rest = {key: each for key, each in before.items() if key != "error"}
            items[name] = {**rest, **item, **({"turns": turns} if turns else {})}
            if options.save is not None:
                result = {"benchmark": "beginners", **machine(), "items": items}
                options.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

        arms = [arm for arm in FORMS[name] if options.form in (None, arm)]
        seconds = None if options.turns_only else options.seconds
        try:
            examine(name, arms=arms, size=options.size, seconds=seconds, say=say, save=save)
        except Exception as error:  # noqa: BLE001 - one script that fails does not cost the others
            save({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps({"benchmark": "beginners", **machine(), "items": items}))
    show(items)


def machine() -> Item:
    import torch
    from interleaved import cpu_name

    return {
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "flatout": flatout.__version__,
    }


if __name__ == "__main__":
    main()
