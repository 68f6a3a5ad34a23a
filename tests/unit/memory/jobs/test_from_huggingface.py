"""Config folders as jobs: every supported head makes a step, and no weight is made while loading."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.ground.errors import BadInput, MissingExtra
from flatout.memory.jobs.from_huggingface import TASKS, is_config, job_of_config
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.jobs.step import make_parts, run_step

pytest.importorskip("transformers", reason="the dev extra brings transformers")

BERT = {
    "model_type": "bert",
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 200, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "BertForMaskedLM": (BERT, "masked-lm"),
    "BertForSequenceClassification": (BERT, "sequence-classification"),
    "BertForTokenClassification": (BERT, "token-classification"),
    "BertForQuestionAnswering": (BERT, "question-answering"),
    "RobertaForMaskedLM": (
        {**BERT, "model_type": "roberta", "max_position_embeddings": 34, "pad_token_id": 1},
        "masked-lm",
    ),
    "GPT2LMHeadModel": ({**GPT2, "bos_token_id": 0, "eos_token_id": 0}, "causal-lm"),
    "GPT2ForSequenceClassification": (
        {**GPT2, "bos_token_id": 0, "eos_token_id": 0},
        "sequence-classification",
    ),
    "LlamaForCausalLM": ({**BERT, "model_type": "llama", "dtype": "bfloat16"}, "causal-lm"),
    "T5ForConditionalGeneration": (
        {
            "model_type": "t5",
            "vocab_size": 200,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
        },
        "seq2seq-lm",
    ),
    "ViTForImageClassification": (
        {**BERT, "model_type": "vit", "image_size": 32, "patch_size": 8},
        "image-classification",
    ),
    "ConvNextForImageClassification": (
        {"model_type": "convnext", "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 32, 64], "image_size": 64},
        "image-classification",
    ),
    "ResNetForImageClassification": (
        {"model_type": "resnet", "embedding_size": 8, "depths": [1, 1], "hidden_sizes": [8, 16]},
        "image-classification",
    ),
}
SMALL = {"batch_size": 2, "length": 12, "target_length": 6, "image_size": 32}


def write_config(folder: Path, config: dict[str, Any], *, architecture: str | None) -> str:
    architectures = {"architectures": [architecture]} if architecture else {}
    (folder / "config.json").write_text(json.dumps({**config, **architectures}))
    return str(folder)


def small(job: Job) -> dict[str, int]:
    return {name: min(value, SMALL[name]) for name, value in job.sizes.items()}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_head_makes_a_training_step(architecture: str, tmp_path: Path) -> None:
    config, task = CONFIGS[architecture]
    job = job_of_config(write_config(tmp_path, config, architecture=architecture))
    assert job.name == f"{config['model_type']} {task}"
    recipe = Recipe()
    parts = make_parts(job, recipe, device="cpu")
    assert type(parts.model).__name__ == architecture
    assert {parameter.dtype for parameter in parts.model.parameters()} == {torch.float32}
    run_step(parts, job, recipe, job.make_batch(**small(job)), device="cpu")
    assert any(parameter.grad is not None for parameter in parts.model.parameters())


def test_every_task_is_stepped_above() -> None:
    assert {task for _, task in CONFIGS.values()} == set(TASKS)


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("BertForMaskedLM", {"batch_size": 8, "length": 512}),
        ("RobertaForMaskedLM", {"batch_size": 8, "length": 32}),
        ("GPT2LMHeadModel", {"batch_size": 8, "length": 64}),
        ("T5ForConditionalGeneration", {"batch_size": 8, "length": 512, "target_length": 512}),
        ("ViTForImageClassification", {"batch_size": 8, "image_size": 32}),
        ("ResNetForImageClassification", {"batch_size": 8, "image_size": 224}),
    ],
)
def test_sizes_come_from_the_config(architecture: str, sizes: dict[str, int], tmp_path: Path) -> None:
    job = job_of_config(write_config(tmp_path, CONFIGS[architecture][0], architecture=architecture))
    assert job.sizes == sizes


def test_the_longest_text_a_model_takes_is_stepped(tmp_path: Path) -> None:
    job = job_of_config(
        write_config(tmp_path, CONFIGS["RobertaForMaskedLM"][0], architecture="RobertaForMaskedLM")
    )
    parts = make_parts(job, Recipe(), device="cpu")
    run_step(parts, job, Recipe(), job.make_batch(**{**job.sizes, "batch_size": 1}), device="cpu")


@pytest.mark.parametrize(("architecture", "positions"), [("RobertaForMaskedLM", 32), ("GPT2LMHeadModel", 64)])
def test_a_text_beyond_the_positions_is_refused(architecture: str, positions: int, tmp_path: Path) -> None:
    job = job_of_config(write_config(tmp_path, CONFIGS[architecture][0], architecture=architecture))
    assert job.make_batch(batch_size=1, length=positions)["input_ids"].shape == (1, positions)
    with pytest.raises(BadInput, match=rf"length={positions + 1} is beyond the {positions} positions"):
        job.make_batch(batch_size=1, length=positions + 1)


def test_a_model_that_counts_distances_has_no_longest_text(tmp_path: Path) -> None:
    architecture = "T5ForConditionalGeneration"
    job = job_of_config(write_config(tmp_path, CONFIGS[architecture][0], architecture=architecture))
    assert job.make_batch(batch_size=1, length=600, target_length=700)["labels"].shape == (1, 700)


def test_loading_makes_no_weights(tmp_path: Path) -> None:
    """A model of 10^13 parameters: making one of its matrices would end this process."""
    huge = {**BERT, "hidden_size": 2**20, "intermediate_size": 2**22, "vocab_size": 2**24}
    job = job_of_config(write_config(tmp_path, huge, architecture="BertForMaskedLM"))
    assert job.make_batch(batch_size=1, length=4)["input_ids"].shape == (1, 4)
    with torch.device("meta"):
        model = job.make_model()
    assert sum(parameter.numel() for parameter in model.parameters()) > 10**13


def test_one_row_is_padded_unless_told_otherwise(tmp_path: Path) -> None:
    folder = write_config(tmp_path, BERT, architecture="BertForMaskedLM")
    padded = job_of_config(folder).make_batch(batch_size=3, length=5)["attention_mask"]
    packed = job_of_config(folder, padded=False).make_batch(batch_size=3, length=5)["attention_mask"]
    assert padded.sum() == 14
    assert packed.all()


def test_random_tokens_are_never_special(tmp_path: Path) -> None:
    config = {**BERT, "vocab_size": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
    job = job_of_config(write_config(tmp_path, config, architecture="BertForMaskedLM"))
    ids = job.make_batch(batch_size=16, length=16)["input_ids"]
    assert set(ids.unique().tolist()) == {2, 4, 5}


def test_a_regression_and_several_labels_have_labels_of_their_own_kind(tmp_path: Path) -> None:
    one = {**BERT, "id2label": {"0": "score"}}
    job = job_of_config(write_config(tmp_path, one, architecture="BertForSequenceClassification"))
    assert job.make_batch(batch_size=3, length=5)["labels"].dtype is torch.float32
    many = {**BERT, "problem_type": "multi_label_classification"}
    job = job_of_config(write_config(tmp_path, many, architecture="BertForSequenceClassification"))
    assert job.make_batch(batch_size=3, length=5)["labels"].shape == (3, 2)


def test_a_model_without_a_head_asks_for_the_task(tmp_path: Path) -> None:
    folder = write_config(tmp_path, BERT, architecture="BertModel")
    with pytest.raises(BadInput, match="names BertModel, whose loss Flatout does not know") as caught:
        job_of_config(folder)
    assert caught.value.hint is not None and "masked-lm" in caught.value.hint
    assert job_of_config(folder, task="masked-lm").name == "bert masked-lm"
    with pytest.raises(BadInput, match="task='poetry' is not one of"):
        job_of_config(folder, task="poetry")
    with pytest.raises(BadInput, match="names no architecture"):
        job_of_config(write_config(tmp_path, BERT, architecture=None))


def test_a_task_that_the_model_has_no_head_for_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, BERT, architecture="BertModel")
    with pytest.raises(BadInput, match="no image-classification model of type 'bert'"):
        job_of_config(folder, task="image-classification")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "has no model_type"), ('{"a": 1}', "has no model_type")],
)
def test_a_config_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        job_of_config(str(tmp_path))


def test_a_model_type_that_transformers_does_not_know_is_one_line(tmp_path: Path) -> None:
    folder = write_config(tmp_path, {"model_type": "hal9000"}, architecture="HalForCausalLM")
    with pytest.raises(BadInput, match=r"reading .*config.json raised ValueError"):
        job_of_config(folder)


def test_a_folder_or_the_file_itself_is_a_config(tmp_path: Path) -> None:
    assert not is_config(str(tmp_path))
    folder = write_config(tmp_path, BERT, architecture="BertForMaskedLM")
    assert is_config(folder)
    assert is_config(f"{folder}/config.json")
    assert job_of_config(f"{folder}/config.json").name == "bert masked-lm"


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_config(tmp_path, BERT, architecture="BertForMaskedLM")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'flatout\[adapters\]'"):
        job_of_config(folder)
