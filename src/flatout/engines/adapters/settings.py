"""The settings of a run of adapters: one table with a table per task and per phase.

    model: ./all-MiniLM-L6-v2
    out: runs/five
    tasks:
      sentiment: {data: {path: reviews.jsonl}, rank: 16}
      qa: {rank: 24, lr: 3e-4}
    phase1: {steps: 800, tokens: 2048}

Every key is a field here.  What is given replaces the default; a key that is no field is refused, with the
nearest field's name.  Of a phase that goes on, only settings that change nothing of what is learned may
change.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from flatout.codec import WrongShape, decode, encode
from flatout.engines.run.settings import check_names, read_settings
from flatout.errors import BadInput

VERB = "adapt"
# They say where a run happens and what it tells: the same weights come out.
FREE_TO_CHANGE = {"model", "out", "device", "log_every", "checkpoint_every", "keep_checkpoints", "evaluation"}


Equal = Literal["tasks", "rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """One task and the adapter it trains; None takes what phase 1 says."""

    kind: str | None = None  # the task's file; None: the name in the table is one
    data: dict[str, Any] = field(default_factory=dict)  # where its records come from
    rank: int = 16
    alpha: float | None = None  # None: twice the rank
    dropout: float = 0.1
    targets: tuple[str, ...] | None = None  # patterns of names of linears; None: every one of the layers
    lr: float | None = None
    steps: int | None = None  # after which its schedule is at its end, and it leaves
    weight_decay: float | None = None
    clip: float | None = None
    patience: int | None = None
    tokens: int | None = None
    max_length: int | None = None
    select: Literal["metric", "loss"] | None = None  # what says which weights are the best
    settings: dict[str, Any] = field(default_factory=dict)  # of the task itself


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseOne:
    """Adapters and heads, all tasks in one batch."""

    steps: int = 1000  # of the optimizer
    tokens: int = 2048  # of one task's block
    accumulate: int = 1  # batches of one optimizer step, shared out among the processes
    buckets: int = 4  # groups of similar length; a step takes one group of every task
    lr: float = 5e-4
    weight_decay: float = 0.01
    warmup_share: float = 0.1
    clip: float = 1.0
    patience: int | None = 5  # evaluations without a better one, after which an adapter is finished
    evaluate_every: int = 100
    validate_rows: int = 256  # per task
    select: Literal["metric", "loss"] = "metric"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTwo:
    """The router, on features of the frozen encoder."""

    epochs: int = 10
    rows: int = 256
    equal: Equal = "tasks"  # what counts alike: every task, however few its rows, or every row
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup_share: float = 0.1
    clip: float = 1.0
    patience: int | None = 5
    noise: Literal["softmax", "gumbel"] = "softmax"
    losses: dict[str, float] = field(default_factory=dict)  # weights by name; the others keep theirs


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseThree:
    """Both together: the loss of the tasks reaches the router through the mixture of adapters."""

    steps: int = 400
    tokens: int = 1024  # of one task's block
    accumulate: int = 1
    buckets: int = 4
    lr: float = 1e-4  # of the router
    adapter_lr_share: float = 0.1  # of that, for adapters and heads
    weight_decay: float = 0.01
    warmup_share: float = 0.1
    clip: float = 1.0
    patience: int | None = 5
    evaluate_every: int = 100
    validate_rows: int = 256
    single_task_first: float = 0.8  # the share of batches with rows of one task, at the first step
    single_task_last: float = 0.2
    noise: Literal["softmax", "gumbel"] = "gumbel"
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """The router's shape, and how it decides at inference."""

    hidden: tuple[int, ...] = (512, 256)
    dropout: float = 0.1
    temperature: float = 1.0
    threshold: float = 0.0  # of confidence, below which `fallback` decides
    top_k: int = 1
    fallback: Literal["best", "uniform"] = "best"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The decoder that generation tasks share."""

    layers: int = 2
    heads: int | None = None  # None: what the width asks for
    dropout: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """What is measured at the end."""

    rows: int | None = 500  # per task; None: the whole test split
    tokens: int = 8192  # of one batch


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptConfig:
    """What `flatout adapt` runs."""

    model: str  # a folder with a Hugging Face encoder and its tokenizer
    tasks: dict[str, TaskConfig]
    tasks_folder: str | None = None  # tasks of your own, one file each
    out: str = "adapters"
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_length: int = 128
    heads_only: bool = False  # no adapters: the frozen encoder under trained heads, for comparison
    graphs: bool | None = None  # CUDA graphs; None: where they pay
    log_every: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    phase1: PhaseOne = field(default_factory=PhaseOne)
    phase2: PhaseTwo = field(default_factory=PhaseTwo)
    phase3: PhaseThree = field(default_factory=PhaseThree)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        """Check every range, and name all that are wrong."""
        wrong = [] if self.tasks else ["tasks is empty"]
        wrong += [
            f"tasks.{name}.steps={task.steps} is above phase1.steps={self.phase1.steps}"
            for name, task in self.tasks.items()
            if task.steps is not None and task.steps > self.phase1.steps
        ]
        for place, value in _numbers(self):
            name = place.rpartition(".")[2]
            wrong += [f"{place}={value} {complaint}" for complaint in _complaints(name, value)]
        if wrong:
            raise BadInput("; ".join(wrong), hint="docs/adapters.md says what each means")


AT_LEAST = {
    "rank": 1,
    "steps": 1,
    "epochs": 1,
    "tokens": 1,
    "rows": 1,
    "accumulate": 1,
    "buckets": 1,
    "patience": 1,
    "evaluate_every": 1,
    "validate_rows": 1,
    "log_every": 1,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "max_length": 8,
    "layers": 1,
    "top_k": 1,
    "seed": 0,
    "weight_decay": 0.0,
}
ABOVE_ZERO = {"lr", "clip", "alpha", "temperature", "adapter_lr_share"}
SHARES = {"warmup_share", "dropout", "threshold", "single_task_first", "single_task_last"}


def _complaints(name: str, value: float) -> list[str]:
    found = []
    if name in AT_LEAST and value < AT_LEAST[name]:
        found.append(f"is below {AT_LEAST[name]}")
    if name in ABOVE_ZERO and not value > 0:
        found.append("is not above 0")
    if name in SHARES and not 0 <= value <= 1:
        found.append("is not between 0 and 1")
    if name == "dropout" and value == 1:
        found.append("drops everything")
    return found


def _numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a config with its place, `tasks.qa.rank`; the tasks' own data is theirs to check."""
    if dataclasses.is_dataclass(value):
        for each in fields(value):
            if each.name not in ("data", "losses", "settings"):
                yield from _numbers(getattr(value, each.name), f"{place}.{each.name}" if place else each.name)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(item, f"{place}.{name}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield place, value


NAMES = tuple(each.name for each in fields(AdaptConfig))


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a YAML file."""
    found = read_settings(path, AdaptConfig, verb=VERB)
    _check_nested(AdaptConfig, found, source=str(path))
    return found


def make_config(given: Mapping[str, Any]) -> AdaptConfig:
    """A config from the keys that were given; what is missing has its default."""
    _check_nested(AdaptConfig, given, source="the config")
    if given.get("model") is None:
        raise BadInput("no model is given", hint="name it with --model, or in the config file")
    if not given.get("tasks"):
        raise BadInput("no tasks are given", hint="tasks: {sentiment: {}, qa: {}} in the config file")
    plain = {key: value for key, value in encode(dict(given)).items() if value is not None}
    plain["tasks"] = {name: value or {} for name, value in plain["tasks"].items()}
    try:
        return decode(AdaptConfig, plain, path="config")
    except WrongShape as error:
        raise BadInput(str(error), hint="docs/adapters.md says what each setting is") from error


def with_setting(given: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`given` with one more setting; `key` may name one of a nested table: phase1.steps."""
    first, dot, rest = key.partition(".")
    if not dot:
        return {**given, first: value}
    inner = given.get(first) or {}
    if not isinstance(inner, dict):
        raise BadInput(f"{first!r} is no table, so {key!r} cannot be set", hint=f"set {first} itself")
    return {**given, first: with_setting(inner, rest, value)}


def check_unchanged(saved: Mapping[str, Any], config: AdaptConfig, *, phase: str | None) -> None:
    """BadInput where a setting differs from the saved one on which what was learned rests.

    Sections of phases other than `phase` are their own business.
    """
    later = {each.name for each in fields(AdaptConfig) if each.name.startswith("phase")} - {phase}
    given = encode(config)
    for key in NAMES:
        if key in FREE_TO_CHANGE | later:
            continue
        if place := _first_difference(saved.get(key), given[key], key):
            name, before, after = place
            raise BadInput(
                f"the run has {name}={before!r}, and {after!r} is given",
                hint="set it back to resume, or start a run in another --out",
            )


def _first_difference(before: Any, after: Any, place: str) -> tuple[str, Any, Any] | None:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if found := _first_difference(before.get(key), after.get(key), f"{place}.{key}"):
                return found
        return None
    return None if before == after else (place, before, after)


def _check_nested(shape: Any, given: Any, *, source: str, place: str = "") -> None:
    """`check_names` in every table; a value of the wrong type is found when it is decoded."""
    if not isinstance(given, Mapping):
        return
    check_names(
        given,
        names=[each.name for each in fields(shape)],
        verb=f"{VERB}'s {place}" if place else VERB,
        source=source,
    )
    for name, hint in typing.get_type_hints(shape).items():
        if name not in given:
            continue
        if dataclasses.is_dataclass(hint):
            _check_nested(hint, given[name], source=source, place=name)
        elif name == "tasks" and isinstance(given[name], Mapping):
            for task, options in given[name].items():
                _check_nested(TaskConfig, options, source=source, place=f"tasks.{task}")
