"""Requests for a generation and their results, without torch.

A request is a prompt and the variant of the model that is to continue it.  Its `key` names it: sampling noise
depends on (seed, key, position) alone, so a request gets the same tokens in any slot, batch or order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.ground.errors import BadInput

Finished = Literal["eos", "length", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Continue `prompt` with a variant of the model (None: the plain model), up to `max_new_tokens`.

    The first `shared` tokens of the prompt run the plain model whatever the variant, and are computed once
    for all requests that begin with the same ones.  Equal prompts of the plain model need not say so.
    """

    prompt: tuple[int, ...]
    variant: int | None = None
    sign: float = 1
    key: int = 0
    max_new_tokens: int | None = None
    shared: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The tokens that followed a prompt, the end token or stop sequence included, and why they end."""

    request: Request
    tokens: tuple[int, ...]
    finished: Finished


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationProgress:
    """How far a generation is; `num_requests` is None where an iterator gives the requests."""

    num_finished: int
    num_requests: int | None
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a generator can hold, and so what a request may ask."""

    max_tokens: int  # prompt and completion together
    vocabulary: int
    num_variants: int

    def check(self, request: Request, number: int, *, max_new_tokens: int) -> int:
        """Return the request's own number of new tokens; BadInput names a request that cannot run."""
        prompt, name = request.prompt, f"request {number}"
        wanted = max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        if not prompt:
            raise BadInput(f"{name} has an empty prompt", hint="give at least one token")
        if wanted < 1:
            raise BadInput(f"{name} asks for {wanted} new tokens", hint="ask for at least 1")
        if len(prompt) + wanted > self.max_tokens:
            raise BadInput(
                f"{name} needs {len(prompt)} + {wanted} tokens; a slot holds {self.max_tokens}",
                hint=f"make the generator with max_tokens={len(prompt) + wanted} or more",
            )
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < self.vocabulary:
                raise BadInput(
                    f"{name} has the token {token}; the vocabulary has {self.vocabulary}",
                    hint="encode the prompt with this model's tokenizer",
                )
        if request.variant is not None and not 0 <= request.variant < self.num_variants:
            raise BadInput(
                f"{name} asks for variant {request.variant} of {self.num_variants}",
                hint="number variants from 0, or give None for the plain model",
            )
        if not request.sign or not math.isfinite(request.sign):
            raise BadInput(f"{name} has sign {request.sign}", hint="give 1 or -1, or a multiple of it")
        if not 0 <= request.key < 1 << 63:
            raise BadInput(f"{name} has the key {request.key}", hint="give a number from 0 to 2**63 - 1")
        if not 0 <= request.shared < len(prompt):
            raise BadInput(
                f"{name} shares {request.shared} of {len(prompt)} prompt tokens",
                hint="share at least 0 tokens, and never the last one",
            )
        return wanted


def first_stop(tokens: Sequence[int], stops: Sequence[tuple[int, ...]], *, since: int = 0) -> int | None:
    """Return where the earliest stop sequence that ends after `since` tokens ends; None without one."""
    if not stops:
        return None
    for end in range(since + 1, len(tokens) + 1):
        if any(len(stop) <= end and tuple(tokens[end - len(stop) : end]) == stop for stop in stops):
            return end
    return None
