"""Adding a task is adding a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.adapters.tasks.data_rows import DataOptions
from flatout.engines.adapters.tasks.known import known_tasks, naming_task_files, task_named
from flatout.engines.adapters.tasks.task import encode_all
from flatout.ground.errors import BadInput
from tests.support.adapters import tiny_tokenizer

OWN = {"sentiment", "qa", "summarisation", "code", "translation"}
KINDS = {"classification", "regression", "similarity"}

SIXTH = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flatout.engines.adapters.tasks.generation import GenerationTask


@dataclass(frozen=True, kw_only=True)
class Shout(GenerationTask):
    """The same text twice."""

    name: ClassVar[str] = "shout"
    inputs: ClassVar[tuple[str, ...]] = ("text",)
    answers: ClassVar[tuple[str, ...]] = ("loud",)

    def text_scores(self, said, records):
        return {}

    def generated_row(self, draw):
        word = f"word {draw.randrange(9999)}"
        return {"text": word, "loud": f"{word} word"}
'''


@pytest.fixture(autouse=True)
def loud_package_is_forgotten() -> Iterator[None]:
    sys.modules.pop("loud_package", None)
    yield
    sys.modules.pop("loud_package", None)


def test_five_tasks_and_three_kinds_come_with_the_product() -> None:
    tasks = known_tasks()
    assert set(tasks) == OWN | KINDS
    metrics = {"accuracy", "f1", "token_accuracy", "explained", "spearman"}
    assert {task.metric for task in tasks.values()} == metrics


def test_a_sixth_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "shout.py").write_text(SIXTH)
    (tmp_path / "_notes.py").write_text("raise RuntimeError")
    assert set(known_tasks(tmp_path)) == {*OWN, *KINDS, "shout"}
    assert set(known_tasks()) == OWN | KINDS
    task = task_named("shout", folder=tmp_path, max_target_length=7)
    splits = task.records(DataOptions(source="generated", num_train=30))
    assert len(splits.train) == 30
    examples, _ = encode_all(task, splits.train, tiny_tokenizer(), max_length=16, training=True)
    batch = task.collate(examples, adapter=5, pad_id=0)
    assert batch.block.adapter == 5 and batch.count == sum(example.num_targets for example in examples)
    assert torch.equal(batch.block.lengths, torch.tensor([len(example.ids) for example in examples]))


@pytest.mark.parametrize("line", ["1 / 0", "import nothing_of_this_name", "def :"])
def test_what_a_file_raises_when_it_is_loaded_is_named_as_its_own(tmp_path: Path, line: str) -> None:
    (tmp_path / "shout.py").write_text(f"import torch\n{line}\n")
    with pytest.raises(BadInput, match=r"importing shout\.py raised .*Error: .* \(at .*shout\.py:2\)"):
        known_tasks(tmp_path)


def test_what_a_task_raises_is_named_as_its_own(tmp_path: Path) -> None:
    (tmp_path / "shout.py").write_text(SIXTH.replace("draw.randrange(9999)", "draw.randrange(-1)"))
    task = task_named("shout", folder=tmp_path)
    line = SIXTH.splitlines().index('        word = f"word {draw.randrange(9999)}"') + 1
    said = rf"the task file shout\.py raised ValueError: .* \(at .*shout\.py:{line}\)"
    with pytest.raises(BadInput, match=said) as caught, naming_task_files():
        task.generated(3, seed=0)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ZeroDivisionError), naming_task_files():
        _ = 1 / 0
    with pytest.raises(torch.OutOfMemoryError), naming_task_files():
        raise torch.OutOfMemoryError("the GPU is full")


def test_what_a_task_of_a_package_raises_is_named_as_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, value="loud_package:Shout")
    monkeypatch.syspath_prepend(tmp_path)
    task = task_named("shout")
    broken: Any = None
    with (
        pytest.raises(BadInput, match=r"loud_package\.py raised AttributeError: .*loud_package\.py:\d+\)"),
        naming_task_files(),
    ):
        task.generated_row(broken)


def install(folder: Path, *, value: str) -> None:
    """A package as pip would leave it: a module, and metadata with an entry point."""
    (folder / "loud_package.py").write_text(SIXTH)
    metadata = folder / "loud_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: loud-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[flatout.adapter_tasks]\nshout = {value}\n")


@pytest.mark.parametrize("value", ["loud_package", "loud_package:Shout"])
def test_a_sixth_is_a_package_with_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    install(tmp_path, value=value)
    monkeypatch.syspath_prepend(tmp_path)
    assert set(known_tasks()) == {*OWN, *KINDS, "shout"}
    assert type(task_named("shout")).__module__ == "loud_package"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("loud_package:SIX", "loud-package adds 'shout' to flatout.adapter_tasks, .* cannot be loaded"),
        ("loud_package:dataclass", "shout of flatout.adapter_tasks is not an adapter task"),
    ],
)
def test_an_entry_point_that_is_no_task_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    install(tmp_path, value=value)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match=said):
        known_tasks()


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SIXTH.replace('"shout"', '"qa"'))
    with pytest.raises(BadInput, match=r"two tasks are named 'qa' \(rename that of .*mine\.py"):
        known_tasks(tmp_path)
    with pytest.raises(BadInput, match="is not a folder of tasks"):
        known_tasks(tmp_path / "none")


def test_a_task_that_is_not_finished_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from flatout.adapters import GenerationTask\n\n\nclass Shout(GenerationTask):\n    name = 'shout'\n"
    )
    with pytest.raises(BadInput, match=r"task Shout of .*mine\.py has no generated_row, text_scores"):
        known_tasks(tmp_path)


def test_a_name_that_is_none() -> None:
    with pytest.raises(BadInput, match=r"no task 'sentimant' \(did you mean sentiment\?"):
        task_named("sentimant")
    with pytest.raises(BadInput, match=r"no task 'x' \(known: classification, code, qa, "):
        task_named("x")


def test_a_setting_that_is_none() -> None:
    assert getattr(task_named("code", max_target_length=9), "max_target_length", None) == 9
    with pytest.raises(BadInput, match=r"classification has no setting 'lables' \(did you mean labels\?"):
        task_named("classification", lables=["a", "b"])
    with pytest.raises(BadInput, match=r"sentiment has no setting 'loudness' \(sentiment has none"):
        task_named("sentiment", loudness=3)
