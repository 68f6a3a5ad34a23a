"""What the decoder writes does not depend on how: at once, token by token, alone or in a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.engines.adapters.lora.chunked_loss import chunked_cross_entropy
from flatout.engines.adapters.tasks.decoder import TextDecoder, heads_for
from flatout.ground.errors import BadInput

VOCABULARY, WIDTH, END, PAD = 40, 16, 3, 0


def tiny_decoder(*, seed: int = 0, max_length: int = 12) -> TextDecoder:
    torch.manual_seed(seed)
    embedding = torch.randn(VOCABULARY, WIDTH)
    return TextDecoder(embedding, end_id=END, pad_id=PAD, num_heads=2, max_length=max_length)


def drawn_states(rows: int, length: int, *, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, length, WIDTH, generator=random)
    return states, torch.randint(1, length + 1, (rows,), generator=random)


@torch.no_grad()
def written_anew(decoder: TextDecoder, start: Tensor, states: Tensor, *, most: int) -> list[int]:
    """Greedy writing of one row that computes everything again for each token and keeps nothing."""
    said: list[int] = []
    while len(said) < most:
        ids = torch.tensor([[*said, PAD]])
        hidden = decoder(start, ids, states[None], torch.tensor([len(states)]))[0, -1]
        token = int((hidden @ decoder.embedding.T).argmax())
        if token == END:
            break
        said.append(token)
    return said


@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 99))
def test_batches_with_a_cache_write_what_single_rows_without_one_do(
    rows: int, length: int, seed: int
) -> None:
    decoder = tiny_decoder(seed=seed).eval()
    start = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    states, lengths = drawn_states(rows, length, seed=seed)
    together = decoder.generate(start, states, lengths, max_new_tokens=9)
    for row in range(rows):
        alone = written_anew(decoder, start, states[row, : lengths[row]], most=9)
        assert together[row].tolist() == alone + [PAD] * (together.shape[1] - len(alone))


def test_a_bias_makes_a_word_likely_and_the_end_token_ends() -> None:
    decoder = tiny_decoder().eval()
    states, lengths = drawn_states(2, 4, seed=0)
    bias = torch.zeros(VOCABULARY)
    bias[7] = 1e4
    said = decoder.generate(torch.zeros(WIDTH), states, lengths, max_new_tokens=5, bias_V=bias)
    assert said.tolist() == [[7] * 5] * 2
    bias[END] = 1e5
    assert decoder.generate(torch.zeros(WIDTH), states, lengths, max_new_tokens=5, bias_V=bias).shape == (
        2,
        0,
    )


def test_a_place_sees_neither_later_tokens_nor_padding() -> None:
    decoder = tiny_decoder().eval()
    states, _ = drawn_states(1, 6, seed=1)
    lengths, start = torch.tensor([4]), torch.zeros(WIDTH)
    ids = torch.tensor([[5, 6, 7, 8]])
    before = decoder(start, ids, states, lengths)
    other_ids, other_states = ids.clone(), states.clone()
    other_ids[0, 2] = 20
    other_states[0, 4:] = 1e3
    after = decoder(start, other_ids, other_states, lengths)
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert not torch.allclose(after[:, 3], before[:, 3])
    seen = states.clone()
    seen[0, 3, 0] += 5
    assert not torch.allclose(decoder(start, ids, seen, lengths)[:, 0], before[:, 0])


def test_all_that_trains_gets_a_gradient_and_the_vocabulary_is_not_part_of_it() -> None:
    decoder = tiny_decoder()
    states, lengths = drawn_states(3, 5, seed=2)
    states.requires_grad_()
    ids = torch.randint(4, VOCABULARY, (3, 6))
    said = decoder(torch.zeros(WIDTH), ids, states, lengths)
    chunked_cross_entropy(said.flatten(0, 1), decoder.embedding, ids.flatten()).backward()
    assert states.grad is not None and states.grad.any()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
    assert "embedding" not in decoder.state_dict()
    assert not decoder.embedding.requires_grad


def test_the_vocabulary_is_the_encoders_own_memory() -> None:
    embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
    decoder = TextDecoder(embedding.weight, end_id=END, pad_id=PAD)
    assert decoder.embedding.data_ptr() == embedding.weight.data_ptr()


def test_it_learns_to_copy() -> None:
    decoder = tiny_decoder(max_length=4).train()
    start = torch.nn.Parameter(torch.zeros(WIDTH))
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW([start, *decoder.parameters()], lr=5e-3)
    for _ in range(150):
        ids = torch.randint(4, VOCABULARY, (32, 3), generator=random)
        states = decoder.embedding[ids] + torch.eye(WIDTH)[:3] * 3
        said = decoder(start, ids, states, torch.full((32,), 3))
        loss = chunked_cross_entropy(said.flatten(0, 1), decoder.embedding, ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids = torch.randint(4, VOCABULARY, (32, 3), generator=random)
    states = decoder.embedding[ids] + torch.eye(WIDTH)[:3] * 3
    said = decoder.eval().generate(start, states, torch.full((32,), 3), max_new_tokens=3)
    assert (said == ids).float().mean() > 0.8


def test_heads_divide_the_width() -> None:
    assert [heads_for(width) for width in (384, 768, 100, 7)] == [6, 12, 1, 1]
    with pytest.raises(BadInput, match="num_heads=3 does not divide the width 16"):
        TextDecoder(torch.zeros(4, 16), end_id=1, pad_id=0, num_heads=3)


def test_a_target_that_is_too_long_is_refused() -> None:
    decoder = tiny_decoder(max_length=4)
    with pytest.raises(BadInput, match="a target of 5 tokens is longer than the decoder's 4"):
        decoder(torch.zeros(WIDTH), torch.zeros(1, 5, dtype=torch.int64), *drawn_states(1, 2, seed=0))
