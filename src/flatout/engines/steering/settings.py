"""The settings of a search: one flat table, from a YAML file, from flags, or from the folder of a run.

A search writes its settings into its folder, so that its workers, a second call that goes on, and a worker on
another machine all run the same search.  What decides which trial means what cannot change in between; what
only says where and how long may.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatout.engines.run import settings as run_settings
from flatout.engines.run.models import DTypeOrAuto
from flatout.engines.steering.extract.positions import read_position
from flatout.ground.errors import BadInput
from flatout.ground.runs import home_folder
from flatout.ground.units import read_bytes

Turn = Literal["project-out", "clamp", "norm-preserving"]  # what depends on the hidden state
Mode = Literal["add"] | Turn
Where = Literal["last-and-generated", "all", "generated"]  # the tokens that are steered

VERB = "steer search"
METHODS = ("mean-difference", "pca", "logistic", "lda", "random")  # those of `vectors.methods`, without torch
# They say where a search runs, how long it lasts and what it tells: no trial means anything else.
FREE_TO_CHANGE = {
    *("model", "questions", "out", "vectors", "trials", "rows", "workers", "ray", "storage", "study"),
    *("store", "store_limit", "tiers", "device", "neutral", "examples"),
    "max_new_tokens",  # a study whose texts are judged is bound to it
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """What `flatout steer search` runs."""

    model: str  # a folder with a Hugging Face causal language model and its tokenizer
    questions: str  # a .jsonl or .csv file
    out: str | None = None  # the run folder; None: a new one in .flatout/runs
    vectors: str | None = None  # a folder that `flatout steer fit` wrote; None: fitted here
    methods: tuple[str, ...] = ("mean-difference", "pca", "logistic")
    layers: str = "all"  # "all", "4-20" or "3,5,9"
    position: str = "last"  # the token that stands for a text: last, mean, an index, or a span 3:8
    shares: tuple[float, ...] = (0.5, 0.25, 0.25)  # of the questions: to fit, to search, to test
    strength: tuple[float, ...] = (0.0, 0.5)  # lowest and highest, in mean residual norms of the layer
    where: tuple[Where, ...] = ("last-and-generated",)
    # Vectors are added, taken out, or set to a given component, or states turned at their own length.
    modes: tuple[Mode, ...] = ("add",)
    spans: tuple[int, ...] = (1,)  # numbers of layers that a trial steers at once
    sampler: Literal["tpe", "random", "grid", "cmaes"] = "tpe"  # that proposes trials
    toward: Literal["positive", "negative"] = "positive"  # the answer that is to become likelier
    score: Literal["whole", "decisive", "first-token"] = "whole"  # the tokens of the answers that count
    judge: str | None = None  # package.module:function that judges generated texts instead; larger is better
    trials: int = 100
    rungs: int = 4  # of successive halving; 1 never prunes
    rows: int | None = None  # (trial, question) rows of a batch; None: what the device takes
    seed: int = 0
    neutral: str | None = None  # a file of neutral texts, one per line; None: a few of our own
    examples: int = 4  # prompts that are continued with and without the winner, for the report
    max_new_tokens: int = 48
    store: str | None = None  # a folder for activations; None: in the run's own
    store_limit: str | None = None  # of that folder, such as 20GB: the shards unused for longest go first
    tiers: tuple[str, ...] = ()  # memory above the store, fastest first: cuda:0=2GiB, cpu=8GiB
    storage: str | None = None  # of the study; None: a journal file in the run's folder
    study: str | None = None  # its name; None: the folder's
    workers: int | None = None  # None: one for each GPU
    ray: str | None = None  # a cluster's address: its nodes run the workers
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: DTypeOrAuto = "auto"

    def __post_init__(self) -> None:
        """Check every range, and name all that are wrong."""
        wrong = run_settings.out_of_range(
            self,
            at_least={
                **dict.fromkeys(("trials", "rungs", "rows", "max_new_tokens", "workers"), 1),
                **dict.fromkeys(("seed", "examples"), 0),
            },
        )
        if len(self.shares) != 3 or min(self.shares) <= 0 or abs(sum(self.shares) - 1) > 1e-6:
            wrong.append(f"shares={list(self.shares)} are not three numbers above 0 that sum to 1")
        if len(self.strength) != 2 or not -math.inf < self.strength[0] < self.strength[1] < math.inf:
            wrong.append(f"strength={list(self.strength)} is not a lowest and a highest number")
        wrong += [
            f"{name} is empty" for name in ("methods", "where", "modes", "spans") if not getattr(self, name)
        ]
        if any(span < 1 for span in self.spans):
            wrong.append(f"spans={list(self.spans)} has a number below 1")
        if self.judge is not None and (self.toward, self.score) != ("positive", "whole"):
            wrong.append("toward and score compare answers, and a judge takes their place: larger is better")
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown and self.vectors is None:  # a folder may have vectors that were imported
            wrong.append(f"there is no method {unknown[0]!r}, only {', '.join(METHODS)}")
        if self.store_limit is not None and read_bytes(self.store_limit) is None:
            wrong.append(f"store_limit={self.store_limit!r} is not a size such as 20GB")
        wrong += [
            f"tier {one!r} is not DEVICE=SIZE, such as cpu=8GiB" for one in self.tiers if not read_tier(one)
        ]
        if wrong:
            raise BadInput("; ".join(wrong), hint="flatout steer search --help says what each means")
        read_position(self.position)
        read_layers(self.layers)

    @property
    def folder(self) -> Path:
        """The run folder."""
        if self.out is None:
            raise BadInput("no run folder is given", hint="name it with --out")
        return Path(self.out)

    @property
    def score_name(self) -> str:
        """What a score is, in the words of a report."""
        if self.judge is not None:
            return f"score of {self.judge}"
        which = {"whole": "", "decisive": " up to the common ending", "first-token": ", by its first token"}
        return f"probability of the {self.toward} answer{which[self.score]}"

    @property
    def study_name(self) -> str:
        return self.study or self.folder.resolve().name

    @property
    def store_folder(self) -> Path:
        if self.store is not None:
            return Path(self.store)
        return (home_folder() if self.out is None else self.folder) / "activations"

    @property
    def vectors_folder(self) -> Path:
        return Path(self.vectors) if self.vectors is not None else self.folder / "vectors"


def read_layers(text: str) -> list[int] | Literal["all"]:
    """Read the layers that "all", "4-20" or "3,5,8-10" names."""
    if text == "all":
        return "all"
    chosen: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
            raise BadInput(f"layers {text!r} cannot be read at {part!r}", hint="write all, 4-20 or 3,5,8-10")
        chosen += range(int(found[1]), int(found[2] or found[1]) + 1)
    return sorted(set(chosen))


def read_range(text: str) -> list[float]:
    """Read the two numbers of "0:0.5"."""
    low, colon, high = text.partition(":")
    try:
        if colon:
            return [float(low), float(high)]
    except ValueError:
        pass
    raise BadInput(f"strength {text!r} is not a range", hint="write LOW:HIGH, for example -0.5:0.5")


def read_tier(text: str) -> tuple[str, int] | None:
    """Read the device and the bytes of "cpu=8GiB"; None if it is not a tier."""
    device, _, size = text.partition("=")
    num_bytes = read_bytes(size)
    known = re.fullmatch(r"cpu|cuda(:\d+)?", device.strip())
    return None if known is None or num_bytes is None else (device.strip(), num_bytes)


def read_settings(path: Path) -> dict[str, Any]:
    """Read the keys of a YAML file, or of the settings in a run folder."""
    return run_settings.read_settings(path, SearchSettings, verb=VERB)


def make_settings(given: Mapping[str, Any]) -> SearchSettings:
    """Make settings of the keys that are given; a missing one has its default."""
    plain = dict(given)
    for name in ("layers", "position"):  # YAML reads `position: -2` as a number
        if isinstance(plain.get(name), int):
            plain[name] = str(plain[name])
    if isinstance(plain.get("strength"), str):
        plain["strength"] = read_range(plain["strength"])
    return run_settings.make_settings(SearchSettings, plain, verb=VERB, needed=("model", "questions"))


def resume_settings(given: Mapping[str, Any]) -> SearchSettings:
    """Make the settings of a new search, or read those in its run folder."""
    folder = given.get("out")
    if folder is None or not (Path(folder) / run_settings.FILE).is_file():
        return make_settings(given)
    saved = read_settings(Path(folder))
    settings = make_settings({**saved, **given})
    run_settings.check_resume(saved, settings, free=FREE_TO_CHANGE)
    return settings
