"""Word problems: from a small file made here, and from the real data where it is at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flatout.engines.evolution.rewards.kinds import FormatMatch, answer_in
from flatout.engines.evolution.tasks.gsm8k import Gsm8k
from flatout.engines.evolution.tasks.task import EvolutionTask
from flatout.ground.errors import BadInput
from flatout.testing.evolution_tasks import EvolutionTaskContract


def problems(folder: Path) -> Path:
    path = folder / "problems.jsonl"
    lines = [
        json.dumps({"question": f"{n} and 1,000 more?", "answer": f"It is {n}+1000.\n#### {n + 1000:,}"})
        for n in range(400)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return problems(tmp_path)


class TestGsm8k(EvolutionTaskContract):
    def make_task(self, folder: Path) -> EvolutionTask:
        return Gsm8k(path=problems(folder))


def test_prompts_ask_and_answers_are_numbers(file: Path) -> None:
    task = Gsm8k(path=file, template="Q: {question} A:")
    prompt = task.prompts("train", epoch=0, count=1, seed=0)[0]
    assert prompt.text is not None and prompt.text.startswith("Q: ") and "more? A:" in prompt.text
    number = int(prompt.answer["answer"])
    assert number == int(prompt.text.split()[1]) + 1000
    assert task.reward(f"first 17, then\n#### {number:,}.00", prompt.answer) == 1.0
    assert task.reward(f"#### {number + 1}", prompt.answer) == 0.0


def test_another_reward(file: Path) -> None:
    task = Gsm8k(path=file, reward=FormatMatch(pattern="####"))
    assert task.reward("#### 1", {}) == 1.0


def test_bad_files_and_templates(tmp_path: Path, file: Path) -> None:
    with pytest.raises(BadInput, match=r"has no \{question\}"):
        Gsm8k(path=file, template="solve it")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "x", "answer": "#### 1"}\n{"question": "y", "answer": "none"}\n')
    with pytest.raises(BadInput, match=r"bad\.jsonl:2: the answer 'none' holds no number"):
        Gsm8k(path=bad)


@pytest.fixture
def real_data() -> Path:
    folder = Path(os.environ.get("FLATOUT_DATA", "")) / "gsm8k"
    if "FLATOUT_DATA" not in os.environ or not (folder / "train.jsonl").is_file():
        pytest.skip(
            "needs the GSM8K data: set FLATOUT_DATA to a folder with gsm8k/train.jsonl and test.jsonl"
        )
    return folder


class TestRealProblems(EvolutionTaskContract):
    @pytest.fixture(autouse=True)
    def _real(self, real_data: Path) -> None:
        self.folder = real_data

    def make_task(self, folder: Path) -> EvolutionTask:
        return Gsm8k(path=self.folder / "train.jsonl", heldout=self.folder / "test.jsonl")


def test_the_real_data(real_data: Path) -> None:
    task = Gsm8k(path=real_data / "train.jsonl", heldout=real_data / "test.jsonl")
    heldout = task.prompts("heldout", epoch=0, count=10_000, seed=0)
    published = [
        json.loads(line)
        for line in (real_data / "test.jsonl").read_text(encoding="utf-8").split("\n")
        if line
    ]
    assert len(heldout) == len({" ".join(row["question"].split()) for row in published}) > 1000
    # The published solutions are worth 1, each to its own problem and hardly ever to the next.
    by_question = {row["question"]: row["answer"] for row in published}
    questions = [(p.text or "").partition("Problem: ")[2].removesuffix("\nSolution:") for p in heldout]
    solutions = [by_question[question] for question in questions]
    assert all(task.reward(text, p.answer) == 1.0 for text, p in zip(solutions, heldout, strict=True))
    shifted = sum(task.reward(t, p.answer) for t, p in zip(solutions[1:], heldout, strict=False))
    assert shifted < 0.05 * len(heldout)
    assert all(answer_in(text) is not None for text in solutions)
