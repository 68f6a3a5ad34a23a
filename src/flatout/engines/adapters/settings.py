"""The settings of a run of adapters: one table with a table per task and per phase.

    model: ./all-MiniLM-L6-v2
    out: runs/five
    tasks:
      sentiment: {data: {path: reviews.jsonl}, rank: 16}
      qa: {rank: 24, lr: 3e-4}
    phase1: {steps: 800, tokens: 2048}

A given value replaces the default.  A phase that resumes may change only settings that do not affect what it
has learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from flatout.engines.run import settings as run_settings
from flatout.ground.errors import BadInput

VERB = "adapt"
DEFAULT_RANK = 16
# Where a run writes and what it reports: the weights come out the same.
FREE_TO_CHANGE = {"model", "out", "device", "log_every", "checkpoint_every", "keep_checkpoints", "evaluation"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSettings:
    """One task and the adapter it trains; None takes the value of phase 1."""

    kind: str | None = None  # the task's name; None: the key in the table
    data: dict[str, Any] = field(default_factory=dict)  # where its records come from
    init: str | None = None  # a PEFT folder: training begins with its adapter
    rank: int | None = None  # None: 16, or the rank of `init`
    alpha: float | None = None  # None: twice the rank, or the alpha of `init`
    dropout: float = 0.1
    targets: tuple[str, ...] | None = None  # endings of names of linears; None: all, or `init`'s
    lr: float | None = None
    steps: int | None = None  # of its schedule, after which it leaves
    weight_decay: float | None = None
    clip: float | None = None
    patience: int | None = None
    tokens: int | None = None
    max_length: int | None = None
    select: Literal["metric", "loss"] | None = None  # decides which weights are the best
    settings: dict[str, Any] = field(default_factory=dict)  # of the task itself


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningSettings:
    """How weights learn."""

    lr: float = 5e-4
    weight_decay: float = 0.01
    warmup_share: float = 0.1
    clip: float = 1.0  # the norm of their gradients, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSettings(LearningSettings):
    """How a phase learns, and when it is finished."""

    patience: int | None = 5  # evaluations without improvement before an adapter is finished


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPhase(PhaseSettings):
    """A phase that trains adapters and heads on blocks of tokens."""

    steps: int = 1000  # of the optimizer
    tokens: int = 2048  # of one task's block
    accumulate: int = 1  # batches of one optimizer step, shared among the processes
    buckets: int = 4  # groups of similar length; a step takes one group of every task
    evaluate_every: int = 100
    validate_rows: int = 256  # per task


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseOne(AdapterPhase):
    """Adapters and heads, all tasks in one batch."""

    select: Literal["metric", "loss"] = "metric"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTwo(PhaseSettings):
    """The router, on features of the frozen encoder."""

    epochs: int = 10
    rows: int = 256
    equal: Literal["tasks", "rows"] = "tasks"  # count every task alike, however few its rows, or every row
    lr: float = 1e-3
    noise: Literal["softmax", "gumbel"] = "softmax"
    losses: dict[str, float] = field(default_factory=dict)  # weights by name; others keep their defaults


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseThree(AdapterPhase):
    """Both together: the loss of the tasks reaches the router through the mixture of adapters."""

    steps: int = 400
    tokens: int = 1024
    lr: float = 1e-4  # of the router
    adapter_lr_share: float = 0.1  # of lr, for adapters and heads
    single_task_first: float = 0.8  # the share of batches with rows of one task, at the first step
    single_task_last: float = 0.2
    noise: Literal["softmax", "gumbel"] = "gumbel"
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """The router's shape, and how it decides at inference."""

    hidden: tuple[int, ...] = (512, 256)
    dropout: float = 0.1
    temperature: float = 1.0
    threshold: float = 0.0  # of confidence, below which `fallback` decides
    top_k: int = 1
    fallback: Literal["best", "uniform"] = "best"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSettings:
    """The decoder that generation tasks share."""

    layers: int = 2
    heads: int | None = None  # None: what the width asks for
    dropout: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """What is measured at the end."""

    rows: int | None = 500  # per task; None: the whole test split
    tokens: int = 8192  # of one batch


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptSettings:
    """What `flatout adapt` runs."""

    model: str  # a folder with a Hugging Face encoder and its tokenizer
    tasks: dict[str, TaskSettings]
    tasks_folder: str | None = None  # tasks of your own, one file each
    out: str | None = None  # None: a free name in .flatout/runs
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_length: int = 128
    heads_only: bool = False  # no adapters: the frozen encoder under trained heads, for comparison
    graphs: bool | None = None  # CUDA graphs; None: where they pay
    log_every: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    decoder: DecoderSettings = field(default_factory=DecoderSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    phase1: PhaseOne = field(default_factory=PhaseOne)
    phase2: PhaseTwo = field(default_factory=PhaseTwo)
    phase3: PhaseThree = field(default_factory=PhaseThree)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)

    def __post_init__(self) -> None:
        """Check every range, and name all that are wrong."""
        wrong = [] if self.tasks else ["tasks is empty"]
        wrong += [
            f"tasks.{name}.steps={task.steps} is above phase1.steps={self.phase1.steps}"
            for name, task in self.tasks.items()
            if task.steps is not None and task.steps > self.phase1.steps
        ]
        wrong += run_settings.out_of_range(
            self, at_least=AT_LEAST, above_zero=ABOVE_ZERO, shares=SHARES, skip=("data", "losses", "settings")
        )
        dropouts = {f"tasks.{name}": task.dropout for name, task in self.tasks.items()}
        dropouts |= {"decoder": self.decoder.dropout, "router": self.router.dropout}
        wrong += [f"{place}.dropout=1.0 drops everything" for place, share in dropouts.items() if share == 1]
        if wrong:
            raise BadInput("; ".join(wrong), hint="docs/adapters.md says what each means")

    @property
    def graph_choice(self) -> Literal["auto", "on", "off"]:
        return "auto" if self.graphs is None else "on" if self.graphs else "off"

    @property
    def folder(self) -> Path:
        """The run folder, once it is chosen."""
        assert self.out is not None, "a run chooses its folder before anything else"
        return Path(self.out)


