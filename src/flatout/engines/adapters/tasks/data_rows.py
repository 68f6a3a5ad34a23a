"""Rows of a task and their splits.

They are the user's files, real rows that a package carries, or generated rows where those are asked for.
Every row of a file is read and checked before anything is trained.  A hash of a row's input decides its
split: it is the same on every machine, and repeated inputs are always in one split.  The test split takes its
rows first and the training split last, so an input that is in several files is for the test only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from flatout.engines.run.row_files import TABLES
from flatout.engines.run.settings import check_keys
from flatout.ground.errors import BadInput, NotFetched

if TYPE_CHECKING:
    from flatout.engines.adapters.tasks.task import AdapterTask

Record = dict[str, Any]
FoundRows = dict[str, list[Record]]  # by split
RowSource = Literal["auto", "generated"]
Kept = TypeVar("Kept")
SPLITS = ("train", "validation", "test")
FILE_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
SUFFIXES = (".jsonl", *TABLES)
CHOOSING = ("test", "validation", "train")
VALIDATION_SHARE, TEST_SHARE = 0.1, 0.1
GENERATED = {"train": 2000, "validation": 200, "test": 200}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """Where the rows of a task come from, and how many of them.

    `path` is a JSONL or CSV file (divided into splits by the hash of each row's input), a folder with
    train.jsonl, validation.jsonl and test.jsonl (or .csv), or what else the task reads; `validation` and
    `test` name files of their own.  Without `path`, "auto" takes real rows that a package contains, and
    "generated" generates some.
    """

    path: Path | None = None
    validation: Path | None = None
    test: Path | None = None
    source: RowSource = "auto"
    num_train: int | None = None  # None: all there are
    num_validation: int | None = None
    num_test: int | None = None
    seed: int = 0  # of generated rows

    @classmethod
    def of(cls, given: Mapping[str, Any], *, task: str) -> DataOptions:
        """Read options from a settings file; BadInput names the wrong key or value."""
        check_keys(given, cls, verb="data", source=task)
        values: dict[str, Any] = dict(given)
        for name in ("path", "validation", "test"):
            if (path := values.get(name)) is not None:
                if not isinstance(path, (str, Path)):
                    raise BadInput(f"{task}: {name}={path!r} is not a path", hint="give a file or folder")
                values[name] = Path(path).expanduser()
        options = cls(**values)
        if options.source not in get_args(RowSource):
            raise BadInput(
                f"{task}: source={options.source!r}", hint=f"known: {', '.join(get_args(RowSource))}"
            )
        for name in ("num_train", "num_validation", "num_test"):
            count = getattr(options, name)
            if count is not None and (not isinstance(count, int) or count < 1):
                raise BadInput(f"{task}: {name}={count!r} is not a number of rows", hint="give 1 or more")
        if options.path is None and (options.validation or options.test):
            raise BadInput(f"{task}: validation and test need a path to train on", hint="give path, too")
        return options


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The rows of a task, no input in two splits, and one line that says where they come from."""

    train: list[Record]
    validation: list[Record]
    test: list[Record]
    origin: str


def gather(task: AdapterTask, options: DataOptions) -> Splits:
    """Collect the rows of a task, limited to the numbers asked for."""
    if options.path is not None:
        found, origin = _read_files(task, options), str(options.path)
    elif options.source == "generated":
        found, origin = _generate(task, options), "generated (as asked)"
    else:
        found, origin = _take_real(task)
    taken: set[str] = set()
    kept: FoundRows = {}
    for split in CHOOSING:
        records = drop_repeats(found[split], key=task.input_of, taken=taken)
        kept[split] = choose_some(records, getattr(options, f"num_{split}"), key=task.input_of)
        if not kept[split]:
            raise BadInput(
                f"{task.name}: no rows for {split} in {origin}", hint="give more rows, or a file for it"
            )
    return Splits(**kept, origin=origin)


def _read_files(task: AdapterTask, options: DataOptions) -> FoundRows:
    assert options.path is not None
    files = split_files(options.path) if options.path.is_dir() else {"train": options.path}
    own = {"validation": options.validation, "test": options.test}
    files |= {split: path for split, path in own.items() if path is not None}
    return _divide(task, {split: task.read(path) for split, path in files.items()})


def _take_real(task: AdapterTask) -> tuple[FoundRows, str]:
    """Take the rows that a package contains; rows are generated only on request."""
    hint = "set data: {path: FILE} for rows of your own, or data: {source: generated} to try generated rows"
    try:
        real = task.real()
    except NotFetched as error:
        raise BadInput(f"{task.name}: real rows cannot be fetched: {error.message}", hint=hint) from error
    if real is None:
        raise BadInput(f"{task.name}: no rows are given, and no package contains any", hint=hint)
    records, origin = real
    return _divide(task, {"train": records}), origin


def _divide(task: AdapterTask, found: FoundRows) -> FoundRows:
    """Take splits that are missing from the rows to train on."""
    missing = [split for split in CHOOSING if split not in found]
    divided: FoundRows = {split: [] for split in (*missing, "train")}
    for record in found["train"]:
        split = split_of(task.group_of(record))
        divided[split if split in missing else "train"].append(record)
    return {**found, **divided}


def _generate(task: AdapterTask, options: DataOptions) -> FoundRows:
    counts = {split: getattr(options, f"num_{split}") or number for split, number in GENERATED.items()}
    # A small world repeats itself, and repeated rows are left out: make a few more than are asked for.
    records = task.generated(2 * sum(counts.values()) + 100, seed=options.seed)
    records = drop_repeats(records, key=task.input_of, taken=set())
    found: FoundRows = {}
    for split in CHOOSING:
        found[split], records = records[: counts[split]], records[counts[split] :]
    return found


def text_field(row: Mapping[str, Any], *names: str) -> str:
    """Return the first of the named fields that a row has; a list of texts is joined."""
    for name in names:
        value = row.get(name)
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = " ".join(value)
        if isinstance(value, str) and value.strip():
            return value
    given = next((name for name in names if name in row), None)
    what = f"is {row[given]!r}, not a text" if given else "is missing"
    raise BadInput(f"{given or names[0]!r} {what}", hint=f"a line has: {' or '.join(names)}")


def split_files(folder: Path) -> dict[str, Path]:
    """Find the file of each split in a folder."""
    found = {}
    for split, names in FILE_NAMES.items():
        paths = [folder / f"{name}{suffix}" for name in names for suffix in SUFFIXES]
        if present := [path for path in paths if path.is_file()]:
            found[split] = present[0]
    if "train" not in found:
        raise BadInput(
            f"{folder} holds no train.jsonl", hint="name the file to train on train.jsonl, or train.csv"
        )
    return found


def share_of(key: str) -> float:
    """Return a number from 0 to 1 that depends on the words of `key` only."""
    digest = hashlib.blake2b(" ".join(key.split()).lower().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def split_of(key: str) -> str:
    share = share_of(key)
    if share < TEST_SHARE:
        return "test"
    return "validation" if share < TEST_SHARE + VALIDATION_SHARE else "train"


def drop_repeats(records: Sequence[Kept], *, key: Callable[[Kept], str], taken: set[str]) -> list[Kept]:
    """Keep the first record of every key that is not yet taken; add the keys to `taken`."""
    kept = []
    for record in records:
        name = " ".join(key(record).split()).lower()
        if name not in taken:
            taken.add(name)
            kept.append(record)
    return kept


def choose_some(records: list[Kept], count: int | None, *, key: Callable[[Kept], str]) -> list[Kept]:
    """Choose `count` of the records by their hash, in their order; all of them for None."""
    if count is None or count >= len(records):
        return records
    by_hash = sorted(range(len(records)), key=lambda place: share_of(f"some {key(records[place])}"))
    return [records[place] for place in sorted(by_hash[:count])]
