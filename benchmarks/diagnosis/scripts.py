"""Ordinary training scripts: is the job unharmed, and does mending a cause gain what its finding promises?

    python benchmarks/diagnosis/scripts.py [--only NAME] [--seconds 60] [--save]

Every script of scripts/ is diagnosed as it stands.  It takes `--mended CAUSE`, which removes that cause and
nothing else; for each finding the script and its mended form take turns, and the ratio of their steps stands
beside the ceiling.  A cause that no finding names is mended as well: what was missed is part of the table.
`--save` writes results/scripts_HARDWARE_DATE.json after each script, and goes on from those that the file of
the same day holds, unless they changed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from twins import Job, gain_between, take_turns  # noqa: E402

from flatout.doctor.examine import examine  # noqa: E402
from flatout.doctor.finding import Finding  # noqa: E402
from flatout.doctor.sentences import is_of_the_job  # noqa: E402
from flatout.measure.evidence import Evidence  # noqa: E402
from flatout.measure.evidence_file import load_evidence  # noqa: E402

SCRIPTS = HERE / "scripts"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHERS = {"ddp.py": TORCHRUN}
NUM_TURNS = 6
LOADING = (
    *("single-process-loading", "loader-bound", "slow-samples"),
    *("rows-one-by-one-from-memory", "too-many-workers"),
)
# Where a script's causes are: the functions whose lines they are at, or the rules that see them.
CAUSES: dict[str, dict[str, tuple[str, ...]]] = {
    "convnet.py": {
        "augmentation": ("Augment.__call__", "Images.__getitem__", *LOADING),
    },
    "gan.py": {"sync-in-step": ("sync-in-step",)},
    "vae.py": {
        "respawned-workers": ("respawned-workers",),
        "in-memory": (*LOADING, "concatenating-collate"),
        "sync-in-step": ("sync-in-step",),
    },
    "lm_loader.py": {
        "unbucketed-padding": ("unbucketed-padding",),
        "concatenating-collate": ("concatenating-collate", "collate"),
        "tokenizing": ("encode", "Sentences.__getitem__", *LOADING),
    },
    "lm_batches.py": {
        "evaluation": ("estimate_loss", "evaluation-dominates"),
        "attention": ("Attention.forward",),
    },
    "lstm.py": {
        "recurrent-cell-loop": ("recurrent-cell-loop", "row-indexing-in-loop", "CharModel.forward"),
    },
    "rl.py": {"rollout": ("rollout", "select_action", "main", "batch-of-one-forwards", "rollout-dominates")},
    "lightning_classifier.py": {"metric": ("per_class_accuracy", "Classifier.training_step")},
    "hf_trainer.py": {"unbucketed-padding": ("unbucketed-padding",)},
    "accelerate_ema.py": {"average": ("EMA.update", "main")},
    "ddp.py": {
        "preprocessing": ("preprocess", "Signals.__getitem__", *LOADING),
        "averaged-loss": ("sync-in-step",),
    },
    "compiled.py": {"graph-break": ("graph-breaks", "Layer.forward"), "costly-block": ("histogram", "main")},
    "peft_lora.py": {
        "accuracy": ("token_accuracy", "main", "row-indexing-in-loop", "sync-in-step"),
        "no-mixed-precision": ("no-mixed-precision",),
        "checkpointing": ("needless-checkpointing",),
    },
}
# Sizes at which a step keeps a large GPU at work; the defaults suit two cores.
LARGE: dict[str, tuple[str, ...]] = {
    "convnet.py": ("--batch-size", "512", "--width", "128", "--images", "20480"),
    "gan.py": ("--batch-size", "256", "--features", "64"),
    "vae.py": ("--hidden", "4096", "--digits", "25600"),
    "lm_loader.py": ("--batch-size", "64", "--dim", "512", "--layers", "6", "--max-length", "256"),
    "lm_batches.py": ("--batch-size", "32", "--block-size", "256", "--layers", "8", "--dim", "512"),
    "lstm.py": ("--batch-size", "64", "--hidden", "512"),
    "rl.py": ("--hidden", "256", "--horizon", "200"),
    "lightning_classifier.py": ("--batch-size", "512", "--hidden", "4096"),
    "hf_trainer.py": ("--batch-size", "32", "--dim", "512", "--layers", "8", "--max-length", "256"),
    "accelerate_ema.py": ("--batch-size", "512", "--dim", "512"),
    "ddp.py": ("--batch-size", "128", "--hidden", "2048"),
    "compiled.py": ("--batch-size", "2048", "--dim", "1024"),
    "peft_lora.py": ("--batch-size", "16", "--dim", "512", "--layers", "8", "--max-length", "256"),
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}


def study(name: str, *, seconds: float, large: bool, turn_s: float) -> dict[str, Any]:
    """Diagnose one script, mend its causes one by one, and put both side by side."""
    sizes = LARGE[name] if large else ()
    jobs = _jobs(name, sizes) if large else {}  # with cores to spare they start during the diagnosis
    try:
        found = diagnose(name, sizes, seconds=seconds)
        if "evidence" not in found:
            return {"script": name, **found}
        evidence: Evidence = found.pop("evidence")
        findings = examine(evidence)
        gains = gains_of(jobs or _jobs(name, sizes), turn_s=turn_s)
    finally:
        for job in jobs.values():
            job.end()
    rows = [row_of(finding, name, gains) for finding in findings]
    named = {row["cause"] for row in rows}
    missed = [cause for cause in CAUSES[name] if cause not in named]
    rows += [
        {"cause": cause, "finding": None, "place": None, "ceiling": None, **gains[cause]} for cause in missed
    ]
    return {"script": name, "text": _text_of(name), **found, "step_s": evidence.step_s, "rows": rows}


def _text_of(name: str) -> str:
    return hashlib.sha256((SCRIPTS / name).read_bytes()).hexdigest()[:12]


def diagnose(name: str, sizes: tuple[str, ...], *, seconds: float) -> dict[str, Any]:
    """Run `flatout diagnose`; `harm` names what a script must not suffer by it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "evidence.json"
        command = ("-m", "flatout", "diagnose", "--seconds", str(seconds), "--save", str(path), name, *sizes)
        began_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, *LAUNCHERS.get(name, ()), *command],
            cwd=SCRIPTS,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout + done.stderr
        result: dict[str, Any] = {"took_s": time.monotonic() - began_s, "code": done.returncode, "harm": None}
        if "skipped: " in said:
            return {**result, "skipped": said[said.index("skipped: ") :].partition("\n")[0]}
        if path.exists():
            result["evidence"] = evidence = load_evidence(path)
        if done.returncode not in (0, 1) or not path.exists() or evidence.job.ended != "measured":
            result["harm"] = f"ended with {done.returncode}: {done.stderr.strip()[-500:]}"
        elif "Traceback" in said:
            result["harm"] = said[said.index("Traceback") :][:500]
        return result


