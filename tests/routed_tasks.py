"""A tiny real encoder with three adapters and three tasks, untrained, for what routes and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.engines.adapters.bank import AdapterBank, AdapterSpec
from flatout.engines.adapters.blocks import Block, Blocks
from flatout.engines.adapters.encoder import PackedEncoder
from flatout.engines.adapters.evaluation.score_routings import Subject
from flatout.engines.adapters.tasks import encode_all, task_named
from flatout.engines.adapters.tasks.decoder import Decoder
from tests.adapter_tokens import tiny_tokenizer

NAMES = ("sentiment", "qa", "translation")
WIDTH = 32


class CountingEncoder(PackedEncoder):
    """Keeps what each pass was given: adapter, rows, tokens, and whether adapters were mixed."""

    passes: list[tuple[int, int, int, bool]]

    def __call__(self, blocks: Blocks, **options: Any) -> tuple[Tensor, ...]:
        (block,) = blocks
        mixed = options.get("mixture") is not None
        self.__dict__.setdefault("passes", []).append(
            (block.adapter, block.num_rows, block.num_tokens, mixed)
        )
        return super().__call__(blocks, **options)

    def depths(self, block: Block) -> tuple[Tensor, ...]:
        self.__dict__.setdefault("passes", []).append(
            (block.adapter, block.num_rows, block.num_tokens, False)
        )
        return super().depths(block)


def tiny_encoder(*, ranks: Sequence[int] = (4, 2, 3)) -> CountingEncoder:
    """Adapters that change what the encoder says: their second factors are not zero."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
    )
    model = BertModel(config)
    specs = [AdapterSpec(name=name, rank=rank) for name, rank in zip(NAMES, ranks, strict=True)]
    bank = AdapterBank(model, specs)
    for name in NAMES:
        drawn = {key: 0.3 * torch.randn_like(value) for key, value in bank.state_dict(name).items()}
        bank.load_state_dict(name, drawn)
    encoder = CountingEncoder(model, bank)
    encoder.passes = []
    return encoder


def subjects(encoder: PackedEncoder, *, rows: int = 12) -> dict[str, Subject]:
    """Generated rows of three tasks; the third writes through a decoder."""
    torch.manual_seed(1)
    tokenizer = tiny_tokenizer()
    words = encoder.model.get_input_embeddings().weight
    decoder = Decoder(
        words, end_id=tokenizer.sep_token_id, pad_id=tokenizer.pad_token_id, num_layers=1, max_length=12
    )
    found = {}
    for name in NAMES:
        task = task_named(name, **({"max_target_length": 12} if name == "translation" else {}))
        records = task.generated(rows, seed=3)
        examples, _ = encode_all(task, records, tokenizer, max_length=96, training=False)
        head = task.head(encoder.width, decoder=decoder if task.needs_decoder else None)
        found[name] = Subject(task=task, head=head, examples=examples, records=records)
    return found
