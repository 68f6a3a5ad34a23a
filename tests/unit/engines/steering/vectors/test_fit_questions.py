"""One extraction, every method; a second one finds everything in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatout.engines.steering.load_model import LoadedModel, load_model
from flatout.engines.steering.questions import Question, read_questions
from flatout.engines.steering.settings import METHODS, SearchSettings, make_settings
from flatout.engines.steering.vectors import methods
from flatout.engines.steering.vectors.fit_questions import extract_questions, fit_questions, save_vectors
from flatout.engines.steering.vectors.steering_vectors import load
from tests.support.steering import tiny_search, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadedModel, list[Question]]:
    folder = write_tiny(tmp_path_factory.mktemp("steering"))
    return folder, load_model(folder / "model"), read_questions(folder / "questions.jsonl")


def settings_in(folder: Path, out: Path, **changes: Any) -> SearchSettings:
    return make_settings(tiny_search(folder, out, **changes))


def ignore(done: int, total: int) -> None:
    pass


def test_every_method_is_fitted_and_written(
    tiny: tuple[Path, LoadedModel, list[Question]], tmp_path: Path
) -> None:
    folder, loaded, questions = tiny
    settings = settings_in(folder, tmp_path, methods=METHODS, layers="1,3")
    made = fit_questions(settings, loaded, questions[:20], on_count=ignore)
    save_vectors(made, tmp_path / "vectors")
    assert set(made) == {path.stem for path in (tmp_path / "vectors").glob("*.safetensors")}
    for name, vectors in made.items():
        assert vectors.layers == (1, 3)
        assert load(tmp_path / "vectors" / f"{name}.safetensors").values.equal(vectors.values)


def test_a_second_extraction_is_read_from_the_store(
    tiny: tuple[Path, LoadedModel, list[Question]], tmp_path: Path
) -> None:
    folder, loaded, questions = tiny
    settings = settings_in(folder, tmp_path, position="-1", store=str(tmp_path / "store"))
    first = extract_questions(settings, loaded, questions[:6], on_count=ignore).values
    handle = loaded.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran again"))
    try:
        second = extract_questions(settings, loaded, questions[:6], on_count=ignore).values
    finally:
        handle.remove()
    assert first.equal(second)


def test_the_settings_know_every_method() -> None:
    assert set(METHODS) == {*methods.METHODS, "random"}