def _jobs(name: str, sizes: tuple[str, ...]) -> dict[str | None, Job]:
    """The script, and by their causes its mended forms."""
    script, launcher = SCRIPTS / name, LAUNCHERS.get(name, ())
    options: dict[str | None, tuple[str, ...]] = {
        None: (),
        **{cause: ("--mended", cause) for cause in CAUSES[name]},
    }
    return {cause: Job(script, (*sizes, *each), launcher=launcher) for cause, each in options.items()}


def gains_of(jobs: dict[str | None, Job], *, turn_s: float) -> dict[str, dict[str, Any]]:
    """What mending each cause gains: the script and all its mended forms take turns."""
    try:
        for job in jobs.values():
            job.wait_ready()
        slow, *mended = zip(*take_turns(list(jobs.values()), turns=NUM_TURNS, turn_s=turn_s), strict=True)
    finally:
        for job in jobs.values():
            job.end()
    gains = {}
    for cause, fast in zip(list(jobs)[1:], mended, strict=True):
        found = gain_between(slow, fast)
        gains[str(cause)] = {"real": found.gain, "real_low": found.low, "real_high": found.high}
    return gains


def row_of(finding: Finding, name: str, gains: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A finding with its ceiling, for the job where it speaks of the job, and what mending really gained."""
    function = finding.place.function if finding.place is not None else None
    # a rule says which cause it means; a function may hold several
    known = ({finding.name}, {function, *(other.name for other in finding.also)})
    causes = (cause for names in known for cause, where in CAUSES[name].items() if names.intersection(where))
    cause = next(causes, None)
    row: dict[str, Any] = {"cause": cause, "finding": finding.name, "place": str(finding.place or "")}
    ceiling = finding.ceiling
    row |= {"ceiling": None, "share": finding.share, "reason": finding.no_ceiling}
    if ceiling is not None:
        of_job = is_of_the_job(ceiling)
        row |= {"ceiling": ceiling.job_speedup if of_job else ceiling.speedup, "arm": ceiling.kind}
        row |= {"low": ceiling.speedup_low, "high": ceiling.speedup_high, "of": "job" if of_job else "step"}
    return {**row, **gains.get(cause or "", {"real": None, "real_low": None, "real_high": None})}


def show(result: dict[str, Any]) -> None:
    """Print a script's rows."""
    how = result.get("skipped") or result["harm"] or "unharmed"
    print(f"{result['script']}: {how}, {result['took_s']:.0f} s")
    for row in result.get("rows", ()):
        finding = f"{row['finding']} at {row['place']}" if row["finding"] else "no finding"
        ceiling = _interval(row["ceiling"], row.get("low"), row.get("high"))
        real = _interval(row["real"], row["real_low"], row["real_high"])
        print(f"  {finding:44}{ceiling:>22}  {row['cause'] or 'not mended':24}{real:>22}", flush=True)


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", help="a script by its name, without .py; may be repeated")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one diagnosis (default: 60)")
    parser.add_argument(
        "--turn-seconds", type=float, default=1.5, help="of one turn of two jobs (default: 1.5)"
    )
    parser.add_argument("--large", action="store_true", help="sizes for a large GPU")
    parser.add_argument("--save", action="store_true", help="write results/scripts_HARDWARE_DATE.json")
    options = parser.parse_args()
    import torch

    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu-{os.cpu_count()}-cores"
    slug = "".join(c if c.isalnum() else "-" for c in hardware.lower())
    path = HERE / "results" / f"scripts_{slug}_{datetime.date.today().isoformat()}.json"
    stamp = {"hardware": hardware, "torch": str(torch.__version__), "python": platform.python_version()}
    kept = json.loads(path.read_text())["scripts"] if options.save and path.exists() else []
    done = {each["script"]: each for each in kept if each.get("text") == _text_of(each["script"])}
    result: dict[str, Any] = {"benchmark": "scripts", **stamp, "scripts": kept}
    for name in CAUSES:
        if name in done or (options.only is not None and name.removesuffix(".py") not in options.only):
            continue
        done[name] = study(name, seconds=options.seconds, large=options.large, turn_s=options.turn_seconds)
        show(done[name])
        result["scripts"] = [done[known] for known in CAUSES if known in done]
        if options.save:
            path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
