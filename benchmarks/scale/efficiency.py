"""Two workers against one, and where the rest of the second goes.

    python benchmarks/scale/efficiency.py [--rounds 1] [--part search|tuning|gpu] [--save]

A search is run by one worker and by two, in turn.  Its judge waits 30 ms for each text, as if the work were
done by a GPU of the worker's own.  The rows of both workers are looked at twenty times a second, which gives
the parts of what is lost:

    end     the last bracket of one worker is waited for by the other
    slower  rows a second of both together, against twice those of one alone

and `join_s`, for which the first worker would work alone while the second loads, which costs a long search
little.  It waits here, so that both begin together.

A tuning is run on a Ray cluster of one node and of two.  Its tasks are counted four times a second.  What is
lost of the second node:

    start_end  before the first task and after the last one, both nodes wait
    waits      between them a node waits for an answer that decides what is tried next, or for the last trial
    more_work  seconds of tasks beyond those of one node: trials that ran ahead and were not asked for, and
               trials that take longer beside another on the same machine

With `--part gpu` a second worker joins the first on its GPU, although `steer search` itself starts one for
each GPU.  The model is larger, and its texts are judged without a wait.  Two take as long as one if sharing
costs nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROOT = HERE.resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(HERE)]
from faults_search import SCRIPT, Command, Search, diagnose, running_tasks, saved_rows  # noqa: E402
from interleaved import report  # noqa: E402

from tests.support.two_nodes import TwoNodes  # noqa: E402

LOOK_S, LOOK_AT_TASKS_S = 0.05, 0.25
TRIALS = 60
# On one GPU: trials that ask every question, for some seconds of work.
ON_GPU = {"device": "cuda", "trials": 600, "max_new_tokens": 128, "rungs": 1}
WIDTH, LAYERS = 1024, 12
AT_ONCE = """
import os, pathlib, time
folder = pathlib.Path(__file__).parent

def judge(question, text):
    while not (folder / "go").exists():
        (folder / f"waits-{os.getpid()}").touch()
        time.sleep(0.02)
    return float(len(text))
"""
SHARED = "two workers take turns on the GPU; one decodes while the other judges and launches"


def run_search(folder: Path, *, workers: int, **on_gpu: Any) -> dict[str, Any]:
    """The rows of all workers from a moment on, and the seconds until the last row of each."""
    folder.mkdir()
    search = Search(folder, **{"workers": 1 if on_gpu else workers, "trials": TRIALS, **on_gpu})
    joining = Command(folder, "steer", "search", search.out, "--join", "--worker", "1")
    if on_gpu:
        (folder / "slow.py").write_text(AT_ONCE)
        enlarge(folder / "tiny" / "model")
    go = folder / "go"
    search.start()
    ready_s = began_s = 0.0
    seen: dict[str, list[tuple[float, int]]] = {}
    while search.process.poll() is None and "testing the winner" not in search.log.read_text():
        if not ready_s and search.out.joinpath("vectors").exists():
            ready_s = time.monotonic()
            if on_gpu and workers == 2:
                joining.start()
        if on_gpu:
            are_ready = len([*folder.glob("waits-*")]) == workers
        else:
            are_ready = workers == 1 or search.num_busy() > 0
        if ready_s and not go.exists() and are_ready:
            began_s = time.monotonic()
            go.touch()
        for path in search.out.glob("rows/*.jsonl"):
            number = path.read_bytes().count(b"\n")
            held = seen.setdefault(path.stem, [])
            if began_s and (not held or held[-1][1] != number):
                held.append((time.monotonic(), number))
        time.sleep(LOOK_S)
    if search.process.wait() or (on_gpu and workers == 2 and joining.process.wait()):
        raise RuntimeError(search.log.read_text()[-1000:])
    return {
        "ends_s": [held[-1][0] - began_s for held in seen.values()],
        "rows": sum(held[-1][1] - held[0][1] for held in seen.values()),
        "join_s": began_s - ready_s,
    }


def enlarge(model: Path) -> None:
    """Give a saved model random weights of another size; its tokenizer stays."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(model)
    config.hidden_size, config.intermediate_size = WIDTH, 2 * WIDTH
    config.num_hidden_layers, config.max_position_embeddings = LAYERS, 512
    config.num_attention_heads = config.num_key_value_heads = config.hidden_size // 64
    config.head_dim = 64
    LlamaForCausalLM(config).save_pretrained(model)


