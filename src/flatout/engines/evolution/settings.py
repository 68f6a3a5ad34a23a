"""The settings of a run: one flat table, from a YAML file, from flags, or from a checkpoint.

Every key is a field here.  What is given replaces the default; a key that is no field is refused, with the
nearest field's name.  A resumed run takes its settings from its checkpoint, and only those that change
nothing of what is learned may be given again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from flatout.codec import WrongShape, decode
from flatout.engines.run.settings import check_names, read_settings
from flatout.errors import BadInput

# They say where a run happens, how long it lasts and what it tells: the same weights come out at any epoch.
FREE_TO_CHANGE = {
    "model",
    "out",
    "epochs",
    "device",
    "checkpoint_every",
    "keep_checkpoints",
    "evaluate_every",
    "evaluate_prompts",
    "plain_every",
    "cosine_every",
    "reward_workers",
    "save_model",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvolveConfig:
    """What `flatout evolve` runs."""

    model: str  # a folder with a Hugging Face causal language model and its tokenizer
    task: str
    task_options: dict[str, Any] = field(default_factory=dict)
    out: str = "evolution"
    epochs: int = 100
    population: int = 64
    prompts: int = 16  # per epoch; every member answers each of them
    max_new_tokens: int | None = None  # None: what the task says
    rank: int = 1
    sigma: float | None = None  # None: from the spread of the weights, as `step_sizes` says
    lr: float | None = None
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    evaluate_every: int = 10
    evaluate_prompts: int = 128
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    plain_every: int = 100  # epochs between two measurements of plain inference
    cosine_every: int = 10  # epochs between two comparisons with the update before: noise is drawn again
    reward_workers: int = 2
    reward_timeout_s: float = 10.0
    save_model: bool = True  # a folder that transformers loads, at the end

    def __post_init__(self) -> None:
        """Check every range, and name all that are wrong."""
        least = {
            "epochs": 1,
            "prompts": 1,
            "max_new_tokens": 1,
            "evaluate_every": 1,
            "evaluate_prompts": 1,
            "checkpoint_every": 1,
            "keep_checkpoints": 1,
            "plain_every": 1,
            "cosine_every": 1,
            "reward_workers": 1,
            "seed": 0,
        }
        wrong = [
            f"{name}={getattr(self, name)} is below {low}"
            for name, low in least.items()
            if getattr(self, name) is not None and getattr(self, name) < low
        ]
        wrong += [
            f"{name}={getattr(self, name)} is not above 0"
            for name in ("sigma", "lr", "reward_timeout_s")
            if getattr(self, name) is not None and not getattr(self, name) > 0
        ]
        if self.antithetic and self.population % 2:
            wrong.append(f"population={self.population} is odd, and antithetic members come in pairs")
        if self.population < 2:
            wrong.append(f"population={self.population} is below 2")
        if wrong:
            raise BadInput("; ".join(wrong), hint="flatout evolve --help says what each means")


NAMES = tuple(each.name for each in fields(EvolveConfig))
# What the algorithm itself is set with; the rest is the run's.
OF_EGGROLL = (
    *("population", "sigma", "lr", "rank", "targets", "antithetic", "noise", "noise_reuse", "optimizer"),
    *("weight_decay", "shaping", "arithmetic", "masters", "seed"),
)


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a YAML file."""
    return read_settings(path, EvolveConfig, verb="evolve")


def make_config(given: Mapping[str, Any]) -> EvolveConfig:
    """A config from the keys that were given; what is missing has its default."""
    check_names(given, names=NAMES, verb="evolve", source="the config")
    for needed in ("model", "task"):
        if given.get(needed) is None:
            raise BadInput(f"no {needed} is given", hint=f"name it with --{needed}, or in the config file")
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    try:
        return decode(EvolveConfig, plain, path="config")
    except WrongShape as error:
        raise BadInput(str(error)) from error


def eggroll_options(config: EvolveConfig) -> dict[str, Any]:
    """The keywords of `Eggroll` in a config whose step sizes are known."""
    return {name: getattr(config, name) for name in OF_EGGROLL}


def resumed(saved: Mapping[str, Any], given: Mapping[str, Any]) -> EvolveConfig:
    """The config of a run that goes on: the saved one, with what may change taken from `given`."""
    check_names(given, names=NAMES, verb="evolve", source="the config")
    kept = make_config(saved)
    merged = make_config({**saved, **given})
    for key in given:
        if key not in FREE_TO_CHANGE and getattr(merged, key) != getattr(kept, key):
            raise BadInput(
                f"the run has {key}={getattr(kept, key)!r}, and {getattr(merged, key)!r} is given",
                hint="leave it away to resume, or start a run in another --out",
            )
    return merged
