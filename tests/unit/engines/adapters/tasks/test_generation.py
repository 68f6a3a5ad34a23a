"""Writing: targets are closed, logits are where targets are, and texts come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.engines.adapters.tasks.data_rows import DataOptions
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.adapters.tasks.generation import GenerationHead, end_id_of
from flatout.engines.adapters.tasks.kinds.translation import Translation
from flatout.engines.adapters.tasks.task import TaskBatch, encode_all
from flatout.ground.errors import BadInput
from tests.support.adapters import tiny_tokenizer

WIDTH = 16


def tiny_head(task: Translation, *, width: int = WIDTH, dropout: float = 0.0) -> GenerationHead:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    embedding = torch.randn(len(tokenizer), width)
    decoder = TextDecoder(
        embedding,
        end_id=tokenizer.sep_token_id,
        pad_id=tokenizer.pad_token_id,
        max_length=64,
        dropout=dropout,
    )
    head = task.head(width, decoder=decoder)
    assert isinstance(head, GenerationHead)
    return head


def rows_of(task: Translation, pairs: list[tuple[str, str]], **sizes: int) -> TaskBatch:
    records = [{"source": source, "target": target} for source, target in pairs]
    examples, _ = encode_all(task, records, tiny_tokenizer(), max_length=64, training=True)
    return task.collate(examples, adapter=0, pad_id=0, **sizes)


PAIRS = [("a man", "the man"), ("of a film", "a"), ("the", "the story of the man in a film")]


def test_a_target_is_closed_and_one_that_is_too_long_is_not() -> None:
    tokenizer = tiny_tokenizer()
    example = Translation().encode({"source": "x", "target": "the man"}, tokenizer, max_length=9)
    assert tokenizer.convert_ids_to_tokens(example.targets["ids"].tolist()) == ["the", "man", "[SEP]"]
    cut = Translation(max_target_length=2).encode(
        {"source": "x", "target": "the man"}, tokenizer, max_length=9
    )
    assert tokenizer.convert_ids_to_tokens(cut.targets["ids"].tolist()) == ["the", "man"]


class Products(TorchDispatchMode):
    """Counts the rows of every product with as many columns as the vocabulary has words."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.shape[1] == self.vocabulary:
            self.rows += len(result)
        return result


@pytest.mark.parametrize(("sizes", "rows"), [({}, 14), ({"row_multiple": 4, "length_multiple": 4}, 16)])
def test_there_are_no_logits_at_padding(sizes: dict[str, int], rows: int) -> None:
    task = Translation()
    head, batch = tiny_head(task), rows_of(task, PAIRS, **sizes)
    assert batch.count == 3 + 2 + 9 < batch.targets["ids"].numel()
    states = torch.randn(batch.block.num_rows, batch.block.length, WIDTH, requires_grad=True)
    with Products(len(tiny_tokenizer())) as counted:
        task.loss(head, states, batch).backward()
    assert counted.rows == rows


def plain_loss(head: GenerationHead, states: Tensor, batch: TaskBatch) -> Tensor:
    """All logits of every place, one row at a time, as one would write it first."""
    losses = []
    for row, example in enumerate(batch.examples):
        ids = torch.from_numpy(example.targets["ids"]).long()[None]
        length = batch.block.lengths[row : row + 1]
        hidden = head.decoder(head.start, ids, states[row : row + 1, : int(length)], length)
        losses.append(
            F.cross_entropy(hidden[0] @ head.decoder.embedding.T + head.bias, ids[0], reduction="sum")
        )
    return torch.stack(losses).sum() / batch.count


def test_the_loss_is_that_of_all_logits_row_by_row() -> None:
    task = Translation()
    head, batch = tiny_head(task), rows_of(task, PAIRS, row_multiple=4, length_multiple=8)
    torch.nn.init.normal_(head.bias)
    states = torch.randn(batch.block.num_rows, batch.block.length, WIDTH)
    torch.testing.assert_close(task.loss(head, states, batch), plain_loss(head, states, batch))


def test_the_shared_decoder_is_no_part_of_the_head() -> None:
    head = tiny_head(Translation())
    assert set(head.state_dict()) == {"start", "bias"}
    assert not {id(part) for part in head.parameters()} & {id(part) for part in head.decoder.parameters()}


def test_a_decoder_that_does_not_fit_is_refused() -> None:
    task = Translation()
    with pytest.raises(BadInput, match="translation needs a decoder of width 8 and 64 tokens and has none"):
        task.head(8)
    decoder = TextDecoder(torch.zeros(9, 8), end_id=1, pad_id=0, max_length=32)
    with pytest.raises(BadInput, match="has one of width 8 and 32 tokens"):
        task.head(8, decoder=decoder)


def test_without_writing_there_is_the_metric_and_no_text() -> None:
    task = Translation()
    head, batch = tiny_head(task, dropout=0.5), rows_of(task, PAIRS)
    head.train()
    states = torch.randn(batch.block.num_rows, batch.block.length, WIDTH)
    records = [{"source": source, "target": target} for source, target in PAIRS]
    quick = task.predict(head, states, batch, tokenizer=tiny_tokenizer(), records=records, write=False)
    whole = task.predict(head, states, batch, tokenizer=tiny_tokenizer(), records=records)
    assert [one.text for one in quick] == [None] * 3 and all(one.text is not None for one in whole)
    assert [one.num_correct for one in quick] == [one.num_correct for one in whole]
    assert [one.num_targets for one in quick] == [3, 2, 9]
    assert set(task.score(quick, records)) == {"token_accuracy"}
    assert set(task.score(whole, records)) == {"token_accuracy", "bleu"}
    assert head.training and head.decoder.training


def test_generated_translations_are_learned_and_written() -> None:
    """The decoder alone, on states that are the words of the source: what an encoder would have to give."""
    task = Translation(max_target_length=24)
    tokenizer = tiny_tokenizer()
    records = task.records(DataOptions(source="generated", num_train=4, num_test=4)).train
    records = [
        {"source": record["source"], "target": "the man in " + word}
        for record, word in zip(records, ("a film", "the story", "of a", "is"), strict=True)
    ]
    examples, _ = encode_all(task, records, tokenizer, max_length=64, training=True)
    batch = task.collate(examples, adapter=0, pad_id=0)
    head = tiny_head(task, width=32)
    states = torch.randn(4, batch.block.length, 32)
    optimizer = torch.optim.AdamW([*head.parameters(), *head.decoder.parameters()], lr=5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        task.loss(head, states, batch).backward()
        optimizer.step()
    said = task.predict(head, states, batch, tokenizer=tokenizer, records=records)
    assert [prediction.text for prediction in said] == [record["target"] for record in records]
    assert task.score(said, records) == {"token_accuracy": 100, "bleu": pytest.approx(100)}


def test_the_end_token_is_the_end_of_text_or_the_separator() -> None:
    class Tokens:
        eos_token_id: int | None = 5
        sep_token_id: int | None = 6

    assert end_id_of(Tokens()) == 5
    Tokens.eos_token_id = None
    assert end_id_of(Tokens()) == 6
    Tokens.sep_token_id = None
    with pytest.raises(BadInput, match="no token that ends a text"):
        end_id_of(Tokens())
