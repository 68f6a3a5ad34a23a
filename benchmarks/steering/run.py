"""How fast activations are extracted, what steering costs, and how many trials an hour fit.

    python benchmarks/steering/run.py                                  # rows as they come, then one JSON line
    python benchmarks/steering/run.py --models FOLDER llama-8b --seconds 60 --save DIR

A model is a folder that `save_pretrained` wrote, or a shape with random weights: llama-8b, tiny.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from extraction import extraction, storing  # noqa: E402
from generation import Load, choices, steered, trials  # noqa: E402
from interleaved import ResultFile, cpu_name  # noqa: E402
from racing import FAILURES, show  # noqa: E402
from searching import searches  # noqa: E402
from subjects import open_subject  # noqa: E402

import flatout  # noqa: E402
from flatout.multiplex.models.families import read_decoder  # noqa: E402

Section = Callable[[], list[dict[str, Any]]]

# A text of `prompt` + `new` tokens ends at a multiple of the cache's bucket: one captured step serves it.
SIZES = {
    "cpu": {
        "texts": 48, "longest": 48, "rows": 16, "prompt": 24, "new": 16,
        "trials": 8, "questions": 4, "slots": 16,
    },
    "small": {
        "texts": 8192, "longest": 192, "rows": 256, "prompt": 64, "new": 64,
        "trials": 200, "questions": 20, "slots": 500,
    },
    "large": {
        "texts": 512, "longest": 192, "rows": 256, "prompt": 64, "new": 64,
        "trials": 80, "questions": 20, "slots": 400,
    },
}  # fmt: skip
HELP = {
    "texts": "texts to extract",
    "longest": "words of the longest text",
    "rows": "rows of the batch that is steered",
    "prompt": "tokens of a prompt",
    "new": "tokens of a text",
    "trials": "trials that are packed",
    "questions": "questions of a trial",
    "slots": "rows that packed trials run at a time",
}


def sections_of(name: str, options: argparse.Namespace) -> tuple[str, dict[str, Any], dict[str, Section]]:
    """The model's name, the sizes it is measured with, and what is measured, with a share of the seconds."""
    subject = open_subject(name, device=options.device)
    decoder = read_decoder(subject.model)
    kind = "cpu" if options.device == "cpu" else "large" if subject.is_large else "small"
    given = {name: getattr(options, name) for name in SIZES[kind]}
    size = {name: SIZES[kind][name] if value is None else value for name, value in given.items()}
    load = Load(
        rows=size["rows"],
        prompt=size["prompt"],
        new=size["new"],
        trials=size["trials"],
        questions=size["questions"],
        trial_slots=min(size["slots"], size["trials"] * size["questions"]),
    )
    texts = {"num_texts": size["texts"], "longest": size["longest"]}
    return (
        subject.name,
        size,
        {
            "extraction": lambda: extraction(subject, **texts, seconds=0.25 * options.seconds),
            "store": lambda: storing(subject, num_texts=min(2048, size["texts"]), longest=size["longest"]),
            "steered": lambda: steered(subject, decoder, load, seconds=0.3 * options.seconds),
            "choices": lambda: choices(subject, decoder, load, seconds=0.15 * options.seconds),
            "trials": lambda: trials(subject, decoder, load, seconds=0.3 * options.seconds),
            "search": lambda: searches(subject, decoder, load, seconds=0.3 * options.seconds),
        },
    )


def measure(name: str, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Every section of one model; one that fails says why, and the next runs."""
    began = time.monotonic()
    subject, sizes, sections = sections_of(name, options)
    said = ", ".join(f"{name} {value}" for name, value in sizes.items())
    print(f"{subject}: opened in {time.monotonic() - began:.1f} s; {said}", flush=True)
    for section, run in sections.items():
        if options.sections and section not in options.sections:
            continue
        began = time.monotonic()
        try:
            rows = run()
        except FAILURES as error:
            traceback.print_exc()
            rows = [{"arm": section, "failed": f"{type(error).__name__}: {str(error)[:300]}"}]
        print(f"  {subject}, {section} ({time.monotonic() - began:.0f} s)", flush=True)
        for row in rows:
            show(row)
        keep({"model": subject, "section": section, "sizes": sizes, "rows": rows})
        release(options.device)


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def parse() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", default=["llama-8b" if cuda else "tiny"], help="folders or shapes")
    add("--sections", nargs="+", default=(), help="extraction, store, steered, choices, trials, search")
    add("--seconds", type=float, default=30.0, help="of measuring each model, warm-up apart")
    for name, said in HELP.items():
        add(f"--{name}", type=int, default=None, help=f"{said}; by the model's size if not given")
    add("--threads", type=int, default=None)
    add("--device", default="cuda" if cuda else "cpu")
    add("--save", type=Path, default=None, metavar="DIR")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    cuda = options.device == "cuda"
    import transformers

    result: dict[str, Any] = {
        "benchmark": "steering",
        "hardware": torch.cuda.get_device_name() if cuda else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "flatout": flatout.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "clock": "wall" if cuda else "CPU time of the process",
        "seconds": options.seconds,
        "sections": [],
    }
    names = "-".join(Path(name).name for name in options.models)
    file = ResultFile(options.save, subject=f"steering-{names}", result=result)

    def keep(section: dict[str, Any]) -> None:
        result["sections"].append(section)
        file.write()

    for name in options.models:
        measure(name, options, keep)
        release(options.device)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
