"""Philox4x32-10: random words as a pure function of a counter and a key.

A generator with a state gives its numbers in order, so the millionth requires drawing all the others first.
Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) has no state: ten rounds of two
32-bit products mix a 128-bit counter under a 64-bit key into 128 random bits.  Any process can draw any part,
and integers give the same bits on every device.

`philox` is written once for numpy and torch.  Words are 32-bit numbers held in 64-bit lanes (uint64 of numpy,
int64 of torch, which has no unsigned products); a product of two fills the lane exactly, and its bits are
right whether the lane has a sign or not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flatout.ground.errors import BadInput

Words = TypeVar("Words", NDArray[np.uint64], Tensor)

ROUNDS = 10
WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[Words, Words, Words, Words], *, key: Sequence[int] | Sequence[Tensor]
) -> tuple[Words, Words, Words, Words]:
    """Return four random words for each counter, whose four words have one shape."""
    c0: Any  # what the two libraries say of an operator differs
    c2: Any
    c0, c1, c2, c3 = counter
    k0: Any
    k1: Any
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        # In place on what this round allocated: each pass over memory counts.
        c0 = second >> 32
        c0 &= WORD  # clears what the shift of a signed lane drags in
        c0 ^= c1
        c0 ^= k0
        c2 = first >> 32
        c2 &= WORD
        c2 ^= c3
        c2 ^= k1
        second &= WORD
        first &= WORD
        c1, c3 = second, first
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def stream_key(seed: int, *names: str) -> tuple[int, int]:
    """Return the key of the stream of a seed and some names; the same in every process and version."""
    if not 0 <= seed < 1 << 64:
        raise BadInput(f"seed {seed} is not a 64-bit number", hint="give 0 to 2**64 - 1")
    text = "\0".join(names).encode()
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
