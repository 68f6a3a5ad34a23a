from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.multiplex.decode.steppers import SlotState
from flatout.multiplex.models.families import read_decoder
from tests.support.kernels import DEVICE, Numbers, needs_device
from tests.support.multiplex import fusible_model

pytestmark = needs_device


@functools.cache
def shared() -> Any:
    return fusible_model().to(DEVICE)


def chosen(logits: Tensor, state: SlotState) -> None:
    """What the hand-written step does of logits [rows, vocabulary]."""
    from flatout.multiplex.kernels.step import DecodeStep

    step = DecodeStep(read_decoder(shared()), state)
    step.best(logits)
    step.append()


def running(rows: int, *, eos: tuple[int, ...]) -> SlotState:
    state = SlotState.empty(read_decoder(shared()), slots=rows, max_tokens=20, eos=eos)
    state.alive[: rows - 1] = True
    state.position.copy_(torch.arange(rows) + 3)
    state.limit.copy_(torch.arange(rows) % 3 + 1)
    return state


@pytest.mark.parametrize("vocabulary", [5, 77, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eos", [(), (2, 4)])
def test_it_is_argmax_and_the_states_own_advance(
    vocabulary: int, dtype: torch.dtype, eos: tuple[int, ...]
) -> None:
    numbers = Numbers(vocabulary)
    ours, theirs = running(9, eos=eos), running(9, eos=eos)
    for step in range(3):
        logits = numbers.normal(9, vocabulary, dtype=dtype)
        logits[step] = 2.0  # a tie of all tokens
        chosen(logits, ours)
        theirs.advance(logits.argmax(-1))
        for name in ("token", "position", "alive", "reason", "count"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    counts = ours.count.tolist()
    for row, count in enumerate(counts):
        assert torch.equal(ours.emitted[row, :count], theirs.emitted[row, :count])
    assert max(counts) == 3 and counts[-1] == 0


def test_a_row_that_breaks_down_chooses_a_token_all_the_same() -> None:
    """A number beyond the vocabulary would have the next step read outside of the embedding."""
    logits = Numbers().normal(3, 77)
    logits[0], logits[1, :40] = torch.nan, torch.nan
    state = running(3, eos=())
    chosen(logits, state)
    assert 0 <= int(state.token[0]) < 77
    assert int(state.token[1]) == 40 + int(logits[1, 40:].argmax())
