"""How long a trace takes on this machine, beyond imports, and the most memory it holds.

    python benchmarks/memory/trace_times.py [--rounds 3] [--save]          # no GPU

Goals: 3 s up to 150M parameters, 10 s for the four encoders of examples/embedder, 30 s for a Llama of 7B on
a machine with 24 GiB.  A trace is what one question of `flatout plan` costs that no earlier one has answered:
the child's start, the model built without data, one training step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "embedder")]

from benchmarks.memory.configurations import every_configuration  # noqa: E402
from benchmarks.memory.families.decoders import plain_text  # noqa: E402
from benchmarks.memory.preparation import import_everything  # noqa: E402
from benchmarks.memory.table import RESULTS  # noqa: E402
from flatout.hardware.simulated import simulated_device  # noqa: E402
from flatout.memory.jobs.job import Job, Recipe  # noqa: E402
from flatout.memory.process.isolated_process import run_in_child  # noqa: E402
from flatout.memory.trace.make_trace import import_before_forking, trace_here  # noqa: E402

SMALL_PARAMETERS = 150_000_000
GOAL_S = {"small": 3.0, "embedder": 10.0, "7b": 30.0}


def seven_billion() -> tuple[Job, Recipe]:
    def make_model() -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig())  # its defaults are those of Llama 7B

    sizes = {"batch_size": 1, "length": 2048}
    job = Job(name="llama-7b", make_model=make_model, make_batch=plain_text, loss=_loss, sizes=sizes)
    return job, Recipe(precision="bf16")


def _loss(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def embedder() -> tuple[Job, Recipe]:
    from plan import build
    from settings import read_settings

    return build(read_settings(ROOT / "examples" / "embedder" / "conf", stage=None))  # type: ignore[no-any-return]


def traced(job: Job, recipe: Recipe) -> tuple[int, int]:
    """Parameters of the model, and the most bytes that the child held."""
    last = recipe.accumulation > 1  # as `flatout plan` does it: of several micro-batches the last
    trace = trace_here(job, recipe, job.sizes, device=simulated_device("H200"), last_micro_batch=last)
    return trace.num_parameters, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(kind: str, job: Job, recipe: Recipe, *, rounds: int) -> dict[str, Any]:
    taken, held = [], []
    for _ in range(rounds):
        start_s = time.perf_counter()
        num_parameters, rss_bytes = run_in_child(traced, job, recipe)
        taken.append(time.perf_counter() - start_s)
        held.append(rss_bytes)
    row = {
        "kind": kind,
        "name": job.name,
        "num_parameters": num_parameters,
        "seconds": statistics.median(taken),
        "slowest_s": max(taken),
        "rss_bytes": max(held),
        "rounds": rounds,
        "goal_s": GOAL_S[kind],
    }
    print(
        f"{job.name:34} {num_parameters / 1e6:7.0f} M  {row['seconds']:6.2f} s"
        f" (slowest {row['slowest_s']:.2f}, goal {row['goal_s']:g})  {row['rss_bytes'] / 2**30:.2f} GiB",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="*", default=(), help="small models whose names have one of these words"
    )
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    import_everything()
    import_before_forking()
    training = [each for each in every_configuration() if each.recipe.mode == "train"]
    by_name = {each.job.name: each for each in training}  # a model once, whatever its recipes
    rows = []
    rows.append(timed("7b", *seven_billion(), rounds=options.rounds))
    rows.append(timed("embedder", *embedder(), rounds=options.rounds))
    for name, each in by_name.items():
        if options.only and not any(word in name for word in options.only):
            continue
        num_parameters, _ = run_in_child(traced, each.job, each.recipe)
        if num_parameters <= SMALL_PARAMETERS:
            kind = "embedder" if name.startswith("embedder") else "small"  # four encoders with LoRA
            rows.append(timed(kind, each.job, each.recipe, rounds=options.rounds))
    over = [row["name"] for row in rows if row["seconds"] > row["goal_s"]]
    print(f"{len(rows)} models, over their goal: {', '.join(over) or 'none'}")
    if options.save:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        path = RESULTS / f"trace-times_{platform.machine()}-2-cores_{today}.json"
        path.write_text(json.dumps({"benchmark": "trace times", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
