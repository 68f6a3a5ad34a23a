"""One extraction, every method; a second one finds everything in the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.engines.steering.loading import Opened, open_model
from flatout.engines.steering.questions import Question, read_questions
from flatout.engines.steering.vectors.fit_questions import (
    check_methods,
    extract_questions,
    fit_methods,
    known_methods,
    save_vectors,
)
from flatout.engines.steering.vectors.steering_vectors import load
from flatout.errors import BadInput
from tests.support.steering import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Opened, list[Question]]:
    folder = write_tiny(tmp_path_factory.mktemp("steering"))
    return open_model(folder / "model", device="cpu"), read_questions(folder / "questions.jsonl")


def test_every_method_is_fitted_and_written(tiny: tuple[Opened, list[Question]], tmp_path: Path) -> None:
    opened, questions = tiny
    made = fit_methods(
        opened,
        questions[:20],
        methods=known_methods(),
        layers=[1, 3],
        position="last",
        store=None,
        seed=0,
    )
    save_vectors(made, tmp_path / "vectors")
    assert set(made) == {path.stem for path in (tmp_path / "vectors").glob("*.safetensors")}
    for name, vectors in made.items():
        assert vectors.layers == (1, 3)
        assert load(tmp_path / "vectors" / f"{name}.safetensors").values.equal(vectors.values)


def test_a_second_extraction_is_read_from_the_store(
    tiny: tuple[Opened, list[Question]], tmp_path: Path
) -> None:
    opened, questions = tiny

    def extracted() -> object:
        found = extract_questions(
            opened, questions[:6], layers="all", position="-1", store=tmp_path / "store"
        )
        return found.values

    first = extracted()
    handle = opened.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran again"))
    try:
        second = extracted()
    finally:
        handle.remove()
    assert first.equal(second)  # type: ignore[attr-defined]


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(BadInput, match=r"no method 'caa' .*mean-difference"):
        check_methods(["pca", "caa"])
