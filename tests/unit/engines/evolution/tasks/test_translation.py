"""Sentences and their references, scored by BLEU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.engines.evolution.rewards.bleu import Bleu
from flatout.engines.evolution.rewards.kinds import RewardOfRows
from flatout.engines.evolution.tasks.find_task import find_task
from flatout.engines.evolution.tasks.task import EvolutionTask
from flatout.engines.evolution.tasks.translation import SentenceTranslation
from flatout.ground.errors import BadInput
from flatout.testing.evolution_tasks import EvolutionTaskContract


def sentences(folder: Path) -> Path:
    path = folder / "sentences.jsonl"
    lines = [
        json.dumps({"source": f"Das ist der Satz Nummer {n}.", "target": f"This is sentence number {n}."})
        for n in range(300)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return sentences(tmp_path)


class TestTranslation(EvolutionTaskContract):
    def make_task(self, folder: Path) -> EvolutionTask:
        return SentenceTranslation(path=sentences(folder))


def test_the_first_line_is_scored(file: Path) -> None:
    task = SentenceTranslation(path=file)
    prompt = task.prompts("train", epoch=0, count=1, seed=0)[0]
    target = prompt.answer["target"]
    assert prompt.text is not None and "Das ist der Satz" in prompt.text and target not in prompt.text
    reward = task.reward
    assert isinstance(reward, RewardOfRows)
    completions = [f" {target}\nSource: more", "This is a sentence.", "\n"]
    scores = [reward(completion, prompt.answer) for completion in completions]
    assert scores[0] == pytest.approx(1.0) and 0 < scores[1] < 0.8 and scores[2] == 0.0
    rows = [(completion, prompt.answer) for completion in completions]
    assert reward.score_rows(rows) == pytest.approx(scores)
    assert reward == Bleu(first_line=True)


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"source": "x", "target": null}\n')
    with pytest.raises(BadInput, match=r"bad\.jsonl:1: 'target' is None"):
        SentenceTranslation(path=path)


@pytest.mark.parametrize("reward", ["exact", "numeric", "bleu"])
def test_every_reward_by_name_reads_the_reference(reward: str, file: Path) -> None:
    task = find_task(file, reward=reward)
    prompt = task.prompts("train", epoch=0, count=1, seed=0)[0]
    assert task.reward(prompt.answer["target"], prompt.answer) == pytest.approx(1.0)
    assert task.reward("Nothing of it.", prompt.answer) < 0.1


def test_a_reference_that_the_reward_cannot_use_is_named_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "words.jsonl"
    path.write_text('{"source": "eins", "target": "1"}\n{"source": "zwei", "target": "two"}\n')
    with pytest.raises(
        BadInput, match=r"words\.jsonl:2: the expected answer 'two' holds no number"
    ) as caught:
        find_task(path, reward="numeric")
    assert "\n" not in str(caught.value)
