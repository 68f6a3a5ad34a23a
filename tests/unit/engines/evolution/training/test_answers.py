"""Scores belong to the prompt they are given with, and plain inference has a rate."""

from __future__ import annotations

import torch

from flatout.engines.evolution.rewards.pool import RewardPool, RewardScores
from flatout.engines.evolution.tasks.find_task import find_task
from flatout.engines.evolution.training.answers import plain_tokens_per_s, score_texts, wait_for
from flatout.engines.evolution.training.models import Texts
from flatout.multiplex.decode.requests import Completion, Request
from flatout.multiplex.decode.sampling import Sampling
from flatout.multiplex.models.families import read_decoder
from tests.support.evolution import tiny_llama


def test_each_completion_is_scored_with_its_own_prompt() -> None:
    task = find_task("digit-copy", length=2, token_ids=True)
    prompts = task.prompts("train", epoch=0, count=3, seed=0)
    digits = [tuple(int(digit) for digit in prompt.answer["token_ids"].split()) for prompt in prompts]
    given = [digits[0], (digits[1][0], 15), (15, 15)]
    completions = [Completion(request=Request(prompt=(1,)), tokens=each, finished="length") for each in given]
    with RewardPool(task.reward, workers=1, timeout_s=10) as pool:
        scores = score_texts(pool, Texts(None), prompts, completions)
    assert scores.values == (1.0, 0.5, 0.0)
    assert scores.mean == 0.5


def test_a_failed_reward_is_no_part_of_the_mean() -> None:
    assert RewardScores(values=(1.0, None, 0.0), failures=()).mean == 0.5
    assert RewardScores(values=(None,), failures=()).mean is None


def test_plain_inference_has_a_rate() -> None:
    rate = plain_tokens_per_s(
        read_decoder(tiny_llama()),
        [(1, 2), (3,), (4,)],
        slots=2,
        max_tokens=16,
        max_new_tokens=3,
        sampling=Sampling(),
        ends=(),
    )
    assert rate > 0
    wait_for(torch.device("cpu"))
