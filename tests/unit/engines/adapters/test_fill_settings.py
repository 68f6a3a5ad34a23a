"""What rows and adapters decide is among the settings of a run, and stays there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.adapters import verbs
from flatout.engines.adapters.fill_settings import fill_settings
from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.peft_format import export
from flatout.engines.adapters.settings import make_settings
from flatout.ground.codec import encode
from flatout.ground.errors import BadInput
from tests.support.adapters import save_tiny, tiny_settings, with_phase
from tests.support.adapters_packed import bert, filled, specs

SUBJECTS = {"billing": "the bill is wrong", "delay": "the parcel is late", "praise": "thank you all"}
KINDS = ("classification", "regression", "similarity")


def write_rows(folder: Path, *, labels: tuple[str, ...] = tuple(SUBJECTS), each: int = 30) -> Path:
    """A file for each kind: the label in the words, the number beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(each):
        for place, label in enumerate(labels):
            text = f"{SUBJECTS.get(label, label)} and number {number}"
            lines["classification"].append({"text": text, "label": label})
            lines["regression"].append({"text": text, "value": 100.0 * place})
            lines["similarity"].append({"text": text, "other": SUBJECTS["delay"], "score": float(place == 1)})
    for kind, rows in lines.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tasks(rows: Path) -> dict[str, Any]:
    return {kind: {"kind": kind, "rank": 2, "data": {"path": str(rows / f"{kind}.jsonl")}} for kind in KINDS}


def test_labels_and_units_come_from_the_rows(tmp_path: Path) -> None:
    given = make_settings({"model": "m", "tasks": tasks(write_rows(tmp_path))})
    filled_in, read = fill_settings(given)
    assert filled_in.tasks["classification"].settings == {"labels": ["billing", "delay", "praise"]}
    assert filled_in.tasks["regression"].settings["mean"] == pytest.approx(100, abs=10)
    assert set(read) == set(KINDS)
    again, read = fill_settings(filled_in)
    assert again == filled_in and not read


def test_a_run_goes_on_with_its_own_labels_whatever_became_of_the_rows(tmp_path: Path) -> None:
    given = make_settings({"model": "m", "tasks": tasks(write_rows(tmp_path))})
    saved = encode(fill_settings(given)[0])
    write_rows(tmp_path, labels=("billing", "other"))
    assert encode(fill_settings(given, saved=saved)[0]) == saved
    assert fill_settings(given)[0].tasks["classification"].settings == {"labels": ["billing", "other"]}


def test_three_kinds_are_trained_scored_asked_and_kept(tmp_path: Path) -> None:
    """From rows to answers, in one run whose rows are gone when it is asked."""
    model, rows = save_tiny(tmp_path / "model"), write_rows(tmp_path / "rows")
    given = with_phase(tiny_settings(model, tmp_path / "run", tasks=tasks(rows)), "phase1", steps=2)
    lines: list[str] = []
    verbs.adapt(given, phases=("phase1",), on_progress=lines.append)
    assert "classification: 3 labels: billing, delay, praise" in lines
    found, page = verbs.adapt_evaluate(tmp_path / "run")
    assert set(found.classes["classification"]) == {"billing", "delay", "praise"}
    assert "praise" in page.read_text(encoding="utf-8")
    for path in rows.iterdir():
        path.unlink()

    def said(task: str, **options: Any) -> str:
        (answer,) = verbs.adapt_predict(tmp_path / "run", ["the parcel is late"], task=task, **options)
        return answer.text

    assert said("classification") in SUBJECTS
    assert -500 < float(said("regression")) < 500
    assert -5 < float(said("similarity", context="where is it")) < 5
    with pytest.raises(BadInput, match="similarity needs a context"):
        said("similarity")
    write_rows(rows, labels=("billing", "delay", "praise", "fourth"))
    with pytest.raises(BadInput, match=r"classification\.jsonl:4: 'label' is 'fourth' \(the labels are bill"):
        verbs.adapt_evaluate(tmp_path / "run")


def peft_folder(folder: Path) -> Path:
    """An adapter of rank 4 and alpha 8 on a tiny BERT."""
    bank = filled(AdapterBank(bert(), specs()))
    export(bank, bank.names[0], folder, base_model_name="tiny")
    return folder


def test_rank_alpha_and_targets_are_those_of_the_adapter_to_begin_from(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())

    def given(**more: Any) -> Any:
        return make_settings({"model": "m", "tasks": {"sentiment": {"init": str(folder), **more}}})

    task = fill_settings(given())[0].tasks["sentiment"]
    assert (task.rank, task.alpha) == (config["r"], config["lora_alpha"])
    assert task.targets is not None and len(task.targets) == len(config["target_modules"])
    saved = encode(fill_settings(given())[0])
    assert fill_settings(given(rank=config["r"]))[0].tasks["sentiment"] == task
    with pytest.raises(BadInput, match=rf"tasks.sentiment.rank=99, and the adapter .* has {config['r']} "):
        fill_settings(given(rank=99))
    with pytest.raises(BadInput, match="omit targets"):
        fill_settings(given(targets=["query"]))
    (folder / "adapter_config.json").unlink()
    assert encode(fill_settings(given(), saved=saved)[0]) == saved
    with pytest.raises(BadInput, match=r"adapter_config\.json does not exist"):
        fill_settings(given())
