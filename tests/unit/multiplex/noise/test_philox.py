from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.multiplex.noise.philox import philox, stream_key

# Published with the algorithm (Random123, kat_vectors, philox4x32 10): counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

words = st.integers(0, 2**32 - 1)


def hexadecimal(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_numpy_gives_the_known_answers(counter: str, key: str, answer: str) -> None:
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in hexadecimal(counter))
    k0, k1 = hexadecimal(key)
    assert [int(word[0]) for word in philox((c0, c1, c2, c3), key=(k0, k1))] == hexadecimal(answer)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_torch_gives_the_known_answers(counter: str, key: str, answer: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in hexadecimal(counter))
    k0, k1 = hexadecimal(key)
    assert [int(word) for word in philox((c0, c1, c2, c3), key=(k0, k1))] == hexadecimal(answer)


@given(counter=st.tuples(words, words, words, words), key=st.tuples(words, words))
def test_numpy_and_torch_agree(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    c0, c1, c2, c3 = (np.full(3, word, dtype=np.uint64) for word in counter)
    t0, t1, t2, t3 = (torch.full((3,), word) for word in counter)
    ours = [word.tolist() for word in philox((c0, c1, c2, c3), key=key)]
    assert ours == [word.tolist() for word in philox((t0, t1, t2, t3), key=key)]


def test_the_counter_is_left_as_it_was() -> None:
    c0, c1, c2, c3 = (torch.arange(5) for _ in range(4))
    philox((c0, c1, c2, c3), key=(1, 2))
    assert all(word.tolist() == [0, 1, 2, 3, 4] for word in (c0, c1, c2, c3))


def test_a_key_is_stable_and_its_names_are_apart() -> None:
    assert stream_key(7, "a", "bc") == (0x29D2E53F, 0xF6F333D5)
    keys = {
        stream_key(7, "a", "bc"),
        stream_key(7, "ab", "c"),
        stream_key(8, "a", "bc"),
        stream_key(7, "abc"),
    }
    assert len(keys) == 4


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_has_64_bits(seed: int) -> None:
    with pytest.raises(BadInput, match="64-bit"):
        stream_key(seed, "a")
    stream_key(2**64 - 1, "a")
