"""Activations of texts: ours, a bare forward of the same batches, and a pass for each layer and text.

The bare forward is the limit: the very batches that `extract` ran, lying on the device in tokens, through the
blocks up to the last wanted one; nothing is read, kept or copied.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from functools import partial
from typing import Any

import torch
from racing import clock_of, made, race, rows_of
from subjects import Subject, texts_of
from torch import Tensor, nn

from flatout.engines.run.fingerprint import model_fingerprint
from flatout.engines.steering.extract.activations import extract
from flatout.engines.steering.extract.store import ActivationStore
from flatout.engines.steering.extract.tokens import Encoded, encode
from flatout.engines.steering.questions import Question

STORE_ROUNDS = 2  # each hashes all weights twice
SEED_TEXTS = 4  # texts of the seed's scheme that are timed; the rest would take as long each


def extraction(subject: Subject, *, num_texts: int, longest: int, seconds: float) -> list[dict[str, Any]]:
    """Tokens per second; all layers up to two thirds of the depth, the last token of each text."""
    layers = list(range(max(1, 2 * subject.num_layers // 3)))
    texts = texts_of(num_texts, longest=longest, seed=1)
    ids = subject.tokenizer(texts)["input_ids"]
    tokens = float(sum(map(len, ids)))
    batches = _batches(subject, texts, layers)
    bare = _truncated(subject.model, len(layers))

    def plain() -> float:
        return _run_bare(bare, batches, tokens)

    def tokenised() -> float:
        subject.tokenizer(texts)
        return plain()

    def ours() -> float:
        made.append(extract(subject.model, subject.tokenizer, texts, layers=layers))
        return tokens

    ahead = encode(texts, tokenizer=subject.tokenizer)
    ahead_batches = _batches(subject, ahead, layers)

    def ours_ahead() -> float:
        made.append(extract(subject.model, subject.tokenizer, ahead, layers=layers))
        return tokens

    def per_layer() -> float:
        """One full pass gives one layer of one text, and every layer needs its own."""
        for row in ids[:SEED_TEXTS]:
            _one_layer(subject, row, layers[-1])
        return sum(map(len, ids[:SEED_TEXTS])) / len(layers)

    pairs = _pairs(num_texts // 2, longest=longest)
    both = [pair.prompt + pair.positive for pair in pairs] + [pair.prompt + pair.negative for pair in pairs]
    paired_tokens = float(sum(map(len, subject.tokenizer(both)["input_ids"])))
    apart = _batches(subject, both, layers)

    def our_pairs() -> float:
        made.append(extract(subject.model, subject.tokenizer, pairs, layers=layers))
        return paired_tokens

    arms = {
        "bare forward of the same batches": plain,
        "tokenising and the bare forward": tokenised,
        "extract": ours,
        "bare forward of the batches tokenised ahead": partial(_run_bare, bare, ahead_batches, tokens),
        "extract, tokenised ahead": ours_ahead,
        "a pass per layer and text": per_layer,
        "bare forward of both texts of pairs": partial(_run_bare, bare, apart, paired_tokens),
        "extract, pairs": our_pairs,
    }
    found = race(arms, seconds=seconds, cuda=subject.device.type == "cuda")
    seed = {"times a pass per layer": "a pass per layer and text"}
    against = {
        "extract": {
            "of the bare forward": "bare forward of the same batches",
            "of it and tokenising": "tokenising and the bare forward",
            **seed,
        },
        "extract, tokenised ahead": {"of the bare forward": "bare forward of the batches tokenised ahead"},
        "extract, pairs": {"of both texts apart": "bare forward of both texts of pairs", **seed},
    }
    rows = rows_of(found, unit="tokens", against=against)
    padded = sum(batch.numel() for batch in batches)
    rows[0].update(texts=num_texts, tokens=tokens, columns_used_share=tokens / padded)
    return rows


def storing(subject: Subject, *, num_texts: int, longest: int) -> list[dict[str, Any]]:
    """The same activations computed, and read from a store; every layer, the last token."""
    texts = texts_of(num_texts, longest=longest, seed=2)
    clock = clock_of(subject.device.type == "cuda")
    began = clock()
    model_fingerprint(subject.model)
    named_s = clock() - began
    times: dict[str, list[float]] = {"compute": [], "compute and store": [], "read": []}
    num_bytes = 0
    for number in range(STORE_ROUNDS + 1):
        with tempfile.TemporaryDirectory() as folder:
            for name, store in (("compute", None), ("compute and store", folder), ("read", folder)):
                held = None if store is None else ActivationStore(store)
                began = clock()
                found = extract(subject.model, subject.tokenizer, texts, store=held)
                taken = clock() - began
                num_bytes = found.values.nbytes
                if number:  # the first round warms up
                    times[name].append(taken)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "arm": name,
            "unit": "texts",
            "per_s": num_texts / seconds,
            "seconds": seconds,
            "times as fast as computing": medians["compute"] / seconds,
        }
        for name, seconds in medians.items()
    ] + [
        {
            "arm": "hash of all weights, in each of the two with a store",
            "seconds": named_s,
            "read without it, s": max(0.0, medians["read"] - named_s),
            "bytes": num_bytes,
        }
    ]


def _batches(subject: Subject, texts: list[str] | Encoded, layers: list[int]) -> list[Tensor]:
    """The batches that `extract` runs, in tokens on the device."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["input_ids"])

    with subject.model.register_forward_pre_hook(note, with_kwargs=True):
        extract(subject.model, subject.tokenizer, texts, layers=layers)
    return seen


def _run_bare(bare: Any, batches: list[Tensor], tokens: float) -> float:
    with torch.no_grad():
        for batch in batches:
            bare(input_ids=batch, use_cache=False)
    return tokens


def _truncated(model: Any, num_layers: int) -> Any:
    """The blocks up to the last wanted one as a model of their own, over the same weights."""
    body = copy.copy(model.get_decoder())
    body._modules = dict(body._modules)
    body.layers = nn.ModuleList(list(body.layers)[:num_layers])
    body.norm = nn.Identity()
    return body


def _one_layer(subject: Subject, tokens: list[int], layer: int) -> Tensor:
    """The usual way: a hook, a whole forward with logits, and the last token fetched."""
    held: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        held.append(hidden[:, -1].float().cpu())

    block = subject.model.get_decoder().layers[layer]
    with block.register_forward_hook(keep), torch.no_grad():
        subject.model(input_ids=torch.tensor([tokens], device=subject.device), use_cache=False)
    return held[0]


def _pairs(count: int, *, longest: int) -> list[Question]:
    """Questions with two short answers."""
    prompts = texts_of(count, longest=longest, seed=3)
    answers = texts_of(2 * count, longest=max(4, longest // 8), seed=4)
    return [
        Question(prompt=prompt, positive=f" {answers[2 * i]}", negative=f" {answers[2 * i + 1]}", key=str(i))
        for i, prompt in enumerate(prompts)
    ]
