"""Names, files and options become tasks; what does not is said in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.evolution.rewards.kinds import ExactMatch, FormatMatch
from flatout.engines.evolution.tasks.arithmetic import Arithmetic
from flatout.engines.evolution.tasks.countdown import Countdown
from flatout.engines.evolution.tasks.digit_copy import DigitCopy
from flatout.engines.evolution.tasks.find_task import GROUP, find_task, known_tasks
from flatout.engines.evolution.tasks.gsm8k import Gsm8k
from flatout.engines.evolution.tasks.prompt_file import PromptFile
from flatout.engines.evolution.tasks.translation import SentenceTranslation
from flatout.ground.errors import BadInput


@pytest.fixture
def files(tmp_path: Path) -> Path:
    def write(name: str, *fields: str) -> None:
        lines = [json.dumps({field: f"{field} {n}" for field in fields}) for n in range(60)]
        (tmp_path / name).write_text("\n" + "\n".join(lines), encoding="utf-8")

    write("problems.jsonl", "question", "answer", "level")
    write("sentences.jsonl", "source", "target")
    write("other.jsonl", "text", "label")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "broken.jsonl").write_text("\n{\n")
    (tmp_path / "empty.jsonl").write_text("")
    return tmp_path


def test_generated_tasks() -> None:
    assert find_task("digit-copy") == DigitCopy()
    assert find_task("arithmetic", digits=3) == Arithmetic(digits=3)
    assert find_task("countdown", num_numbers="3", format_credit="0") == Countdown(
        num_numbers=3, format_credit=0.0
    )
    assert find_task("digit-copy", token_ids="true", length="6") == DigitCopy(token_ids=True, length=6)
    assert set(known_tasks()) == {"digit-copy", "arithmetic", "countdown", "prompts", "gsm8k", "translation"}


def test_files_by_their_fields(files: Path) -> None:
    assert isinstance(find_task(files / "problems.jsonl"), Gsm8k)
    task = find_task(str(files / "sentences.jsonl"), reward="exact")
    assert isinstance(task, SentenceTranslation) and task.reward == ExactMatch()


def test_a_table_is_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    path.write_text("prompt,total\n" + "".join(f"{n}+{n}=,{2 * n}\n" for n in range(40)))
    task = find_task(path, reward="numeric")
    assert isinstance(task, PromptFile)
    prompt = task.prompts("heldout", epoch=0, count=1, seed=0)[0]
    assert prompt.text is not None and task.reward(prompt.answer["total"], prompt.answer) == 1.0
    assert int(prompt.answer["total"]) == 2 * int(prompt.text.split("+")[0])


def test_files_by_name_and_path(files: Path) -> None:
    path = str(files / "problems.jsonl")
    task = find_task("gsm8k", path=path, max_new_tokens="32", reward="format:####")
    assert isinstance(task, Gsm8k) and task.max_new_tokens == 32
    assert task.reward == FormatMatch(pattern="####")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digitcopy", {}, "no task 'digitcopy'.*did you mean digit-copy"),
        ("chess", {}, "known: digit-copy, arithmetic, countdown, prompts, gsm8k, translation"),
        ("gsm8k", {}, "needs a file"),
        ("digit-copy", {"size": 3}, "no option 'size'.*known: length, token_ids, first_token_id"),
        ("digit-copy", {"length": "four"}, "length='four' of the task digit-copy cannot be read as int"),
        ("digit-copy", {"token_ids": "maybe"}, "neither true nor false"),
        ("digit-copy", {"length": 2.5}, "length=2.5 of the task digit-copy is not int"),
        ("digit-copy", {"length": True}, "length=True of the task digit-copy is not int"),
        ("prompts", {"path": "x", "stop": 3}, "stop=3 of the task prompts is not a text or a list of texts"),
        ("prompts", {"path": "x", "stop": [3]}, r"stop=\[3\] of the task prompts is not a text or a list"),
        ("prompts", {"path": "x"}, "the task prompts needs the option reward .--task-option reward=VALUE"),
        ("gsm8k", {"path": "absent.jsonl"}, "absent.jsonl does not exist"),
        ("gsm8k", {"_train": ()}, "no option '_train'"),
        ("other.jsonl", {}, "other.jsonl:2 has text, label: it fits no task.*question and answer"),
        ("list.jsonl", {}, "list.jsonl, item 1 has int"),
        ("broken.jsonl", {}, "broken.jsonl:2 is not JSON"),
        ("empty.jsonl", {}, "empty.jsonl is empty"),
    ],
)
def test_what_names_no_task(files: Path, name: str, options: dict[str, Any], message: str) -> None:
    place = files / name if name.endswith(".jsonl") else name
    with pytest.raises(BadInput, match=message) as caught:
        find_task(place, **options)
    assert "\n" not in str(caught.value)


RHYMES = """
from dataclasses import dataclass
from typing import ClassVar
from flatout.evolution import GeneratedTask, Prompt