def compare_on_gpu(alone: dict[str, Any], together: dict[str, Any]) -> dict[str, Any]:
    """What is left of the rows a second when two workers share a GPU, in the form of the other verbs."""
    one_s, two_s = (max(each["ends_s"]) / each["rows"] for each in (alone, together))
    lost = {"phase": "rows", "one_s": one_s, "two_s": two_s, "lost": 1 - one_s / two_s, "reason": SHARED}
    return {"efficiency": one_s / two_s, "phases": [lost], "alone": alone, "together": together}


def compare(alone: dict[str, Any], together: dict[str, Any]) -> dict[str, Any]:
    """What two workers gain, of two, and the parts of what they do not."""
    alone_s, took_s = max(alone["ends_s"]), max(together["ends_s"])
    speedup = (together["rows"] / took_s) / (alone["rows"] / alone_s)
    end = (took_s - min(together["ends_s"])) / took_s / 2
    return {
        "speedup": speedup,
        "efficiency": speedup / 2,
        "lost_end": end,
        "lost_slower": 1 - speedup / 2 - end,
        "join_s": together["join_s"],
        "alone_s": alone_s,
        "together_s": took_s,
    }


def run_tuning(folder: Path, *, nodes: int) -> dict[str, Any]:
    """Seconds of a tuning whose trials run on so many nodes, and node-seconds with and without a task."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    diagnose(folder)
    with TwoNodes(nodes=nodes) as cluster:
        given = ("--evidence", "evidence.json", "--only", "loader-workers=2", "--only", "garbage-every")
        tune = Command(
            folder, "tune", *given, "--ray", cluster.address, "train.py", environment=cluster.environment
        )
        began_s = before_s = time.monotonic()
        tune.start()
        busy_s, first_s, last_s = 0.0, None, began_s
        while tune.process.poll() is None:
            time.sleep(LOOK_AT_TASKS_S)
            number, now_s = len(running_tasks(cluster)), time.monotonic()
            busy_s += number * (now_s - before_s)
            if number:
                first_s, last_s = first_s or before_s, now_s
            before_s = now_s
        ended_s = time.monotonic()
    if tune.process.returncode or first_s is None:
        raise RuntimeError(tune.log.read_text()[-1000:])
    return {
        "seconds": ended_s - began_s,
        "busy_s": busy_s,
        "start_end_s": nodes * (first_s - began_s + ended_s - last_s),
        "waits_s": nodes * (last_s - first_s) - busy_s,
    }


def compare_tunings(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """What the second node gains, and the parts of what it does not: their sum is the rest to 1."""
    whole_s = 2 * two["seconds"]
    return {
        "speedup": one["seconds"] / two["seconds"],
        "efficiency": one["seconds"] / whole_s,
        "lost_start_end": (two["start_end_s"] - one["start_end_s"]) / whole_s,
        "lost_waits": (two["waits_s"] - one["waits_s"]) / whole_s,
        "lost_more_work": (two["busy_s"] - one["busy_s"]) / whole_s,
        "one": one,
        "two": two,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="of the search")
    parser.add_argument("--part", choices=["search", "tuning", "gpu"], help="the first two, if none is named")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.part == "gpu":
            alone, together = (run_search(folder / f"gpu-{each}", workers=each, **ON_GPU) for each in (1, 2))
            report("efficiency-gpu-search", compare_on_gpu(alone, together), folder=HERE, save=options.save)
            return
        for number in range(options.rounds if options.part != "tuning" else 0):
            alone, together = (run_search(folder / f"{number}-{each}", workers=each) for each in (1, 2))
            rows[f"search, round {number}"] = compare(alone, together)
        if options.part != "search":
            one, two = (run_tuning(folder / f"tuning-{each}", nodes=each) for each in (1, 2))
            rows["tuning"] = compare_tunings(one, two)
    for row, found in rows.items():
        found |= {"load": os.getloadavg()[0], "cores": os.cpu_count()}
        lost = ", ".join(f"{part[5:]} {found[part]:.0%}" for part in found if part.startswith("lost_"))
        print(f"{row:<18} {found['speedup']:.2f}x of 2 (lost: {lost})")
    if options.save and options.part:
        rows = saved_rows("efficiency") | rows
    report("efficiency", rows, folder=HERE, save=options.save)


if __name__ == "__main__":
    main()
