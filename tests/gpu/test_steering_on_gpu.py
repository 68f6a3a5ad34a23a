"""Steering on a GPU: side streams, shared prompts, tiers of the store, trials that share captured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.steering.extract import batches
from flatout.engines.steering.extract.activations import extract
from flatout.engines.steering.extract.layer_reader import LayerReader
from flatout.engines.steering.extract.store import ActivationStore
from flatout.engines.steering.extract.tiers import Tier
from flatout.engines.steering.questions import Question
from flatout.engines.steering.trials.packed_trials import PackedTrials
from flatout.engines.steering.trials.steered_model import steered_model
from flatout.engines.steering.trials.steering import Steering
from flatout.engines.steering.trials.trial_engine import TextRow
from tests.support.gpu import no_synchronisation
from tests.support.multiplex import prompts_of, reference_tokens, tiny_model
from tests.support.steering import text_of, word_tokenizer

pytestmark = pytest.mark.gpu

TEXTS = [text_of(tokens) for tokens in prompts_of([3 + number % 60 for number in range(200)])]
PROMPTS = prompts_of([3, 9, 6, 14])


@pytest.mark.parametrize("position", ["last", "mean"])
def test_a_gpu_extracts_what_a_cpu_does(position: str) -> None:
    model, tokenizer = tiny_model("llama"), word_tokenizer()
    expected = extract(model, tokenizer, TEXTS, position=position)  # type: ignore[arg-type]
    found = extract(model.cuda(), tokenizer, TEXTS, position=position, batch_tokens=300)  # type: ignore[arg-type]
    assert found.values.device.type == "cpu"
    torch.testing.assert_close(found.values, expected.values, rtol=1e-3, atol=1e-3)


def test_a_pass_is_launched_without_waiting_for_the_gpu() -> None:
    reader = LayerReader(tiny_model("llama").cuda(), layers=(0, 1))
    ranges = [(0, 1)] * len(PROMPTS)
    first = reader.read(PROMPTS, ranges=ranges)  # libraries wait once
    with no_synchronisation():
        again = reader.read(PROMPTS, ranges=ranges)
    assert torch.equal(again, first)


def test_shared_prompts_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        batches, "FORK_FLOP", 0.0
    )  # of a model this small, sharing would cost more than it saves
    pairs = [
        Question(prompt=text_of(tokens), positive=" t05 t06", negative=" t07", key="")
        for tokens in prompts_of(range(60, 90))
    ]
    model, tokenizer = tiny_model("qwen2").cuda(), word_tokenizer()
    shared = extract(model, tokenizer, pairs)
    assert shared.recipe["shared_prompts"].startswith("True")
    texts = [one.prompt + one.positive for one in pairs] + [one.prompt + one.negative for one in pairs]
    torch.testing.assert_close(shared.values, extract(model, tokenizer, texts).values, rtol=1e-3, atol=1e-3)


def test_a_store_with_a_tier_on_the_gpu_gives_the_same(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama").cuda(), word_tokenizer()
    tiers = [Tier(device="cuda", budget_bytes=50_000), Tier(device="cpu", budget_bytes=1 << 20)]
    store = ActivationStore(tmp_path, tiers=tiers)
    first = extract(model, tokenizer, TEXTS, store=store)
    for _ in range(2):
        assert torch.equal(extract(model, tokenizer, TEXTS, store=store).values, first.values)
    assert store.tiers.held_bytes()[0] > 0


def test_packed_trials_on_a_gpu_are_the_model_itself_steered() -> None:
    """Captured steps read tables that are rewritten between calls, and for the next trial within one."""
    model = tiny_model("llama")
    trials = [Steering(layer=i % 2, direction=torch.randn(48), amount=1.0 + i) for i in range(6)]
    rows = [TextRow(prompt=prompt, steering=one) for one in (*trials, None) for prompt in PROMPTS]
    expected = [_alone(model, row) for row in rows]
    engine = PackedTrials(model.cuda(), slots=4, max_tokens=40, eos=())
    for _ in range(2):
        assert engine.texts(rows, max_new_tokens=8) == expected


def test_a_batch_in_which_every_row_is_a_trial_of_its_own() -> None:
    model = tiny_model("llama")
    rows = [
        TextRow(prompt=prompt, steering=Steering(layer=i % 2, direction=torch.randn(48), amount=3.0))
        for i, prompt in enumerate(PROMPTS * 8)
    ]
    expected = [_alone(model, row) for row in rows]
    engine = PackedTrials(model.cuda(), slots=len(rows), max_tokens=40, eos=())
    assert engine.texts(rows, max_new_tokens=8) == expected


def _alone(model: Any, row: TextRow) -> tuple[int, ...]:
    with steered_model(model, [row.steering]):
        return reference_tokens(model, row.prompt, max_new_tokens=8)
