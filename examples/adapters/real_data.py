"""Real rows for the five tasks: from a folder of public data sets and from packages to files for training.

    python examples/adapters/real_data.py DATA_FOLDER OUT_FOLDER

DATA_FOLDER holds what you downloaded yourself, each under its own licence:

    sentiment/sentence_polarity.zip   sentence polarity 1.0: one member ending in .neg, one in .pos
    squad/*.jsonl                     SQuAD 1.1: context, question, answer, start
    scitldr/{train,dev,test}.jsonl    SciTLDR: source and target as lists of sentences
    mbpp/mbpp.jsonl                   MBPP: text and code

Code rows of Python's own standard library are added to MBPP's, and translation is made of the German
catalogues of two packages, which are fetched on first use.  OUT_FOLDER gets a folder per task with
train.jsonl, validation.jsonl and test.jsonl, which `flatout adapt` takes as `data: {path: ...}`.

Rows that ask the same are kept once.  Rows are placed by a hash of their input, so the files are the same on
every machine; questions on one text stay in one split.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from flatout.engines.adapters.tasks.data_rows import Record, drop_repeats, share_of
from flatout.engines.adapters.tasks.known import task_named
from flatout.engines.adapters.tasks.task import AdapterTask
from flatout.ground.atomic_files import write_whole
from flatout.ground.errors import FlatoutError

NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 8000, 500, 1000
# A small set gives no more than these shares away.
VALIDATION_SHARE, TEST_SHARE = 0.1, 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description="Real rows for the five tasks.")
    parser.add_argument("data", type=Path, help="the folder with the data sets")
    parser.add_argument("out", type=Path, help="where the rows go")
    arguments = parser.parse_args()
    for name, records in gathered(arguments.data):
        splits = divided(task_named(name), records)
        write(arguments.out / name, splits)
        print(f"{name:14}", "  ".join(f"{len(rows):5} {split}" for split, rows in splits.items()))


def gathered(data: Path, *, real: bool = True) -> Iterator[tuple[str, list[Record]]]:
    """All records of each task: those of the folder, and with `real` those that packages carry."""
    files = {
        "sentiment": [data / "sentiment" / "sentence_polarity.zip"],
        "qa": sorted((data / "squad").glob("*.jsonl")),
        "summarisation": sorted((data / "scitldr").glob("*.jsonl")),
        "code": [data / "mbpp" / "mbpp.jsonl"],
        "translation": [],
    }
    for name, paths in files.items():
        task = task_named(name)
        records = [record for path in paths for record in task.read(path)]
        carried = task.real() if real else None
        if carried is not None:
            records += carried[0]
        if records:
            yield name, records


def write(folder: Path, splits: dict[str, list[Record]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_whole(folder / f"{split}.jsonl", lines.encode())


def divided(task: AdapterTask, records: list[Record]) -> dict[str, list[Record]]:
    """Test, validation and training rows, in the order of the hash of what must stay together."""
    records = drop_repeats(records, key=task.input_of, taken=set())
    records.sort(key=lambda record: (share_of(task.group_of(record)), share_of(task.input_of(record))))
    wanted = {
        "test": min(NUM_TEST, int(TEST_SHARE * len(records))),
        "validation": min(NUM_VALIDATION, int(VALIDATION_SHARE * len(records))),
        "train": NUM_TRAIN,
    }
    splits: dict[str, list[Record]] = {}
    at = 0
    for split, count in wanted.items():
        stop = min(at + count, len(records))
        # The rows of one group go where its first row went.
        while 0 < stop < len(records) and task.group_of(records[stop]) == task.group_of(records[stop - 1]):
            stop += 1
        splits[split], at = records[at:stop], stop
    return splits


if __name__ == "__main__":
    try:
        main()
    except FlatoutError as error:
        raise SystemExit(f"error: {error}") from None
