"""The settings of a search: one flat table, from a YAML file, from flags, or from the folder of a run.

A search writes its settings into its folder, so that its workers, a second call that goes on, and a worker on
another machine all run the same search.  What decides which trial means what cannot change in between; what
only says where and how long may.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from flatout.atomic_files import write_whole
from flatout.codec import WrongShape, decode, encode
from flatout.engines.run.settings import check_names, read_settings
from flatout.errors import BadInput

FILE = "settings.json"
# They say where a search runs, how long it lasts and what it tells: no trial means anything else.
FREE_TO_CHANGE = {
    "model",
    "questions",
    "out",
    "vectors",
    "trials",
    "rows",
    "workers",
    "ray",
    "storage",
    "study",
    "store",
    "device",
    "neutral",
    "examples",
    "max_new_tokens",
}
NEEDED = ("model", "questions")
POSITION = re.compile(r"last|mean|-?\d+(:-?\d+)?")  # what `positions.position_of` reads, without torch


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """What `flatout steer search` runs."""

    model: str  # a folder with a Hugging Face causal language model and its tokenizer
    questions: str  # a .jsonl file
    out: str = "steering"
    vectors: str | None = None  # a folder that `flatout steer fit` wrote; None: fitted here
    methods: tuple[str, ...] = ("mean-difference", "pca", "logistic")
    layers: str = "all"  # "all", "4-20" or "3,5,9"
    position: str = "last"  # the token that stands for a text: last, mean, an index, or a span 3:8
    shares: tuple[float, ...] = (0.5, 0.25, 0.25)  # of the questions: to fit, to search, to test
    strength: tuple[float, ...] = (0.0, 0.5)  # lowest and highest, in mean residual norms of the layer
    where: tuple[Literal["last-and-generated", "all", "generated"], ...] = ("last-and-generated",)
    toward: Literal["positive", "negative"] = "positive"  # the answer that is to become likelier
    trials: int = 100
    rungs: int = 4  # of successive halving; 1 never prunes
    rows: int | None = None  # (trial, question) rows of a batch; None: what the device takes
    seed: int = 0
    neutral: str | None = None  # a file of neutral texts, one per line; None: a few of our own
    examples: int = 4  # prompts that are continued with and without the winner, for the report
    max_new_tokens: int = 48
    store: str | None = None  # a folder for activations; None: in the run's own
    storage: str | None = None  # of the study; None: a journal file in the run's folder
    study: str | None = None  # its name; None: the folder's
    workers: int | None = None  # None: one for each GPU
    ray: str | None = None  # a cluster's address: its nodes run the workers
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self) -> None:
        """Check every range, and name all that are wrong."""
        least = {
            "trials": 1,
            "rungs": 1,
            "rows": 1,
            "seed": 0,
            "examples": 0,
            "max_new_tokens": 1,
            "workers": 1,
        }
        wrong = [
            f"{name}={getattr(self, name)} is below {low}"
            for name, low in least.items()
            if getattr(self, name) is not None and getattr(self, name) < low
        ]
        if len(self.shares) != 3 or min(self.shares) <= 0 or abs(sum(self.shares) - 1) > 1e-6:
            wrong.append(f"shares={list(self.shares)} are not three numbers above 0 that sum to 1")
        if len(self.strength) != 2 or not -math.inf < self.strength[0] < self.strength[1] < math.inf:
            wrong.append(f"strength={list(self.strength)} is no lowest and highest number")
        if not self.methods or not self.where:
            wrong.append("methods or where is empty")
        if POSITION.fullmatch(self.position) is None:
            wrong.append(f"position={self.position!r} is none of last, mean, -2 or 3:8")
        if wrong:
            raise BadInput("; ".join(wrong), hint="flatout steer search --help says what each means")
        chosen_layers(self.layers)

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @property
    def study_name(self) -> str:
        return self.study or self.folder.resolve().name

    @property
    def store_folder(self) -> Path:
        return Path(self.store) if self.store is not None else self.folder / "activations"

    @property
    def vectors_folder(self) -> Path:
        return Path(self.vectors) if self.vectors is not None else self.folder / "vectors"


NAMES = tuple(each.name for each in fields(SearchSettings))


def chosen_layers(text: str) -> list[int] | Literal["all"]:
    """The layers that "all", "4-20" or "3,5,8-10" names."""
    if text == "all":
        return "all"
    chosen: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
            raise BadInput(f"layers {text!r} cannot be read at {part!r}", hint="write all, 4-20 or 3,5,8-10")
        chosen += range(int(found[1]), int(found[2] or found[1]) + 1)
    return sorted(set(chosen))


def number_range(text: str) -> list[float]:
    """The two numbers of "0:0.5"."""
    low, colon, high = text.partition(":")
    try:
        if colon:
            return [float(low), float(high)]
    except ValueError:
        pass
    raise BadInput(f"strength {text!r} is no range", hint="write LOW:HIGH, for example -0.5:0.5")


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a YAML file, or of a run's own settings."""
    return read_settings(path / FILE if path.is_dir() else path, SearchSettings, verb="steer search")


def make_settings(given: Mapping[str, Any]) -> SearchSettings:
    """Settings from the keys that were given; what is missing has its default."""
    check_names(given, names=NAMES, verb="steer search", source="the config")
    for needed in NEEDED:
        if given.get(needed) is None:
            raise BadInput(f"no {needed} is given", hint=f"name it with --{needed}, or in the config file")
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    if isinstance(plain.get("layers"), int):
        plain["layers"] = str(plain["layers"])
    if isinstance(plain.get("position"), int):
        plain["position"] = str(plain["position"])
    try:
        return decode(SearchSettings, plain, path="config")
    except WrongShape as error:
        raise BadInput(str(error)) from error


def settled(given: Mapping[str, Any]) -> SearchSettings:
    """The settings of a search that begins, or of the one that its folder already holds."""
    folder = Path(str(given.get("out", SearchSettings.__dataclass_fields__["out"].default)))
    if not (folder / FILE).is_file():
        return make_settings(given)
    saved = read_file(folder / FILE)
    kept, merged = make_settings(saved), make_settings({**saved, **given})
    for key in given:
        if key not in FREE_TO_CHANGE and getattr(merged, key) != getattr(kept, key):
            raise BadInput(
                f"the search in {folder} has {key}={getattr(kept, key)!r}, and "
                f"{getattr(merged, key)!r} is given",
                hint="leave it away to go on with it, or take another --out",
            )
    return merged


def save_settings(settings: SearchSettings) -> Path:
    """Write the settings into the run's folder; workers read them there."""
    path = settings.folder / FILE
    write_whole(path, (json.dumps(encode(settings), indent=2) + "\n").encode())
    return path
