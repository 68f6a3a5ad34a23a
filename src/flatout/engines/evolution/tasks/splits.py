"""Which prompts are for training and which are held out, and in which order they come.

A prompt's split is a hash of its key: one in `HELD_OUT_ONE_IN` is held out.  So the two never meet, whatever
the seed, and a prompt that is found in two places of a file is on one side of the line.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from flatout.engines.evolution.tasks.task import Prompt, Split
from flatout.errors import BadInput

HELD_OUT_ONE_IN = 8
# Draws without a fresh prompt before a generator counts as exhausted.  A split that still had one prompt in
# a thousand to give would be missed once in e^10 times, and costs a repetition.
MOST_DRAWS = 10_000


def split_of(key: str) -> Split:
    """The split that a prompt belongs to."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0 else "train"


def draw_prompts(
    draw: Callable[[random.Random], Prompt], *, name: str, split: Split, epoch: int, count: int, seed: int
) -> list[Prompt]:
    """`count` prompts of a split from a generator of random ones, as `Task.prompts` promises them."""
    stream = random.Random(f"{name} {seed} {split}" if split == "heldout" else f"{name} {seed} {epoch}")
    prompts: list[Prompt] = []
    seen: set[str] = set()
    while len(prompts) < count:
        prompt = _fresh(draw, stream, split=split, seen=seen)
        if prompt is not None:
            seen.add(prompt.key)
            prompts.append(prompt)
        elif not prompts:
            raise BadInput(
                f"{name} has no prompt for the split {split!r}", hint="make its problems larger, or longer"
            )
        elif split == "heldout":
            break
        else:
            seen.clear()
    return prompts


def _fresh(
    draw: Callable[[random.Random], Prompt], stream: random.Random, *, split: Split, seen: set[str]
) -> Prompt | None:
    for _ in range(MOST_DRAWS):
        prompt = draw(stream)
        if prompt.key not in seen and split_of(prompt.key) == split:
            return prompt
    return None


def ordered_prompts(
    prompts: Sequence[Prompt], *, split: Split, epoch: int, count: int, seed: int
) -> list[Prompt]:
    """`count` of the given prompts, all of one split, as `Task.prompts` promises them.

    Training goes through all of them in a random order, then through another one: epoch e takes up where
    e - 1 ended, given that both ask for the same count.
    """
    if split == "heldout":
        return [prompts[place] for place in _order(len(prompts), seed=seed, label="heldout")[:count]]
    taken: list[Prompt] = []
    position = epoch * count
    while prompts and len(taken) < count:
        lap, start = divmod(position, len(prompts))
        order = _order(len(prompts), seed=seed, label=f"lap {lap}")[start : start + count - len(taken)]
        taken += [prompts[place] for place in order]
        position += len(order)
    return taken


def _order(size: int, *, seed: int, label: str) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed} {label}").shuffle(order)
    return order
