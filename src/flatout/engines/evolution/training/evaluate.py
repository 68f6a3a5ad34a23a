"""How good the weights are, and how fast plain inference is beside them.

Held-out prompts are answered by the weights themselves, without noise, with the training's own reward.  The
rate of plain inference is what the share in the log is a share of: the same number of rows, prompts of the
same task, the same engine without any variant, timed after a warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flatout.multiplex.decode.generator import Generator
from flatout.multiplex.decode.requests import Completion, Request

if TYPE_CHECKING:
    from flatout.engines.evolution.rewards.pool import RewardPool, RewardScores
    from flatout.engines.evolution.tasks import Prompt
    from flatout.engines.evolution.training.texts import Texts
    from flatout.multiplex.decode.sampling import Sampling
    from flatout.multiplex.models.decoder import Decoder


def score_texts(
    pool: RewardPool, texts: Texts, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> RewardScores:
    """The reward of each completion, given with the prompt it belongs to."""
    return pool.score(
        (texts.text(completion.tokens), prompt.answer)
        for prompt, completion in zip(prompts, completions, strict=True)
    )


def mean_score(scores: RewardScores) -> float | None:
    """The mean over the rows whose reward could be computed; None without any."""
    known = [value for value in scores.values if value is not None]
    return sum(known) / len(known) if known else None


def plain_tokens_per_s(
    decoder: Decoder,
    prompts: Sequence[tuple[int, ...]],
    *,
    slots: int,
    max_tokens: int,
    max_new_tokens: int,
    sampling: Sampling,
    ends: Sequence[int],
) -> float:
    """Tokens per second of the model alone, over `prompts`; its cache is given back afterwards."""
    generator = Generator(decoder, slots=slots, max_tokens=max_tokens, sampling=sampling, eos=ends)
    requests = [Request(prompt=prompt, key=key) for key, prompt in enumerate(prompts)]

    def run() -> int:
        done = generator.generate(requests, max_new_tokens=max_new_tokens)
        wait_for(decoder.device)
        return sum(len(each.tokens) for each in done)

    run()
    began_s = time.perf_counter()
    num_tokens = run()
    return num_tokens / (time.perf_counter() - began_s)


def wait_for(device: torch.device) -> None:
    """Let a GPU finish what it was given, so that the clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