@dataclass(frozen=True, kw_only=True)
class Rhymes:
    length: int = 2
    name: ClassVar[str] = "rhymes"
    max_new_tokens: ClassVar[int] = 4
    stop: ClassVar[tuple[str, ...]] = ()

    @property
    def reward(self):
        return score

    def prompts(self, split, *, epoch, count, seed):
        keys = [f"{split} {number}" for number in range(count)]
        return [Prompt(text=key * self.length, answer={"end": key[-1]}, key=key) for key in keys]

def score(completion, answer):
    return float(completion.endswith(answer["end"]))

Nothing = 3
"""


def test_a_class_of_the_users_is_named_by_module_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rhymes.py").write_text(RHYMES)
    monkeypatch.setattr(sys, "path", [*sys.path])
    task = find_task(f"{tmp_path}/my_rhymes.py:Rhymes", length="3")
    assert (task.name, task.prompts("train", epoch=0, count=1, seed=0)[0].text) == ("rhymes", "train 0" * 3)
    assert find_task("my_rhymes:Rhymes", length=3) == task
    with pytest.raises(BadInput, match="'my_rhymes:Nothing' is not a dataclass with prompts"):
        find_task("my_rhymes:Nothing")
    with pytest.raises(BadInput, match=r"no file .*absent\.py for the task"):
        find_task(f"{tmp_path}/absent.py:Rhymes")
    with pytest.raises(BadInput, match=r"no module 'no_such_module' .*the task's file"):
        find_task("no_such_module:Rhymes")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("    length: int = 2", "    length: int", "the task faulty:Rhymes needs the option length"),
        ("    stop: ClassVar", "    halt: ClassVar", "the task faulty:Rhymes has no stop"),
        ("return score", "return 3", "the reward of the task faulty:Rhymes is not a function"),
        ("return score", "return SCORES", r"faulty:Rhymes raised NameError: .* \(at .*/faulty\.py:15\)"),
        (
            "    @property",
            "    def __post_init__(self):\n        import json; json.loads('{')\n    @property",
            r"the task faulty:Rhymes raised json\S*JSONDecodeError: .* \(at .*/faulty\.py:14\)",
        ),
    ],
)
def test_a_fault_of_a_users_class_is_named_as_theirs(
    before: str, after: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert before in RHYMES
    (tmp_path / "faulty.py").write_text(RHYMES.replace(before, after))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(BadInput, match=message) as caught:
        find_task(f"{tmp_path}/faulty.py:Rhymes")
    assert "\n" not in str(caught.value)


def test_an_installed_package_adds_a_task_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A distribution as pip leaves it: nothing of the product is edited."""
    (tmp_path / "poetry_tasks.py").write_text(RHYMES)
    metadata = tmp_path / "poetry_tasks-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: poetry-tasks\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nrhymes = poetry_tasks:Rhymes\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_task("rhymes", length="5").length == 5  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match=r"no option 'depth'.*known: length"):
        find_task("rhymes", depth=1)
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\narithmetic = poetry_tasks:Rhymes\n")
    with pytest.raises(BadInput, match="two tasks are named 'arithmetic'"):
        find_task("rhymes")


def test_a_task_needs_no_torch() -> None:
    code = (
        "import sys; from flatout.engines.evolution.tasks.find_task import find_task;"
        "find_task('countdown').prompts('train', epoch=0, count=2, seed=0);"
        "from flatout.engines.evolution.rewards import pool; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
