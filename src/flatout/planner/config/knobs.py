"""Where the knobs of a plan live in a config.

Four styles of config are known.  They are tried in order, and which one was recognised is a Decision with its
reason.  Hugging Face and Lightning have fixed keys; in Hydra-style and plain configs a knob is found by its
last name, wherever it stands, if exactly one key bears it: Flatout asks about two candidates and never
guesses, because the plan writes to that key.  A mapping file (`flatout-plan.toml`) and `--knob NAME=KEY` go
before everything.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.planner.config.config_text import Value, nearest_hint, plain_value
from flatout.planner.config.job_config import JobConfig, Stage

MAPPING_FILE = "flatout-plan.toml"

# Last names of keys, the more telling first.
LAST_NAMES: dict[str, tuple[str, ...]] = {
    "batch_size": (
        "per_device_train_batch_size",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "micro_batch_size",
        "batch_size",
    ),
    "global_batch_size": ("global_batch_size", "global_train_batch_size"),  # of all steps and ranks together
    "eval_batch_size": ("per_device_eval_batch_size", "eval_batch_size", "val_batch_size", "test_batch_size"),
    "accumulation": (
        "accumulate_grad_batches",
        "gradient_accumulation_steps",
        "grad_accumulation_steps",
        "grad_accum_steps",
        "grad_accum",
        "gradient_accumulation",
        "accumulation_steps",
        "accumulate_steps",
        "accum_steps",
        "accum_iter",
        "accumulation",
    ),
    "precision": ("precision", "mixed_precision"),
    "bf16": ("bf16",),
    "fp16": ("fp16", "use_amp", "amp"),  # torch's autocast casts to float16 by default
    "tf32": ("tf32",),
    "checkpointing": (
        "gradient_checkpointing",
        "activation_checkpointing",
        "use_gradient_checkpointing",
        "checkpointing",
    ),
    "clip_norm": ("gradient_clip_val", "max_grad_norm", "clip_grad_norm", "grad_clip", "clip_norm"),
    "learning_rate": ("learning_rate", "lr"),
    "optimizer": ("optim", "optimizer"),
    "length": (
        "max_length",
        "max_seq_length",
        "sequence_length",
        "seq_length",
        "seq_len",
        "block_size",
        "length",
    ),
    "n_positives": ("n_positives", "num_positives"),
    "n_negatives": ("n_negatives", "num_negatives"),
}
PLANNED = frozenset(LAST_NAMES) - {"length", "n_positives", "n_negatives"}  # the others are sizes of a job
EVALUATION = frozenset(
    {"eval", "evaluation", "val", "valid", "validation", "test", "testing"}
    | {"predict", "prediction", "inference", "generation"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """A kind of config: its name, the fixed keys of its knobs, and the values assumed for absent ones."""

    name: str
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    assumed: Mapping[str, Value] = field(default_factory=dict)


HUGGING_FACE = Style(
    name="Hugging Face TrainingArguments",
    keys={
        "batch_size": ("per_device_train_batch_size",),
        "eval_batch_size": ("per_device_eval_batch_size",),
        "accumulation": ("gradient_accumulation_steps",),
        "checkpointing": ("gradient_checkpointing",),
        "clip_norm": ("max_grad_norm",),
        "learning_rate": ("learning_rate",),
        "optimizer": ("optim",),
    },
    assumed={"batch_size": 8, "eval_batch_size": 8, "accumulation": 1, "clip_norm": 1.0},
)
LIGHTNING = Style(
    name="Lightning CLI",
    keys={
        "batch_size": (
            "data.init_args.train_batch_size",
            "data.init_args.batch_size",
            "data.train_batch_size",
            "data.batch_size",
            "model.init_args.batch_size",
        ),
        "eval_batch_size": ("data.init_args.eval_batch_size", "data.init_args.val_batch_size"),
        "accumulation": ("trainer.accumulate_grad_batches",),
        "precision": ("trainer.precision",),
        "clip_norm": ("trainer.gradient_clip_val",),
        "learning_rate": (
            "optimizer.init_args.lr",
            "model.init_args.learning_rate",
            "model.init_args.lr",
        ),
    },
    assumed={"accumulation": 1},
)
HYDRA = Style(name="Hydra-style folder")
PLAIN = Style(name="plain config")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapped:
    """What a mapping file and the command line say: the model, the stages, the ranks, and where knobs are."""

    model: str | None = None
    stages: str | None = None
    ranks: int | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


def recognise_style(config: JobConfig) -> Decision[Style]:
    """Recognise the style of a config."""
    keys = set(config.stages[0].values)
    own = sorted(
        keys & {HUGGING_FACE.keys[knob][0] for knob in ("batch_size", "eval_batch_size", "accumulation")}
    )
    if own:
        return Decision(value=HUGGING_FACE, reason=f"it has {own[0]} at the top", source="computed")
    sections = {key.partition(".")[0] for key in keys if "." in key}
    signs = sorted(
        key
        for key in keys
        if key in ("model.class_path", "data.class_path", "seed_everything")
        or key.startswith("data.init_args.")
    )
    if "trainer" in sections and signs:
        return Decision(value=LIGHTNING, reason=f"it has a trainer section and {signs[0]}", source="computed")
    if config.hydra:
        return Decision(value=HYDRA, reason=f"{config.path.name} has a defaults list", source="computed")
    return Decision(
        value=PLAIN,
        reason="it has neither the keys of TrainingArguments or Lightning CLI nor a defaults list",
        source="assumed",
    )


def find_key(knob: str, stage: Stage, *, style: Style, mapped: Mapped) -> str | None:
    """Return the key of a knob in this stage; None if there is none, BadInput if there are two."""
    if knob in mapped.keys:
        key = mapped.keys[knob]
        if key not in stage.values:
            raise BadInput(
                f"{knob}={key}: the config has no such key", hint=nearest_hint(key, list(stage.values))
            )
        return key
    for key in style.keys.get(knob, ()):
        if key in stage.values:
            return key
    for name in LAST_NAMES.get(knob, (knob,)):
        keys = [key for key in stage.values if key.rpartition(".")[2] == name]
        if knob != "eval_batch_size":
            keys = [key for key in keys if not is_evaluation(key)]
        if len(keys) > 1:
            raise BadInput(
                f"{knob} could be {' or '.join(keys[:4])}", hint=f"say which: --knob {knob}={keys[0]}"
            )
        if keys:
            return keys[0]
    return _eval_section(stage) if knob == "eval_batch_size" else None


def section_of(knob: str, stage: Stage, *, style: Style) -> str | None:
    """Return the key of a section in the place of a batch size or accumulation (one value per epoch)."""
    if knob not in ("batch_size", "accumulation"):
        return None
    names = (*style.keys.get(knob, ()), *LAST_NAMES[knob])
    above = {key.rpartition(".")[0] for key in stage.values if "." in key}
    return next((key for name in names for key in sorted(above) if f".{key}".endswith(f".{name}")), None)


def is_evaluation(key: str) -> bool:
    """Return whether a word of the key says evaluation: `val_loader` does, `value_head` does not.

    `gradient_clip_val` is the name of a knob and does not count.
    """
    *sections, last = key.split(".")
    named = [*sections, "" if last in LAST_NAMES["clip_norm"] else last]
    words = re.split(r"[._-]", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", ".".join(named)).casefold())
    return not EVALUATION.isdisjoint(words)


def _eval_section(stage: Stage) -> str | None:
    """Find a batch size in a section of evaluation: `val_loader.batch_size`."""
    keys = [key for key in stage.values if key.endswith(".batch_size") and is_evaluation(key)]
    return keys[0] if len(keys) == 1 else None


def missing_knob(knob: str, stage: Stage, *, config: JobConfig, style: Style) -> BadInput:
    """Return the error for a knob that every plan needs."""
    looked = dict.fromkeys([*style.keys.get(knob, ()), *LAST_NAMES.get(knob, (knob,))])
    for key, found in stage.values.items():
        if found.value is None and key.rpartition(".")[2] in looked:
            return BadInput(
                f"{key} of {config.path.name} has no value",
                hint=f"write a number, or name another key with --knob {knob}=KEY",
            )
    nearest = nearest_hint(knob, list(stage.values))
    return BadInput(
        f"{config.path.name} has no {knob} (looked for {', '.join(looked)})",
        hint=f"{nearest}; name it with --knob {knob}=KEY",
    )


def read_mapping(path: Path) -> Mapped:
    """Read a mapping file."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(
            f"no mapping file at {path}", hint="write one, or name knobs with --knob KNOB=KEY"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    shapes: dict[str, type] = {"model": str, "stages": str, "ranks": int, "knobs": dict}
    errors = [
        f"{name} must be {shapes[name].__name__}" if name in shapes else f"{name} is not a known entry"
        for name, value in data.items()
        if name not in shapes or type(value) is not shapes[name]
    ]
    knobs: dict[str, Any] = data.get("knobs", {}) if isinstance(data.get("knobs", {}), dict) else {}
    errors += [
        f"knobs.{name} must be a dotted key" for name, key in knobs.items() if not isinstance(key, str)
    ]
    if errors:
        raise BadInput(f"{path}: {'; '.join(errors)}", hint=f"known are {', '.join(shapes)}")
    return Mapped(
        model=data.get("model"), stages=data.get("stages"), ranks=data.get("ranks"), keys=dict(knobs)
    )


def pairs(given: Iterable[str], *, flag: str) -> dict[str, str]:
    """Read `--knob a=b --knob c=d` as a dict."""
    found: dict[str, str] = {}
    for pair in given:
        name, sign, value = pair.partition("=")
        if not sign or not name.strip() or (flag == "--knob" and not value.strip()):
            example = "batch_size=data.batch_size" if flag == "--knob" else "model.lora.r=16"
            raise BadInput(f"{flag} {pair!r} is not NAME=VALUE", hint=f"write {flag} {example}")
        found[name.strip()] = value.strip()
    return found


def overrides_of(given: Iterable[str]) -> dict[str, Value]:
    """Read `--set model.lora.r=16`, with values as YAML reads them."""
    return {key: _unquote(value) for key, value in pairs(given, flag="--set").items()}


def _unquote(text: str) -> Value:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return plain_value(text)
