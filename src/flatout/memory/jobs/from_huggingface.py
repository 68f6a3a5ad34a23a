"""A Hugging Face config folder as a job: `config.json` says the shapes, and no weights are read.

The head is taken from the config's `architectures`; the loss is the model's own.  The model is built in fp32
whatever dtype the weights were saved in: the recipe's precision decides how it is stepped.  Tokens are
random.  One row ends in padding, as in most real batches, so that attention masks are kept and counted;
batches of packed sequences without padding need less (`padded=False`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.ground.errors import BadInput, import_extra
from flatout.ground.user_code import calling
from flatout.memory.jobs.job import Job

if TYPE_CHECKING:
    from torch import Tensor, nn

LONGEST = 512
IMAGE_SIDE = 224
BATCH_SIZE = 8
IGNORED = -100  # a label that the losses of transformers leave out
MASKED_SHARE = 0.15
COUNTS_FROM_PADDING = ("roberta", "camembert", "mpnet", "roberta-xl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A kind of head: its auto class in transformers, and how names of its architectures end."""

    auto_class: str
    endings: tuple[str, ...]
    keeps_cache: bool = False  # its forward takes use_cache, which training does without


TASKS = {
    "causal-lm": Task(
        auto_class="AutoModelForCausalLM", endings=("ForCausalLM", "LMHeadModel"), keeps_cache=True
    ),
    "masked-lm": Task(auto_class="AutoModelForMaskedLM", endings=("ForMaskedLM",)),
    "seq2seq-lm": Task(
        auto_class="AutoModelForSeq2SeqLM", endings=("ForConditionalGeneration",), keeps_cache=True
    ),
    "sequence-classification": Task(
        auto_class="AutoModelForSequenceClassification", endings=("ForSequenceClassification",)
    ),
    "token-classification": Task(
        auto_class="AutoModelForTokenClassification", endings=("ForTokenClassification",)
    ),
    "question-answering": Task(auto_class="AutoModelForQuestionAnswering", endings=("ForQuestionAnswering",)),
    "image-classification": Task(
        auto_class="AutoModelForImageClassification", endings=("ForImageClassification",)
    ),
}


def is_config(name: str) -> bool:
    """Return whether a name is a folder with a config.json, or that file."""
    path = Path(name)
    return (path / "config.json").is_file() or (path.name == "config.json" and path.is_file())


