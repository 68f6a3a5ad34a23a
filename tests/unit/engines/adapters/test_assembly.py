"""The parts of a run: an encoder that is whole, names of weights, seeds by name, rows read once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.adapters.assembly import open_encoder, open_tokenizer, seed_of, weights_under
from flatout.engines.run.fingerprint import weights_fingerprint
from flatout.ground.errors import BadInput
from tests.support.adapters import generated, opened, save_tiny
from tests.support.evolution import save_tiny as save_tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def assembly(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened(model, tmp_path_factory.mktemp("runs")) as made:
        yield made


def test_weights_have_one_list_of_names_and_go_both_ways(assembly: Any) -> None:
    kept = {name: value.clone() for name, value in assembly.weights().items()}
    prefixes = {name.split("/")[0] for name in kept}
    assert prefixes == {"adapters", "heads", "decoder", "router"}
    assert {name.split("/")[1] for name in kept if name.startswith("adapters/")} == {
        "sentiment",
        "translation",
    }
    assembly.load_weights({name: torch.zeros_like(value) for name, value in kept.items()})
    assert all(not value.any() for value in assembly.weights().values())
    assembly.load_weights(kept)
    assert all(value.equal(kept[name]) for name, value in assembly.weights().items())
    only = assembly.weights(only=("sentiment",))
    assert only and all("/sentiment/" in name for name in only)
    assert set(weights_under(kept, "adapters/sentiment")) == set(assembly.bank.state_dict("sentiment"))


def test_another_task_changes_no_part_that_is_there(assembly: Any, model: Path, tmp_path: Path) -> None:
    tasks = {"qa": {"rank": 4, "data": generated()}}
    given = {name: {"rank": part.settings.rank} for name, part in assembly.parts.items()}
    with opened(model, tmp_path, tasks={**tasks, **given, "translation": {"rank": 3}}) as other:
        mine, theirs = assembly.weights(), other.weights()
        shared = [name for name in mine if name.startswith(("adapters/", "heads/sentiment"))]
        assert shared and all(mine[name].equal(theirs[name]) for name in shared)
    assert seed_of(0, "a", 1) == seed_of(0, "a", 1) != seed_of(1, "a", 1)


def test_rows_are_numbers_made_once(assembly: Any) -> None:
    rows = assembly.rows("sentiment", "validation", number=3)
    assert len(rows.examples) == len(rows.records) == 3
    assert [example.index for example in rows.examples] == [0, 1, 2]
    assert assembly.rows("sentiment", "train").examples[0] is assembly.rows("sentiment", "train").examples[0]
    inputs = {
        split: {record["text"] for record in getattr(assembly.splits["sentiment"], split)}
        for split in ("train", "validation", "test")
    }
    assert not inputs["train"] & inputs["validation"] and not inputs["train"] & inputs["test"]


def sorted_by_class(path: Path, *, num_rows: int = 400) -> dict[str, Any]:
    """A file with all negative rows before all positive ones, as the data of a task."""
    labels = ["negative"] * (num_rows // 2) + ["positive"] * (num_rows // 2)
    lines = [{"text": f"film {number} is here", "label": label} for number, label in enumerate(labels)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return {"sentiment": {"rank": 2, "data": {"path": str(path)}}}


@pytest.mark.parametrize("split", ["validation", "test"])
def test_some_rows_of_a_sorted_file_have_every_class(model: Path, tmp_path: Path, split: str) -> None:
    with opened(model, tmp_path, tasks=sorted_by_class(tmp_path / "rows.jsonl")) as made:
        whole, some = made.rows("sentiment", split), made.rows("sentiment", split, number=16)
        assert len(whole.records) > len(some.records) == 16
        labels = [record["label"] for record in some.records]
        assert min(labels.count("negative"), labels.count("positive")) >= 4
        places = [whole.records.index(record) for record in some.records]
        assert places == sorted(places)
        assert [example.index for example in some.examples] == list(range(16))
        assert all(
            example.ids is whole.examples[place].ids
            for example, place in zip(some.examples, places, strict=True)
        )


def test_some_rows_stay_when_a_file_is_reordered_or_grows(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tasks = sorted_by_class(path)

    def chosen() -> set[str]:
        with opened(model, tmp_path, tasks=tasks) as made:
            return {record["text"] for record in made.rows("sentiment", "test", number=16).records}

    before, lines = chosen(), path.read_text().splitlines(keepends=True)
    path.write_text("".join(reversed(lines)))
    assert chosen() == before
    added = json.dumps({"text": "a film that nobody saw", "label": "positive"}) + "\n"
    path.write_text("".join([added, *lines]))
    assert len(chosen() & before) >= 15


def test_a_class_that_is_trained_and_not_judged_is_said(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path, tasks=sorted_by_class(tmp_path / "rows.jsonl")) as made:
        assert made.missing_classes("sentiment", "test") is None
        (record,) = made.rows("sentiment", "test", number=1).records
        lacking = {"negative": "positive", "positive": "negative"}[record["label"]]
        said = made.missing_classes("sentiment", "test", number=1)
        assert said == (
            "sentiment: the test rows that are scored (1) lack 1 of 2 classes of its training rows "
            f"({lacking}); score more rows"
        )


def test_a_loss_is_of_its_own_task(assembly: Any) -> None:
    batch = assembly.parts["sentiment"].task.collate(
        assembly.rows("sentiment", "train").examples[:2], adapter=0, pad_id=assembly.pad_id
    )
    (states,) = assembly.encoder((batch.block,))
    assembly.train(False)
    part = assembly.parts["sentiment"]
    assert assembly.loss(0, states, batch).equal(part.task.loss(part.head, states, batch))


def test_what_is_wrong_with_the_data_is_said_before_the_model_is_opened(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="did you mean num_train"):
        opened(tmp_path / "absent", tmp_path, tasks={"sentiment": {"data": {"num_trian": 3}}})
    with pytest.raises(BadInput, match="no task 'sentimint'"):
        opened(tmp_path / "absent", tmp_path, tasks={"sentimint": {}})
    with pytest.raises(BadInput, match="no model folder"):
        opened(tmp_path / "absent", tmp_path)


def test_a_target_that_the_encoder_has_not_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"'qurey'.*query"):
        opened(model, tmp_path, tasks={"sentiment": {"targets": ["qurey"]}})


def test_heads_alone_have_no_adapter_to_train(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path, heads_only=True) as made:
        assert made.bank.rank == 0
        assert not [name for name in made.weights() if name.startswith("adapters/")]


def test_an_encoder_is_frozen_and_the_same_every_time(tmp_path: Path) -> None:
    """The folder has no pooler; one drawn at random would make another model of it at every start."""
    folder = save_tiny(tmp_path / "tiny")
    first, second = open_encoder(folder, device=CPU), open_encoder(folder, device=CPU)
    assert weights_fingerprint(first) == weights_fingerprint(second)
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert not first.training


def test_what_is_no_encoder_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no model folder at"):
        open_encoder(tmp_path / "absent", device=CPU)
    with pytest.raises(BadInput, match=r"has no config\.json"):
        open_encoder(tmp_path, device=CPU)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing-like-it"}))
    with pytest.raises(BadInput, match="no encoder that can be loaded") as caught:
        open_encoder(tmp_path, device=CPU)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match="no tokenizer that can be read"):
        open_tokenizer(save_tiny_llama(tmp_path / "llama"))


def test_a_folder_that_lacks_weights_is_said(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(BadInput, match=r"lacks \d+ weights of its encoder, first encoder\.layer\.1"):
        open_encoder(folder, device=CPU)


def test_a_tokenizer_must_pad(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    tokenizer = open_tokenizer(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(BadInput, match="no padding token"):
        open_tokenizer(folder)
