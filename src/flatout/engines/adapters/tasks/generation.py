"""What tasks that write a text have in common: the shared decoder on the encoder's states.

A target uses the encoder's own vocabulary and ends with its end token; a target longer than
`max_target_length` is cut and has no end token, so that the model does not learn to stop in the middle.
Logits cost more than all the rest and are computed only where a token is predicted: a batch lists those
places, and the list is rounded up so that few shapes occur.

The metric is token accuracy: the share of target tokens that are predicted right, given the tokens before
them.  Small decoders trained on a few thousand rows write texts whose BLEU or ROUGE is near zero and depends
on their first wrong word; token accuracy counts thousands of decisions in one pass.  The scores of the texts
are reported beside it.

Legend: B rows, L input tokens, T target tokens, M places with a target, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from flatout.engines.adapters.lora.chunked_loss import IGNORED, chunked_argmax, chunked_cross_entropy
from flatout.engines.adapters.lora.token_blocks import Ints, Padding, Targets
from flatout.engines.adapters.tasks.data_rows import Record
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.adapters.tasks.task import AdapterTask, Asked, Example, Prediction, TaskBatch
from flatout.ground.errors import BadInput
from flatout.ground.units import round_up


class GenerationHead(nn.Module):
    """What a task adds to the shared decoder: its first vector, and how likely each word is in it."""

    def __init__(self, decoder: TextDecoder) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(decoder.width) * 0.02)
        self.bias = nn.Parameter(torch.zeros(len(decoder.embedding)))
        self._shared = (decoder,)  # in a tuple, so that its parameters are not counted as this head's

    @property
    def decoder(self) -> TextDecoder:
        return self._shared[0]

    def said(self, states_BLH: Tensor, batch: TaskBatch) -> Tensor:
        """Return [M, H]: the states that predict the token at each place with a target."""
        said_BTH: Tensor = self.decoder(self.start, batch.targets["ids"], states_BLH, batch.block.lengths)
        return said_BTH.flatten(0, 1).index_select(0, batch.targets["places"])


@dataclass(frozen=True, kw_only=True)
class GenerationTask(AdapterTask):
    """A text for a text."""

    max_target_length: int = 64

    metric: ClassVar[str] = "token_accuracy"
    needs_decoder: ClassVar[bool] = True

    def to_vocabulary(self, text: str) -> str:
        """Rewrite a text with signs that the vocabulary has."""
        return text

    def from_vocabulary(self, text: str) -> str:
        """Reverse `to_vocabulary`."""
        return text

    def targets_of(self, record: Record, tokenizer: Any) -> Mapping[str, Ints]:
        text = self.to_vocabulary(record[self.answers[0]])
        words = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        closed = [*words, end_id_of(tokenizer)][: self.max_target_length]
        return {"ids": np.array(closed, dtype=np.int32)}

    def pad_targets(self, examples: Sequence[Example], to: Padding) -> Targets:
        lengths = [example.num_targets for example in examples]
        longest = min(round_up(max(*lengths, 1), to.length_multiple), self.max_target_length)
        ids = np.full((to.rows, longest), to.pad_id, dtype=np.int64)
        num_places = max(round_up(sum(lengths), to.row_multiple * to.length_multiple), 1)
        places = np.zeros(num_places, dtype=np.int64)
        labels = np.full(num_places, IGNORED, dtype=np.int64)
        at = 0
        for row, (example, length) in enumerate(zip(examples, lengths, strict=True)):
            if length:
                ids[row, :length] = labels[at : at + length] = example.targets["ids"]
                places[at : at + length] = row * longest + np.arange(length)
                at += length
        return {"ids": ids, "places": places, "labels": labels}

    def head(self, width: int, *, decoder: TextDecoder | None = None) -> nn.Module:
        if decoder is None or decoder.width != width or decoder.max_length < self.max_target_length:
            has = (
                "none" if decoder is None else f"one of width {decoder.width} and {decoder.max_length} tokens"
            )
            wanted = f"of width {width} and {self.max_target_length} tokens"
            raise BadInput(f"{self.name} needs a decoder {wanted} and has {has}")
        return GenerationHead(decoder)

    def loss(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch) -> Tensor:
        assert isinstance(head, GenerationHead)
        return chunked_cross_entropy(
            head.said(states_BLH, batch),
            head.decoder.embedding,
            batch.targets["labels"],
            bias_V=head.bias,
        )

    def answer(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch, asked: Asked) -> list[Prediction]:
        assert isinstance(head, GenerationHead)
        texts: list[str | None] = [None] * len(batch.examples)
        if asked.write:
            ids_BT = head.decoder.generate(
                head.start,
                states_BLH[: len(texts)],
                batch.block.lengths[: len(texts)],
                max_new_tokens=self.max_target_length,
                bias_V=head.bias,
            )
            written = asked.tokenizer.batch_decode(ids_BT.tolist(), skip_special_tokens=True)
            texts = [self.from_vocabulary(text.strip()) for text in written]
        right = _right_per_row(head, states_BLH, batch)
        return [
            Prediction(text=text, num_correct=num_correct, num_targets=example.num_targets)
            for text, num_correct, example in zip(texts, right, batch.examples, strict=True)
        ]

    def score(self, predictions: Sequence[Prediction], records: Sequence[Record]) -> dict[str, float]:
        right = sum(prediction.num_correct for prediction in predictions)
        total = sum(prediction.num_targets for prediction in predictions)
        scores = {"token_accuracy": 100 * right / max(total, 1)}
        said = [prediction.text for prediction in predictions if prediction.text is not None]
        if len(said) == len(predictions):
            scores |= self.text_scores(said, records)
        return scores


def end_id_of(tokenizer: Any) -> int:
    """Return the token that ends a text: the tokenizer's end of text, else its separator."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    raise BadInput("the tokenizer has no token that ends a text", hint="give it an eos_token or a sep_token")


def _right_per_row(head: GenerationHead, states_BLH: Tensor, batch: TaskBatch) -> list[int]:
    """Count the target tokens of each example that are predicted right, given the ones before them."""
    said_MH = head.said(states_BLH, batch)
    named_M = chunked_argmax(said_MH, head.decoder.embedding, bias_V=head.bias)
    rows_M = batch.targets["places"] // batch.targets["ids"].shape[1]
    hits_B = torch.zeros(batch.block.num_rows, dtype=torch.int64, device=named_M.device)
    hits_B.index_add_(0, rows_M, (named_M == batch.targets["labels"]).to(torch.int64))
    found: list[int] = hits_B[: len(batch.examples)].tolist()
    return found