def job_of_config(name: str, *, task: str | None = None, padded: bool = True) -> Job:
    """Return the job of a config folder; `task` names the head if its architectures do not."""
    folder = Path(name) if Path(name).is_dir() else Path(name).parent
    raw = _read(folder / "config.json")
    chosen = _task(raw, task=task, folder=folder)
    transformers = import_extra("transformers", extra="adapters")
    with calling(f"reading {folder / 'config.json'}"):
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    auto = getattr(transformers, TASKS[chosen].auto_class)
    if type(config) not in auto._model_mapping:
        raise BadInput(
            f"{folder}: transformers has no {chosen} model of type {config.model_type!r}",
            hint="name a build function instead: pkg.module:build",
        )
    _complete(config, task=chosen)

    def make_model() -> nn.Module:
        import torch

        model: nn.Module = auto.from_config(config, dtype=torch.float32)
        return model

    make_batch, sizes = _batches(config, task=chosen, padded=padded)
    return Job(
        name=f"{config.model_type} {chosen}",
        make_model=make_model,
        make_batch=make_batch,
        loss=_loss_without_cache if TASKS[chosen].keeps_cache else _loss,
        sizes=sizes,
    )


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _loss_without_cache(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise BadInput(
            f"{path} has no model_type, so it is not a model's config",
            hint="name the folder that save_pretrained wrote, or a build function",
        )
    return raw


def _task(raw: dict[str, Any], *, task: str | None, folder: Path) -> str:
    if task is not None:
        if task not in TASKS:
            raise BadInput(f"task={task!r} is not one of {', '.join(TASKS)}")
        return task
    architectures = raw.get("architectures") or []
    for architecture in architectures:
        for name, known in TASKS.items():
            if str(architecture).endswith(known.endings):
                return name
    named = ", ".join(map(str, architectures)) or "no architecture"
    raise BadInput(
        f"{folder / 'config.json'} names {named}, whose loss Flatout does not know",
        hint=f"name the task: one of {', '.join(TASKS)}",
    )


def _complete(config: Any, *, task: str) -> None:
    """Fill in token ids that the head needs for a step; any id will do."""
    if task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # decoders refuse batches of more than one row without it
    if task == "seq2seq-lm" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0


def _batches(config: Any, *, task: str, padded: bool) -> tuple[Callable[..., Any], dict[str, int]]:
    if task == "image-classification":
        return _images(config)
    text = config.get_text_config()
    sizes = {"batch_size": BATCH_SIZE, "length": min(LONGEST, _positions(text) or LONGEST)}
    if task == "seq2seq-lm":
        sizes["target_length"] = sizes["length"]

    def make_batch(*, batch_size: int, length: int, target_length: int = 0) -> dict[str, Tensor]:
        import torch

        _refuse_beyond_positions(text, length=length, target_length=target_length)
        ids = _tokens(text, (batch_size, length))
        mask = torch.ones(batch_size, length, dtype=torch.long)
        if padded and length > 1:
            mask[0, -1] = 0
        labels = _labels(config, ids, task=task, target_length=target_length)
        return {"input_ids": ids, "attention_mask": mask, **labels}

    return make_batch, sizes


def _positions(text: Any) -> int | None:
    """Return the longest text; RoBERTa and its kin count positions from behind the padding id.

    None if a config sets no limit: T5 and XLNet count distances, not positions.
    """
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    if text.model_type.endswith(COUNTS_FROM_PADDING):
        positions -= (getattr(text, "pad_token_id", None) or 0) + 1
    return positions


def _refuse_beyond_positions(text: Any, **lengths: int) -> None:
    positions = _positions(text)
    for name, length in lengths.items():
        if positions is not None and length > positions:
            raise BadInput(
                f"{name}={length} is beyond the {positions} positions of this {text.model_type}",
                hint=f"plan with {name} up to {positions}, or raise max_position_embeddings in its config",
            )


def _tokens(text: Any, shape: tuple[int, int]) -> Tensor:
    """Return random ids without special tokens: an end-of-text in the middle changes what some models do."""
    import torch

    special = {getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start")}
    flat = {item for value in special for item in (value if isinstance(value, list) else [value])}
    ordinary = next(number for number in range(len(flat) + 1) if number not in flat)
    ids = torch.randint(0, text.vocab_size, shape)
    for number in flat - {None}:
        ids[ids == number] = ordinary
    return ids


def _labels(config: Any, ids: Tensor, *, task: str, target_length: int) -> dict[str, Tensor]:
    import torch

    batch_size, length = ids.shape
    if task == "causal-lm":
        return {"labels": ids.clone()}
    if task == "masked-lm":
        hidden = torch.rand(ids.shape) < MASKED_SHARE
        hidden[0, 0] = True
        return {"labels": torch.where(hidden, ids, IGNORED)}
    if task == "seq2seq-lm":
        return {"labels": _tokens(config.get_text_config(), (batch_size, target_length))}
    if task == "token-classification":
        return {"labels": torch.randint(0, config.num_labels, (batch_size, length))}
    if task == "question-answering":
        positions = torch.randint(0, length, (2, batch_size))
        return {"start_positions": positions[0], "end_positions": positions[1]}
    return {"labels": _classes(config, batch_size)}


def _classes(config: Any, batch_size: int) -> Tensor:
    import torch

    if getattr(config, "problem_type", None) == "multi_label_classification":
        return torch.rand(batch_size, config.num_labels)
    if config.num_labels == 1:
        return torch.rand(batch_size)
    return torch.randint(0, config.num_labels, (batch_size,))


def _images(config: Any) -> tuple[Callable[..., Any], dict[str, int]]:
    side = getattr(config, "image_size", None) or IMAGE_SIDE
    side = side if isinstance(side, int) else max(side)
    num_channels = getattr(config, "num_channels", 3)

    def make_batch(*, batch_size: int, image_size: int) -> dict[str, Tensor]:
        import torch

        return {
            "pixel_values": torch.randn(batch_size, num_channels, image_size, image_size),
            "labels": _classes(config, batch_size),
        }

    return make_batch, {"batch_size": BATCH_SIZE, "image_size": side}
