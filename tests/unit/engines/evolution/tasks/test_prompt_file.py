"""A task of the user's own: a file with prompts and any columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.evolution.rewards.kinds import ExactMatch
from flatout.engines.evolution.rewards.make_reward import BatchReward, WeightedRewards
from flatout.engines.evolution.tasks.find_task import find_task, options_of
from flatout.engines.evolution.tasks.prompt_file import PromptFile
from flatout.engines.evolution.tasks.task import EvolutionTask
from flatout.ground.errors import BadInput
from flatout.testing.evolution_tasks import EvolutionTaskContract


def sums(folder: Path) -> Path:
    path = folder / "sums.jsonl"
    rows = [{"prompt": f"{n} plus {n} is ", "total": 2 * n, "parts": [n, n]} for n in range(400)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def near(prompts: list[str], completions: list[str], total: list[int], **_: Any) -> list[float]:
    return [float(str(wanted) in text) for text, wanted in zip(completions, total, strict=True)]


class TestPromptFile(EvolutionTaskContract):
    def make_task(self, folder: Path) -> EvolutionTask:
        return PromptFile(path=sums(folder), reward=ExactMatch(field="total"))


def test_columns_stay_what_they_are(tmp_path: Path) -> None:
    task = find_task(sums(tmp_path), reward={f"{__name__}:near": 1.0}, stop="\n", max_new_tokens="9")
    assert isinstance(task, PromptFile) and isinstance(task.reward, WeightedRewards)
    assert (task.stop, task.max_new_tokens) == (("\n",), 9)
    prompt = task.prompts("train", epoch=0, count=1, seed=0)[0]
    number = prompt.answer["parts"][0]
    assert prompt.text == f"{number} plus {number} is " and prompt.answer["total"] == 2 * number
    assert task.reward(f"it is {2 * number}", prompt.answer) == 1.0


def test_a_function_itself_may_be_given_and_is_written_down_by_name(tmp_path: Path) -> None:
    task = PromptFile(path=sums(tmp_path), reward=near, stop="END")  # type: ignore[arg-type]
    assert isinstance(task.reward, BatchReward) and task.stop == ("END",)
    kept = json.loads(json.dumps(options_of(task)))
    assert kept["reward"] == {"kind": "BatchReward", "function": f"{__name__}:near"}
    assert kept["path"] == str(tmp_path / "sums.jsonl")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = sums(tmp_path)
    with pytest.raises(BadInput, match="needs the option reward"):
        find_task(path)
    path.write_text('{"prompt": "1"}\n')
    with pytest.raises(BadInput, match=r"sums\.jsonl:1: .*takes 'total'"):
        PromptFile(path=path, reward=near)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="not a list of texts"):
        PromptFile(path=path, reward=ExactMatch(), stop=("",))
    with pytest.raises(BadInput, match="leaves no completion"):
        PromptFile(path=path, reward=ExactMatch(), max_new_tokens=0)
