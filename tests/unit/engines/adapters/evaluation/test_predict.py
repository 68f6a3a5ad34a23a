"""A text is answered under the task that the router picks; what a task needs and is not given is said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flatout.engines.adapters.evaluation.predict import answer, record_of
from flatout.ground.errors import BadInput
from tests.support.adapters import opened, save_tiny

TEXT, CONTEXT = "Where does Ada live?", "Ada lives in Oslo. Ben keeps hens."


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("predict")
    tasks = {
        "sentiment": {"rank": 2},
        "qa": {"rank": 2},
        "translation": {"rank": 2, "settings": {"max_target_length": 8}},
    }
    with opened(save_tiny(folder / "tiny"), folder / "run", tasks=tasks) as made:
        made.train(False)
        yield made


def bend(assembly: Any, task: str) -> None:
    """Make the router choose one task whatever it sees."""
    with torch.no_grad():
        assembly.router.tasks.weight.zero_()
        assembly.router.tasks.bias.copy_(torch.tensor([5.0 * (name == task) for name in assembly.names]))


@pytest.mark.parametrize("task", ["sentiment", "translation"])
def test_the_routers_choice_answers(assembly: Any, task: str) -> None:
    bend(assembly, task)
    (found,) = answer(assembly, ["the film is moving"])
    assert found.task == task and found.weights == {task: 1.0}
    assert found.confidence is not None and 0 <= found.confidence <= 1
    (forced,) = answer(assembly, ["the film is moving"], task=task)
    assert forced.text == found.text


def test_a_question_with_a_context_is_answered_from_it(assembly: Any) -> None:
    bend(assembly, "qa")
    (found,) = answer(assembly, [TEXT], context=CONTEXT)
    assert found.task == "qa" and found.text in CONTEXT


def test_a_question_without_a_context_asks_for_one(assembly: Any) -> None:
    bend(assembly, "qa")
    with pytest.raises(BadInput, match=r"assigns the text to qa .* needs a context.*--context"):
        answer(assembly, [TEXT])
    bend(assembly, "sentiment")
    with pytest.raises(BadInput, match=r"to sentiment .* takes no context.*--task qa"):
        answer(assembly, [TEXT], context=CONTEXT)
    with pytest.raises(BadInput, match=r"qa needs a context"):
        answer(assembly, [TEXT], task="qa")
    with pytest.raises(BadInput, match=r"sentiment takes no context"):
        answer(assembly, [TEXT], task="sentiment", context=CONTEXT)


def test_records_have_the_fields_of_their_task(assembly: Any) -> None:
    assert record_of(assembly.parts["sentiment"], "a film", context=None) == {"text": "a film"}
    assert record_of(assembly.parts["qa"], TEXT, context=CONTEXT) == {"context": CONTEXT, "question": TEXT}


def test_several_adapters_may_be_mixed(assembly: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bend(assembly, "sentiment")
    route = type(assembly.router).route
    monkeypatch.setattr(
        type(assembly.router),
        "route",
        lambda self, features, **given: route(self, features, **{**given, "top_k": 2}),
    )
    (found,) = answer(assembly, ["the film is moving"])
    assert len(found.weights) == 2 and sum(found.weights.values()) == pytest.approx(1.0)


def test_without_a_router_a_task_must_be_named(assembly: Any) -> None:
    with pytest.raises(BadInput, match="no router yet"):
        answer(assembly, ["a film"], routed=False)
