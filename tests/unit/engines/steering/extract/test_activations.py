"""Extraction end to end on tiny models: equal to one text at a time, whatever the batch, store or memory."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.engines.steering.extract import activations
from flatout.engines.steering.extract.activations import Activations, choose_batch_tokens, extract
from flatout.engines.steering.extract.store import ActivationStore
from flatout.engines.steering.extract.tokens import Encoded, encode, encode_ahead
from flatout.engines.steering.questions import Question
from flatout.ground.errors import BadInput
from tests.support.multiplex import prompts_of, shared_model, tiny_model
from tests.support.steering import text_of, word_tokenizer

LENGTHS = (5, 12, 2, 9, 9, 14)
TEXTS = [text_of(tokens) for tokens in prompts_of(LENGTHS)]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def pairs_of_length(prompt: int, *, count: int = 3) -> list[Question]:
    return [
        Question(prompt=text_of(tokens), positive=" t05 t06", negative=" t07", key=str(number))
        for number, tokens in enumerate(prompts_of([prompt + i for i in range(count)]))
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma2"])
@pytest.mark.parametrize("position", ["last", "mean", -2, (0, 2)])
def test_batched_equals_one_at_a_time(family: str, position: Any) -> None:
    model = shared_model(family)
    batched = extract(model, word_tokenizer(side="left"), TEXTS, position=position, batch_tokens=40)
    alone = [extract(model, word_tokenizer(), [text], position=position) for text in TEXTS]
    torch.testing.assert_close(batched.values, torch.cat([one.values for one in alone]), **CLOSE)
    assert batched.keys == tuple(one.keys[0] for one in alone)
    assert batched.values.dtype == torch.float32
    assert batched.layers == (0, 1)


@settings(max_examples=10)
@given(budget=st.integers(1, 60), layers=st.sampled_from(["all", [0], [1], [-1]]))
def test_the_budget_of_a_batch_changes_nothing(budget: int, layers: Any) -> None:
    model, tokenizer = shared_model("llama"), word_tokenizer()
    whole = extract(model, tokenizer, TEXTS, layers="all", batch_tokens=10_000)
    some = extract(model, tokenizer, TEXTS, layers=layers, batch_tokens=budget)
    torch.testing.assert_close(some.values, whole.values[:, list(some.layers)], **CLOSE)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2-windowed", "gemma3"])
def test_pairs_that_share_a_prompt_equal_their_texts(family: str) -> None:
    model, tokenizer, pairs = shared_model(family), word_tokenizer(), pairs_of_length(100)
    shared = extract(model, tokenizer, pairs, batch_tokens=10_000)
    assert shared.recipe["shared_prompts"].startswith("True")
    texts = [one.prompt + one.positive for one in pairs] + [one.prompt + one.negative for one in pairs]
    apart = extract(model, tokenizer, texts)
    assert apart.recipe["shared_prompts"].startswith("False")
    torch.testing.assert_close(shared.values, apart.values, **CLOSE)
    positive, negative = shared.halves()
    assert torch.equal(torch.cat([positive.values, negative.values]), shared.values)
    assert positive.keys + negative.keys == apart.keys


def test_equal_texts_are_computed_once_and_progress_counts_to_the_end() -> None:
    model = tiny_model("llama")
    rows: list[int] = []
    model.model.layers[0].register_forward_hook(lambda _, __, output: rows.append(len(output)))
    seen: list[tuple[int, int]] = []
    found = extract(
        model, word_tokenizer(), TEXTS * 3, batch_tokens=30, on_count=lambda *count: seen.append(count)
    )
    assert sum(rows) == len(TEXTS)
    assert torch.equal(found.values[: len(TEXTS)], found.values[-len(TEXTS) :])
    assert seen == sorted(seen)
    assert len(seen) > 1
    assert seen[-1] == (3 * len(TEXTS), 3 * len(TEXTS))


@pytest.mark.parametrize("kind", ["texts", "pairs"])
def test_windows_change_nothing_but_when_a_text_is_tokenised(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, tokenizer = shared_model("llama"), word_tokenizer()
    given_texts: Any = [*TEXTS, *TEXTS[:2]] if kind == "texts" else pairs_of_length(60, count=6)
    whole = extract(model, tokenizer, given_texts, batch_tokens=200)
    some = partial(encode_ahead, window_characters=100)
    monkeypatch.setattr(
        activations, "encode_ahead", lambda texts, tokenizer, **_: some(texts, tokenizer=tokenizer)
    )
    seen: list[tuple[int, int]] = []
    apart = extract(
        model, tokenizer, given_texts, batch_tokens=200, on_count=lambda *count: seen.append(count)
    )
    assert apart.keys == whole.keys
    torch.testing.assert_close(apart.values, whole.values, **CLOSE)
    assert seen[-1] == (len(whole.values), len(whole.values))
    ahead = encode(given_texts, tokenizer=tokenizer)
    assert torch.equal(extract(model, tokenizer, ahead, batch_tokens=200).values, whole.values)
    windows = Encoded.windows
    monkeypatch.setattr(Encoded, "windows", lambda self, _: windows(self, 50))
    cut = extract(model, tokenizer, ahead, batch_tokens=200)
    assert cut.keys == whole.keys and len(list(ahead.windows(None))) > 2
    torch.testing.assert_close(cut.values, whole.values, **CLOSE)
    stored = extract(model, tokenizer, given_texts, store=ActivationStore(tmp_path), batch_tokens=200)
    again = extract(model, tokenizer, given_texts, store=ActivationStore(tmp_path), batch_tokens=200)
    assert torch.equal(stored.values, again.values)
    torch.testing.assert_close(again.values, whole.values, **CLOSE)


class Forgetful(torch.nn.Module):
    """A model whose memory holds so many tokens."""

    def __init__(self, model: Any, *, tokens: int) -> None:
        super().__init__()
        self.model, self.tokens, self.config = model, tokens, model.config

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def forward(self, input_ids: Any, **options: Any) -> Any:
        if input_ids.numel() > self.tokens:
            raise torch.OutOfMemoryError
        return self.model(input_ids, **options)


def test_an_out_of_memory_in_the_model_changes_nothing_but_the_batches() -> None:
    model = shared_model("llama")
    with pytest.warns(RuntimeWarning, match="did not fit"):
        found = extract(Forgetful(model, tokens=20).eval(), word_tokenizer(), TEXTS, batch_tokens=500)
    torch.testing.assert_close(found.values, extract(model, word_tokenizer(), TEXTS).values, **CLOSE)


def test_a_store_answers_what_it_has_and_only_that(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), word_tokenizer()
    passes: list[int] = []
    model.model.layers[0].register_forward_hook(lambda _, __, output: passes.append(len(output)))
    first = extract(model, tokenizer, TEXTS[:4], store=ActivationStore(tmp_path))
    del passes[:]
    again = extract(model, tokenizer, TEXTS[:4], layers=[1], store=ActivationStore(tmp_path))
    assert torch.equal(again.values, first.values[:, 1:])
    assert not passes
    more = extract(model, tokenizer, TEXTS, store=ActivationStore(tmp_path))
    assert sum(passes) == 2
    torch.testing.assert_close(more.values, extract(model, tokenizer, TEXTS).values, **CLOSE)


def test_an_interrupted_extraction_goes_on_where_it_was(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), word_tokenizer()

    def interrupt(done: int, total: int) -> None:
        if done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(model, tokenizer, TEXTS, batch_tokens=14, store=ActivationStore(tmp_path), on_count=interrupt)
    rows: list[int] = []
    model.model.layers[0].register_forward_hook(lambda _, __, output: rows.append(len(output)))
    extract(model, tokenizer, TEXTS, store=ActivationStore(tmp_path))
    assert sum(rows) == len(TEXTS) - 3


def test_rows_reach_the_store_while_the_extraction_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a kill, which flushes nothing, costs the rows of one file at most."""
    monkeypatch.setattr(activations, "SHARD_BYTES", 1)
    shards: list[int] = []
    extract(
        shared_model("llama"),
        word_tokenizer(),
        TEXTS,
        batch_tokens=14,
        store=ActivationStore(tmp_path),
        on_count=lambda done, total: shards.append(len(list(tmp_path.iterdir()))),
    )
    assert shards == list(range(1, len(shards) + 1))
    assert len(shards) > 3


