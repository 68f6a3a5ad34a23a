"""The settings of `flatout evolve`: one flat table, and default step sizes.

Noise acts on a layer's output in proportion to the spread of its weights: sigma is a share of their root mean
square.  At a twentieth of it or less, the model still answers; at far less, the rewards of two members
hardly differ.  The update is a mean over members of unit noise, so its length falls with the population while
its direction gets better: lr is a multiple of sigma.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.engines.run import settings as run_settings
from flatout.engines.run.settings import check_resume, out_of_range
from flatout.ground.codec import encode
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from flatout.multiplex.models.decoder import Decoder

VERB = "evolve"
# Where a run writes, how long it lasts and what it reports: the weights of an epoch come out the same.
FREE_TO_CHANGE = {
    *("model", "out", "epochs", "device", "checkpoint_every", "keep_checkpoints", "evaluate_every"),
    *("evaluate_prompts", "plain_every", "cosine_every", "reward_workers", "save_model", "samples"),
}
# The settings of the algorithm itself; the others belong to the run.
OF_EGGROLL = (
    *("population", "sigma", "lr", "rank", "targets", "antithetic", "noise", "noise_reuse", "optimizer"),
    *("weight_decay", "shaping", "arithmetic", "masters", "seed"),
)
AT_LEAST_ONE = (
    *("epochs", "prompts", "max_new_tokens", "evaluate_every", "evaluate_prompts", "checkpoint_every"),
    *("keep_checkpoints", "plain_every", "cosine_every", "reward_workers", "schedule_epochs"),
)
# SmolLM2-135M, 512 members: 0.006 and 0.05 took sums of two-digit numbers from 2 % to 73 % in 100 epochs.
SHARE_OF_WEIGHTS = 0.03
LR_PER_SIGMA = 8.0
INTEGER_LR = 0.001  # of int8 arithmetic: the share of weights that would move by chance


ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvolveSettings:
    """What `flatout evolve` runs."""

    model: str  # a folder with a Hugging Face causal language model and its tokenizer
    task: str
    task_options: dict[str, Any] = field(default_factory=dict)
    out: str | None = None  # the run folder; None: a free one in .flatout/runs
    epochs: int = 100
    population: int = 64
    prompts: int = 16  # per epoch; every member answers each of them
    max_new_tokens: int | None = None  # None: what the task says
    rank: int = 1
    sigma: float | None = None  # None: from the spread of the weights
    lr: float | None = None
    sigma_schedule: ScheduleKind = "constant"
    sigma_end: float = 0.1  # what a linear or cosine schedule ends with, as a share of sigma
    lr_schedule: ScheduleKind = "constant"
    lr_end: float = 0.0
    schedule_epochs: int | None = None  # None: the epochs that the run begins with
    optimizer: Literal["sgd", "adamw"] = "sgd"
    weight_decay: float = 0.0
    shaping: Literal["centred", "z-score", "ranks", "sign"] = "centred"
    antithetic: bool = True
    noise: Literal["int8", "normal"] = "int8"
    noise_reuse: int = 1
    arithmetic: Literal["float", "int8"] = "float"
    targets: tuple[str, ...] | None = None  # patterns of names; None is every product of the blocks
    masters: Literal["auto", "device", "cpu"] = "auto"
    seed: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    chat: bool | None = None  # whether prompts go through the chat template; None: if there is one
    rows: int | None = None  # of a batch; None: what fits
    chunk_members: int | None = None  # members whose noise is in memory together; None: what fits
    mode: Literal["auto", "eager", "compiled", "graph", "fused"] = "auto"  # how a step of generation runs
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: what the device multiplies
    evaluate_every: int = 10
    evaluate_prompts: int = 128
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    samples: int = 4  # completions of held-out prompts that an evaluation writes down
    plain_every: int = 100  # epochs between two measurements of plain inference
    cosine_every: int = 10  # epochs between two comparisons with the update before: noise is drawn again
    reward_workers: int = 2
    reward_timeout_s: float = 10.0
    save_model: bool = True  # a folder that transformers loads, at the end

    def __post_init__(self) -> None:
        """Check every range, and name all that are wrong."""
        wrong = out_of_range(
            self,
            at_least={**dict.fromkeys(AT_LEAST_ONE, 1), "seed": 0, "population": 2, "samples": 0},
            above_zero=("sigma", "lr", "sigma_end", "reward_timeout_s"),
            shares=("sigma_end", "lr_end"),
            skip=("task_options",),
        )
        if self.antithetic and self.population % 2:
            wrong.append(f"population={self.population} is odd, and antithetic members come in pairs")
        if self.arithmetic == "int8" and self.sigma_schedule != "constant":
            wrong.append(f"sigma_schedule={self.sigma_schedule}, and int8 arithmetic has one sigma")
        if self.arithmetic == "int8" and (self.optimizer != "sgd" or self.weight_decay):
            wrong.append("int8 arithmetic moves weights by votes: optimizer and weight_decay are for float")
        if self.arithmetic == "int8" and self.shaping not in ("centred", "sign"):
            wrong.append(f"shaping={self.shaping}, and int8 arithmetic counts the sign of each pair")
        if wrong:
            raise BadInput("; ".join(wrong), hint="flatout evolve --help says what each means")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """How far members are from the weights, how far an update goes, and where both come from."""

    sigma: Decision[float]
    lr: Decision[float]


def read_settings(path: Path) -> dict[str, Any]:
    """Read the keys of a YAML file, or the settings of the run in a folder."""
    return run_settings.read_settings(path, EvolveSettings, verb=VERB)


def make_settings(given: Mapping[str, Any]) -> EvolveSettings:
    """Make settings from the given keys; a missing key has its default."""
    return run_settings.make_settings(EvolveSettings, given, verb=VERB, needed=("model", "task"))


def resume_settings(saved: Mapping[str, Any], given: Mapping[str, Any]) -> EvolveSettings:
    """Return the saved settings of a resumed run, with what may change taken from `given`."""
    merged = make_settings({**saved, **given})
    check_resume(encode(make_settings(saved)), merged, free=FREE_TO_CHANGE)
    return merged


def eggroll_options(settings: EvolveSettings) -> dict[str, Any]:
    """Return the keywords of `Eggroll` from settings whose step sizes are known."""
    return {name: getattr(settings, name) for name in OF_EGGROLL}


def choose_step_sizes(settings: EvolveSettings, decoder: Decoder) -> StepSizes:
    """Take the step sizes of the settings, or derive them from the weights."""
    return StepSizes(sigma=(sigma := _sigma(settings, decoder)), lr=_lr(settings, sigma.value))


def step_size_at(start: float, *, how: ScheduleKind, end: float, epoch: int, epochs: int) -> float:
    """Return a step size at an epoch, between `start` and the share `end` of it, where it stays.

    It depends on nothing else, so a resumed run has the step sizes of one that never stopped.
    """
    if how == "constant":
        return start
    done = min(epoch / epochs, 1.0)
    left = 1.0 - done if how == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return start * (end + (1.0 - end) * left)


def steps_at(settings: EvolveSettings, epoch: int) -> tuple[float, float]:
    """Return sigma and lr of an epoch, from settings whose step sizes are known."""
    assert settings.sigma is not None and settings.lr is not None
    epochs = settings.schedule_epochs or settings.epochs
    sigma, lr = settings.sigma_schedule, settings.lr_schedule
    return (
        step_size_at(settings.sigma, how=sigma, end=settings.sigma_end, epoch=epoch, epochs=epochs),
        step_size_at(settings.lr, how=lr, end=settings.lr_end, epoch=epoch, epochs=epochs),
    )


def _sigma(settings: EvolveSettings, decoder: Decoder) -> Decision[float]:
    if settings.sigma is not None:
        return Decision(value=settings.sigma, reason="as given", source="assumed")
    weights = [product.weight for product in decoder.projections().values()]
    squares = sum(float(weight.float().square().mean()) for weight in weights)
    spread = math.sqrt(squares / len(weights))
    reason = f"{SHARE_OF_WEIGHTS:.0%} of the weights' spread, {spread:.3g}"
    return Decision(value=float(f"{SHARE_OF_WEIGHTS * spread:.2g}"), reason=reason, source="computed")


def _lr(settings: EvolveSettings, sigma: float) -> Decision[float]:
    if settings.lr is not None:
        return Decision(value=settings.lr, reason="as given", source="assumed")
    if settings.arithmetic == "int8":
        reason = "int8: the share of weights that chance would move"
        return Decision(value=INTEGER_LR, reason=reason, source="assumed")
    value = float(f"{LR_PER_SIGMA * sigma:.2g}")
    return Decision(value=value, reason=f"{LR_PER_SIGMA:g} times sigma", source="assumed")
