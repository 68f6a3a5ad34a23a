"""The splits of a task, from the user's files, from a package, or generated.

The user's files come first, then real rows that a package carries, then generated ones; `Splits.origin` says
in one line which it was and why.  The test rows choose first and the training rows last, so an input that is
in several files is tested on and not trained on.
"""

from __future__ import annotations

from flatout.engines.adapters.tasks.rows import distinct, some, split_files, split_of
from flatout.engines.adapters.tasks.task import DataOptions, Record, Splits, Task
from flatout.errors import BadInput, NotFetched

GENERATED = {"train": 2000, "validation": 200, "test": 200}
CHOOSING = ("test", "validation", "train")


def gather(task: Task, options: DataOptions) -> Splits:
    """The rows of a task, cut to the numbers asked for."""
    if options.path is not None:
        found, origin = _from_files(task, options)
    elif options.source == "generated":
        found, origin = _generated(task, options, reason="as asked")
    else:
        found, origin = _real_or_generated(task, options)
    taken: set[str] = set()
    kept: dict[str, list[Record]] = {}
    for split in CHOOSING:
        records = distinct(found[split], key=task.input_of, taken=taken)
        kept[split] = some(records, getattr(options, f"num_{split}"), key=task.input_of)
        if not kept[split]:
            raise BadInput(
                f"{task.name}: no rows for {split} in {origin}", hint="give more rows, or a file for it"
            )
    return Splits(**kept, origin=origin)


def _from_files(task: Task, options: DataOptions) -> tuple[dict[str, list[Record]], str]:
    assert options.path is not None
    files = split_files(options.path) if options.path.is_dir() else {"train": options.path}
    files |= {
        split: path for split in ("validation", "test") if (path := getattr(options, split)) is not None
    }
    found = {split: task.read(path) for split, path in files.items()}
    return _divided(task, found), f"{options.path}"


def _real_or_generated(task: Task, options: DataOptions) -> tuple[dict[str, list[Record]], str]:
    try:
        real = task.real()
    except NotFetched as error:
        return _generated(task, options, reason=f"real rows are out of reach: {error.message}")
    if real is None:
        return _generated(task, options, reason="no package with real rows is known; give a path for yours")
    records, origin = real
    return _divided(task, {"train": records}), origin


def _divided(task: Task, found: dict[str, list[Record]]) -> dict[str, list[Record]]:
    """Splits that are missing are taken from the rows to train on."""
    missing = [split for split in CHOOSING if split not in found]
    divided: dict[str, list[Record]] = {split: [] for split in (*missing, "train")}
    for record in found["train"]:
        split = split_of(task.group_of(record))
        divided[split if split in missing else "train"].append(record)
    return {**found, **divided}


def _generated(task: Task, options: DataOptions, *, reason: str) -> tuple[dict[str, list[Record]], str]:
    counts = {split: getattr(options, f"num_{split}") or number for split, number in GENERATED.items()}
    # A small world repeats itself, and repeated rows are left out: a few more than are asked for.
    records = task.generated(2 * sum(counts.values()) + 100, seed=options.seed)
    records = distinct(records, key=task.input_of, taken=set())
    found: dict[str, list[Record]] = {}
    for split in CHOOSING:
        found[split], records = records[: counts[split]], records[counts[split] :]
    return found, f"generated ({reason})"