def test_changed_weights_positions_and_types_are_never_answered_from_the_store(tmp_path: Path) -> None:
    model, tokenizer, store = tiny_model("llama"), word_tokenizer(), ActivationStore(tmp_path)
    before = extract(model, tokenizer, TEXTS, store=store)
    assert not torch.equal(before.values, extract(model, tokenizer, TEXTS, position=0, store=store).values)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.data[3, 5] += 1.0  # one number of one weight
    after = extract(model, tokenizer, TEXTS, store=store)
    assert not torch.equal(before.values, after.values)
    assert torch.equal(after.values, extract(model, tokenizer, TEXTS).values)
    half = extract(model.to(torch.bfloat16), tokenizer, TEXTS, store=store)
    assert half.recipe["dtype"] == "bfloat16"
    assert torch.equal(half.values, extract(model, tokenizer, TEXTS, store=store).values)
    assert half.values.dtype == torch.bfloat16


def test_an_extraction_outlives_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    model, tokenizer = shared_model("llama"), word_tokenizer()
    store = ActivationStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="activations are not stored: .*cannot be written"):
        found = extract(model, tokenizer, TEXTS, store=store)
    assert torch.equal(found.values, extract(model, tokenizer, TEXTS).values)


def test_what_cannot_be_extracted_is_refused() -> None:
    model = tiny_model("llama").train()
    with pytest.raises(BadInput, match="training mode"):
        extract(model, word_tokenizer(), TEXTS)
    with pytest.raises(BadInput, match="batch_tokens=0"):
        extract(model.eval(), word_tokenizer(), TEXTS, batch_tokens=0)
    with pytest.raises(BadInput, match="position 7 is outside a text of 5 tokens"):
        extract(model, word_tokenizer(), TEXTS, position=7)
    three = Activations(values=torch.zeros(3, 1, 2), layers=(0,), keys=("a", "b", "c"))
    with pytest.raises(BadInput, match="3 texts cannot be halved into pairs"):
        three.halves()


def test_the_budget_says_why() -> None:
    model = shared_model("llama")
    assert choose_batch_tokens(77, model).value == 77
    elsewhere = copy.deepcopy(model).to("meta")  # a device that is no CPU
    assert choose_batch_tokens(None, model).value < choose_batch_tokens(None, elsewhere).value == 65536
    assert "halved where memory is short" in choose_batch_tokens(None, elsewhere).reason
