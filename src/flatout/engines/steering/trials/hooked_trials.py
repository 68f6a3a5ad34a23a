"""Rows of many trials through a model's own forward, where the packed engine cannot read the model.

A model that is sharded over GPUs, or of a family whose weights the packed engine does not know, still runs in
transformers.  Each row is a sequence of its own and a hook steers it: prompts are computed once for every
trial instead of once, so it is slower, and gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flatout.engines.steering.blocks import input_device
from flatout.engines.steering.trials.packed_trials import ChoiceRow, PackedTrials, TextRow
from flatout.engines.steering.trials.steered_model import Steering, steered_model

if TYPE_CHECKING:
    from torch import Tensor, nn


class HookedTrials(PackedTrials):
    """What `PackedTrials` answers, by forwards of at most `batch_tokens` tokens and `slots` texts."""

    def __init__(self, model: nn.Module, *, slots: int = 64, batch_tokens: int = 8192) -> None:
        self._hooked: Any = model
        self._num_rows, self._batch_tokens = slots, batch_tokens

    def weights_changed(self) -> None:
        """Nothing is kept."""

    def choices(self, rows: Sequence[ChoiceRow]) -> Iterator[tuple[int, float]]:
        """(number of a row, log-odds of its positive answer over its negative one)."""
        asked: list[_Asked] = []
        for row in rows:
            prompt = row.choice.prompt
            head, positive, negative = row.choice.decisive()
            asked += [
                _Asked(
                    tokens=(*prompt, *head, *answer),
                    first=len(prompt) + len(head),
                    prompt=len(prompt),
                    steering=row.steering,
                )
                for answer in (positive, negative)
            ]
        held: dict[int, float] = {}
        for number, value in self._sums(asked):
            held[number] = value
            pair = number // 2
            if 2 * pair in held and 2 * pair + 1 in held:
                yield pair, held.pop(2 * pair) - held.pop(2 * pair + 1)

    def log_likelihoods(
        self, texts: Sequence[tuple[int, ...]], steering: Steering | None
    ) -> list[tuple[float, int]]:
        """(sum of log-probabilities, tokens counted) of each text; its first token is the prompt."""
        asked = [_Asked(tokens=text, first=1, prompt=1, steering=steering) for text in texts]
        found = dict(self._sums(asked))
        return [(found[number], len(text) - 1) for number, text in enumerate(texts)]

    def texts(
        self,
        rows: Sequence[TextRow],
        *,
        max_new_tokens: int,
        on_finished: Callable[[int, tuple[int, ...]], None] | None = None,
    ) -> list[tuple[int, ...]]:
        """The tokens that follow each row's prompt, greedily."""
        found: dict[int, tuple[int, ...]] = {}
        order = sorted(range(len(rows)), key=lambda number: len(rows[number].prompt))
        for start in range(0, len(order), self._num_rows):
            chosen = order[start : start + self._num_rows]
            for number, tokens in zip(
                chosen, self._generated([rows[i] for i in chosen], max_new_tokens), strict=True
            ):
                found[number] = tokens
                if on_finished is not None:
                    on_finished(number, tokens)
        return [found[number] for number in range(len(rows))]

    @torch.no_grad()
    def _generated(self, rows: Sequence[TextRow], max_new_tokens: int) -> list[tuple[int, ...]]:
        ids, mask = self._padded([row.prompt for row in rows], left=True)
        ends = self._hooked.generation_config.eos_token_id
        stops = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
        with steered_model(self._hooked, [row.steering for row in rows]):
            out = self._hooked.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return [_until(tokens, stops) for tokens in out[:, ids.shape[1] :].tolist()]

    @torch.no_grad()
    def _sums(self, asked: Sequence[_Asked]) -> Iterator[tuple[int, float]]:
        """(number, sum of the log-probabilities from its first asked token on), longest first."""
        order = sorted(range(len(asked)), key=lambda number: -len(asked[number].tokens))
        while order:
            count = max(1, self._batch_tokens // len(asked[order[0]].tokens))
            chosen, order = order[:count], order[count:]
            batch = [asked[number] for number in chosen]
            ids, mask = self._padded([one.tokens for one in batch], left=False)
            with steered_model(
                self._hooked,
                [one.steering for one in batch],
                prompt_lengths=[one.prompt for one in batch],
            ):
                logits: Tensor = self._hooked(input_ids=ids, attention_mask=mask).logits
            log_probabilities = logits[:, :-1].float().log_softmax(-1)
            taken = log_probabilities.gather(-1, ids[:, 1:, None].to(logits.device))[..., 0].double().cpu()
            for place, (number, one) in enumerate(zip(chosen, batch, strict=True)):
                yield number, float(taken[place, one.first - 1 : len(one.tokens) - 1].sum())

    def _padded(self, sequences: Sequence[tuple[int, ...]], *, left: bool) -> tuple[Tensor, Tensor]:
        """Token numbers and mask [B, T]."""
        longest = max(map(len, sequences))
        ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(sequences):
            place = slice(longest - len(tokens), None) if left else slice(len(tokens))
            ids[row, place], mask[row, place] = torch.tensor(tokens), 1
        device = input_device(self._hooked)
        return ids.to(device), mask.to(device)


class _Asked:
    """A sequence whose tokens from `first` on are judged, and whose prompt is so long."""

    __slots__ = ("first", "prompt", "steering", "tokens")

    def __init__(
        self, *, tokens: tuple[int, ...], first: int, prompt: int, steering: Steering | None
    ) -> None:
        self.tokens, self.first, self.prompt, self.steering = tokens, first, prompt, steering


def _until(tokens: Sequence[int], stops: set[int]) -> tuple[int, ...]:
    """Up to the first end token, which is kept."""
    end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens) - 1)
    return tuple(tokens[: end + 1])
