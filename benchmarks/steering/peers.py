"""Last-token activations of all layers of the same texts, by other packages and by ours, in turn.

    pip install --no-deps --target PEERS/nnsight nnsight ...      # each with what it lacks, in its own folder
    python benchmarks/steering/peers.py --model FOLDER --peers PEERS --save DIR

Every package runs in a process of its own, because they ask for different versions of others; there it takes
turns with `extract`.  A package that is not in its folder, or that does not run here, says why.  All get
batches of 32 texts.  "apart" is the largest difference of its values from ours, as a share of the residual
stream's mean length: padding that is taken for text shows there.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from interleaved import cpu_name, ratio  # noqa: E402
from racing import FAILURES  # noqa: E402
from subjects import Subject, open_subject, texts_of  # noqa: E402

import flatout  # noqa: E402
from flatout.engines.steering.extract.activations import extract  # noqa: E402

BATCH = 32
Extraction = Callable[[], Tensor | None]  # values [texts, layers, width]; None: it keeps them to itself


def nnsight_arm(subject: Subject, texts: Sequence[str]) -> Extraction:
    import nnsight  # type: ignore[import-not-found]

    wrapped = nnsight.LanguageModel(subject.model, tokenizer=subject.tokenizer)

    def traced(batch: list[str]) -> list[Tensor]:
        with wrapped.trace(batch):
            saved = nnsight.save([])
            for layer in wrapped.model.layers:
                saved.append(layer.output[:, -1])
        return list(saved)

    def run() -> Tensor:
        parts = []
        for batch in _batches(texts):
            with torch.no_grad():
                parts.append(torch.stack(traced(batch), dim=1))
        return torch.cat(parts)

    return run


def transformer_lens_arm(subject: Subject, texts: Sequence[str]) -> Extraction:
    from transformer_lens.model_bridge import TransformerBridge  # type: ignore[import-not-found]

    # It rebuilds the model that it is given.
    bridge = TransformerBridge.boot_transformers(
        subject.model.config._name_or_path,
        hf_model=copy.deepcopy(subject.model),
        tokenizer=subject.tokenizer,
        device="cpu",
    )
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(subject.num_layers)]

    def run() -> Tensor:
        parts = []
        for batch in _batches(texts):
            tokens = subject.tokenizer(batch, return_tensors="pt", padding=True)
            with torch.no_grad():
                _, cache = bridge.run_with_cache(
                    tokens["input_ids"], attention_mask=tokens["attention_mask"], names_filter=names
                )
            parts.append(torch.stack([cache[name][:, -1] for name in names], dim=1))
        return torch.cat(parts)

    return run


def pyvene_arm(subject: Subject, texts: Sequence[str]) -> Extraction:
    import pyvene  # type: ignore[import-not-found]

    config = pyvene.IntervenableConfig(
        [
            {"layer": layer, "component": "block_output", "intervention_type": pyvene.CollectIntervention}
            for layer in range(subject.num_layers)
        ]
    )
    wrapped = pyvene.IntervenableModel(config, model=copy.deepcopy(subject.model))

    def run() -> Tensor:
        parts = []
        for batch in _batches(texts):
            tokens = subject.tokenizer(batch, return_tensors="pt", padding=True)
            last = tokens["input_ids"].shape[1] - 1
            with torch.no_grad():
                collected = wrapped(base=dict(tokens), unit_locations={"base": last})[0][1]
            parts.append(torch.stack([one.reshape(len(batch), -1) for one in collected], dim=1))
        return torch.cat(parts)

    return run


def steering_vectors_arm(subject: Subject, texts: Sequence[str]) -> Extraction:
    from steering_vectors import (  # type: ignore[import-not-found]
        SteeringVectorTrainingSample,
        extract_activations,
    )

    half = len(texts) // 2
    samples = [
        SteeringVectorTrainingSample(positive_str=first, negative_str=second)
        for first, second in zip(texts[:half], texts[half:], strict=True)
    ]

    def run() -> Tensor:
        sides = extract_activations(subject.model, subject.tokenizer, samples, batch_size=BATCH)
        layers = range(subject.num_layers)
        kept = [[torch.cat(list(side[layer])).view(half, -1) for layer in layers] for side in sides]
        return torch.cat([torch.stack(side, dim=1) for side in kept])

    return run


def repeng_arm(subject: Subject, texts: Sequence[str]) -> Extraction:
    """Its public call also fits a principal component of every layer; ours does the same beside it."""
    from repeng import ControlVector, DatasetEntry  # type: ignore[import-not-found]

    half = len(texts) // 2
    entries = [
        DatasetEntry(positive=first, negative=second)
        for first, second in zip(texts[:half], texts[half:], strict=True)
    ]

    def run() -> None:
        ControlVector.train(subject.model, subject.tokenizer, entries, batch_size=BATCH)

    return run


PEERS: dict[str, Callable[[Subject, Sequence[str]], Extraction]] = {
    "nnsight": nnsight_arm,
    "transformer_lens": transformer_lens_arm,
    "pyvene": pyvene_arm,
    "steering_vectors": steering_vectors_arm,
    "repeng": repeng_arm,
}


def ours(subject: Subject, texts: Sequence[str], *, fitted: bool) -> Tensor:
    found = extract(subject.model, subject.tokenizer, list(texts))
    if fitted:
        from flatout.engines.steering.vectors.steering_vectors import fit

        fit(*found.halves(), method="pca")
    return found.values


def _batches(texts: Sequence[str]) -> list[list[str]]:
    return [list(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]


def race_one(peer: str, options: argparse.Namespace) -> dict[str, Any]:
    """One package against ours, in this process."""
    subject = open_subject(str(options.model), device="cpu")
    subject.tokenizer.padding_side = "left"  # as their documents ask: the last column is the last token
    if subject.tokenizer.pad_token is None:
        subject.tokenizer.pad_token = subject.tokenizer.eos_token
    texts = texts_of(options.texts, longest=options.longest, seed=9)
    tokens = sum(map(len, subject.tokenizer(texts)["input_ids"]))
    theirs = PEERS[peer](subject, texts)
    arms = {"theirs": theirs, "ours": lambda: ours(subject, texts, fitted=peer == "repeng")}
    values = {name: arm() for name, arm in arms.items()}
    wall: dict[str, list[float]] = {name: [] for name in arms}
    busy: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.rounds):
        for name in sorted(arms, reverse=bool(number % 2)):
            began, worked = time.perf_counter(), time.process_time()
            arms[name]()
            wall[name].append(time.perf_counter() - began)
            busy[name].append(time.process_time() - worked)
    return {
        "peer": peer,
        "version": importlib.metadata.version(peer.replace("_", "-")),
        "what": "extraction and a principal component of every layer" if peer == "repeng" else "extraction",
        "texts": len(texts),
        "tokens": tokens,
        "cpu_s": statistics.median(busy["theirs"]),
        "our_cpu_s": statistics.median(busy["ours"]),
        "times_our_cpu_s": ratio(busy["theirs"], busy["ours"]),
        "times_our_wall_s": ratio(wall["theirs"], wall["ours"]),
        "apart": _apart(values["theirs"], values["ours"]),
    }


def _apart(theirs: Tensor | None, ours: Tensor | None) -> float | None:
    if theirs is None or ours is None:
        return None
    return float((theirs - ours).abs().amax() / ours.norm(dim=-1).mean())


def child(peer: str, options: argparse.Namespace) -> dict[str, Any]:
    """A package in a process of its own, with its own folder before all others."""
    folder = options.peers / peer
    if not folder.is_dir():
        return {"peer": peer, "skipped": f"no folder {peer} among the peers"}
    command = [sys.executable, __file__, "--only", peer, "--model", str(options.model)]
    for name in ("texts", "longest", "rounds"):
        command += [f"--{name}", str(getattr(options, name))]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        return {"peer": peer, "skipped": said[-1][:300] if said else f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def show(row: dict[str, Any]) -> None:
    if "skipped" in row:
        print(f"{row['peer']}: skipped: {row['skipped']}", flush=True)
        return
    share, wall, apart = row["times_our_cpu_s"], row["times_our_wall_s"], row["apart"]
    print(
        f"{row['peer']} {row['version']}, {row['what']}:"
        f" {row['cpu_s']:.1f} s of CPU, ours {row['our_cpu_s']:.1f};"
        f" {share['ratio']:.2f} [{share['low']:.2f}, {share['high']:.2f}] times our CPU time,"
        f" {wall['ratio']:.2f} [{wall['low']:.2f}, {wall['high']:.2f}] times our wall time"
        + ("" if apart is None else f"; apart {apart:.1e}"),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a folder that save_pretrained wrote, or a shape")
    add("--peers", type=Path, default=None, help="the folder that holds a folder for each package")
    add("--names", nargs="+", default=list(PEERS), choices=list(PEERS))
    add("--only", default=None, choices=list(PEERS), help="in this process: what each child is called with")
    add("--texts", type=int, default=200)
    add("--longest", type=int, default=24, help="words of the longest text")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=1)
    add("--save", type=Path, default=None, metavar="DIR")
    options = parser.parse_args()
    if options.only is not None:
        torch.set_num_threads(options.threads)
        try:
            print(json.dumps(race_one(options.only, options)))
        except FAILURES as error:
            sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return
    if options.peers is None:
        parser.error("--peers FOLDER is missing")
    rows = []
    for peer in options.names:
        rows.append(child(peer, options))
        show(rows[-1])
    result = {
        "benchmark": "steering-peers",
        "model": options.model.resolve().name,
        "hardware": cpu_name(),
        "threads": options.threads,
        "torch": str(torch.__version__),
        "flatout": flatout.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "batch": BATCH,
        "rows": rows,
    }
    print(json.dumps(result))
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        slug = "".join(c if c.isalnum() else "-" for c in str(result["hardware"]).lower())
        path = options.save / f"peers-{result['model']}_{slug}_{result['date']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
