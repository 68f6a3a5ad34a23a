"""Rows of many trials through a model's own forward, where the packed engine cannot read the model.

A model that is sharded over GPUs, or of a family whose weights the packed engine does not know, still runs in
transformers.  Each row is a sequence of its own and a hook steers it: every trial computes the prompt again,
so it is slower, and gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from flatout.engines.steering.model_blocks import input_device
from flatout.engines.steering.trials.steered_model import steered_model
from flatout.engines.steering.trials.trial_engine import OnText, TextRow, TokenBranch, TrialEngine
from flatout.multiplex.decode.generator import end_tokens

if TYPE_CHECKING:
    from torch import Tensor, nn


class HookedTrials(TrialEngine):
    """Forwards of at most `batch_tokens` tokens, generations of at most `slots` texts."""

    def __init__(self, model: nn.Module, *, slots: int = 64, batch_tokens: int = 8192) -> None:
        self._model: Any = model
        self._slots, self._batch_tokens = slots, batch_tokens

    @torch.no_grad()
    def log_probabilities(self, branches: Sequence[TokenBranch]) -> Iterator[tuple[int, list[float]]]:
        """Yield (number of a branch, the log-probabilities of its targets), the longest first."""
        texts = [one.trunk + one.tokens for one in branches]
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        while order:
            count = max(1, self._batch_tokens // len(texts[order[0]]))
            chosen, order = order[:count], order[count:]
            ids, mask = self._pad([texts[number] for number in chosen], left=False)
            batch = [branches[number] for number in chosen]
            with steered_model(
                self._model,
                [one.steering for one in batch],
                prompt_lengths=[_prompt_length(one) for one in batch],
            ):
                logits: Tensor = self._model(input_ids=ids, attention_mask=mask).logits
            wanted = [
                (row, len(one.trunk) + index, token)
                for row, one in enumerate(batch)
                for index, token in one.targets
            ]
            rows, columns, tokens = torch.tensor(wanted, device=logits.device).unbind(1)
            scores = logits[rows, columns].float().log_softmax(-1)
            values = iter(scores.gather(1, tokens[:, None])[:, 0].tolist())
            for number, one in zip(chosen, batch, strict=True):
                yield number, [next(values) for _ in one.targets]

    def texts(
        self, rows: Sequence[TextRow], *, max_new_tokens: int, on_finished: OnText | None = None
    ) -> list[tuple[int, ...]]:
        """Return the tokens that follow each row's prompt, greedily."""
        found: dict[int, tuple[int, ...]] = {}
        order = sorted(range(len(rows)), key=lambda number: len(rows[number].prompt))
        for start in range(0, len(order), self._slots):
            chosen = order[start : start + self._slots]
            texts = self._generate([rows[number] for number in chosen], max_new_tokens)
            for number, tokens in zip(chosen, texts, strict=True):
                found[number] = tokens
                if on_finished is not None:
                    on_finished(number, tokens)
        return [found[number] for number in range(len(rows))]

    @torch.no_grad()
    def _generate(self, rows: Sequence[TextRow], max_new_tokens: int) -> list[tuple[int, ...]]:
        ids, mask = self._pad([row.prompt for row in rows], left=True)
        with steered_model(self._model, [row.steering for row in rows]):
            out = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
            )
        ends = set(end_tokens(self._model))
        return [_until_end(tokens, ends) for tokens in out[:, ids.shape[1] :].tolist()]

    def _pad(self, sequences: Sequence[tuple[int, ...]], *, left: bool) -> tuple[Tensor, Tensor]:
        """Return token numbers and mask [B, T]."""
        side = "left" if left else "right"
        rows = [torch.tensor(tokens) for tokens in sequences]
        ids, mask = (
            pad_sequence(values, batch_first=True, padding_side=side).to(input_device(self._model))
            for values in (rows, [torch.ones_like(row) for row in rows])
        )
        return ids, mask


def _prompt_length(branch: TokenBranch) -> int:
    """Return the prompt length that lets the hook steer from the branch's first steered token on."""
    includes_last = branch.steering is not None and branch.steering.where != "generated"
    return len(branch.trunk) + branch.first_steered + includes_last


def _until_end(tokens: Sequence[int], ends: set[int]) -> tuple[int, ...]:
    """Cut after the first end token."""
    end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tuple(tokens[: end + 1])