AT_LEAST = {
    **dict.fromkeys(("rank", "steps", "epochs", "tokens", "rows", "accumulate", "buckets", "patience"), 1),
    **dict.fromkeys(("evaluate_every", "validate_rows", "log_every", "checkpoint_every"), 1),
    **dict.fromkeys(("keep_checkpoints", "layers", "top_k"), 1),
    "max_length": 8,
    "seed": 0,
    "weight_decay": 0.0,
}
ABOVE_ZERO = {"lr", "clip", "alpha", "temperature", "adapter_lr_share"}
SHARES = {"warmup_share", "dropout", "threshold", "single_task_first", "single_task_last"}


def read_settings(path: Path) -> dict[str, Any]:
    """Read the keys of a YAML file, or the settings of the run in a folder."""
    return run_settings.read_settings(path, AdaptSettings, verb=VERB)


def make_settings(given: Mapping[str, Any]) -> AdaptSettings:
    """Make settings from the given keys; a missing key has its default."""
    known = {name: value for name, value in given.items() if value is not None}
    if not known.get("tasks"):
        raise BadInput("no tasks are given", hint="tasks: {sentiment: {}, qa: {}} in the settings file")
    if isinstance(known["tasks"], Mapping):
        known["tasks"] = {name: _with_rank(table or {}) for name, table in known["tasks"].items()}
    return run_settings.make_settings(AdaptSettings, known, verb=VERB, needed=("model",))


def _with_rank(task: Any) -> Any:
    """Give a task's table a rank, unless an adapter brings its own."""
    if not isinstance(task, Mapping) or task.get("init") or task.get("rank") is not None:
        return task
    return {**task, "rank": DEFAULT_RANK}


def check_resume(saved: Mapping[str, Any], settings: AdaptSettings, *, phase: str | None) -> None:
    """Raise BadInput if a setting that affects what was learned differs from the saved one.

    Tables of phases other than `phase` may differ.
    """
    others = {each.name for each in fields(AdaptSettings) if each.name.startswith("phase")} - {phase}
    run_settings.check_resume(saved, settings, free=FREE_TO_CHANGE | others)
