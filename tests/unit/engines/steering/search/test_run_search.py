"""A whole search, and what is left of it when a worker or its starter is killed."""

from __future__ import annotations

import collections
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.run.ranks import device_name
from flatout.engines.run.settings import save_settings
from flatout.engines.steering.report.record import FILE, StudyRecord, load_record
from flatout.engines.steering.search import run_search as run_module
from flatout.engines.steering.search.halved_search import Event
from flatout.engines.steering.search.run_search import join_search, run_search, split_of
from flatout.engines.steering.search.search_worker import study_of
from flatout.engines.steering.settings import make_settings, resume_settings
from flatout.ground.errors import BadInput
from tests.support.fake_ray import FakeRay
from tests.support.steering import tiny_search, write_tiny
from tests.support.warm_python import warm

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(sys.path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("steering"))


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudyRecord]:
    """A search that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, run_quietly(tiny_search(tiny, out))


def run_quietly(given: dict[str, Any]) -> StudyRecord:
    return run_search(resume_settings(given), on_progress=lambda message: None, on_event=lambda event: None)


def rows_of(out: Path) -> dict[str, list[tuple[int | None, str]]]:
    """(trial, question) of every row, by the worker that wrote it."""
    return {
        path.stem: [(row["trial"], row["question"]) for row in map(json.loads, path.read_text().splitlines())]
        for path in sorted((out / "rows").glob("*.jsonl"))
    }


def same(left: StudyRecord, right: StudyRecord) -> bool:
    """Equal trials; the shape of a batch may change the last digits of a score."""
    near = [[(trial.number, trial.layer, trial.state) for trial in record.trials] for record in (left, right)]
    figures = [
        [each for trial in record.trials for each in (trial.strength, trial.score)]
        for record in (left, right)
    ]
    return near[0] == near[1] and figures[0] == pytest.approx(figures[1], abs=1e-4)


def test_a_search_finds_the_direction_and_leaves_its_record(whole: tuple[Path, StudyRecord]) -> None:
    out, record = whole
    assert load_record(out / FILE) == record
    assert len(record.trials) == 12
    assert record.count("complete") and record.count("pruned") and not record.count("running")
    assert record.retest is not None and record.retest.difference.low > 0.05
    assert record.retest.num_questions == 20
    assert record.winner is not None and record.winner.strength > 0
    assert record.winner.perplexity_ratio is not None and record.perplexity_ratio is not None
    assert record.perplexity_ratio.value == pytest.approx(record.winner.perplexity_ratio)
    assert len(record.examples) == 2 and all(example.unsteered for example in record.examples)
    assert record.num_layers == 4 and record.device == device_name(torch.device("cpu"))
    assert (out / "vectors" / "mean-difference.safetensors").is_file()


def test_a_search_judged_by_texts_keeps_them_and_tests_its_winner_by_them(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "likes.py").write_text(
        "def first_word(question, text):\n    return float(text.split()[0] == question.positive.strip())\n"
    )
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    given = {**tiny_search(tiny, out), "judge": "likes:first_word", "max_new_tokens": 3, "trials": 4}
    record = run_quietly(given)
    assert record.score_name == "score of likes:first_word"
    assert record.retest is not None and 0 <= record.retest.steered.value <= 1
    rows = [json.loads(line) for line in (out / "rows" / "0.jsonl").read_text().splitlines()]
    assert all(len(row["text"].split()) <= 3 for row in rows)
    assert {row["value"] for row in rows} <= {0.0, 1.0}
    with pytest.raises(BadInput, match="score"):  # rows of other texts do not mix with these
        run_quietly({**given, "max_new_tokens": 2})


def test_the_three_parts_of_the_questions_share_none(tiny: Path, tmp_path: Path) -> None:
    split = split_of(make_settings(tiny_search(tiny, tmp_path)))
    keys = [question.key for part in (split.train, split.search, split.fresh) for question in part]
    assert len(keys) == len(set(keys)) == 80


def test_the_same_command_again_runs_nothing_again(whole: tuple[Path, StudyRecord], tiny: Path) -> None:
    out, record = whole
    before = rows_of(out)
    again = run_quietly({"out": str(out)})
    assert rows_of(out) == before
    assert same(again, record)
    assert again.retest == record.retest
    assert again.search_s is not None and record.search_s is not None and again.search_s > record.search_s > 0


DYING_STARTER = """
import json, os, signal, sys
from flatout.engines.steering.search.run_search import run_search
from flatout.engines.steering.settings import resume_settings

seen = 0
def on_event(event):
    global seen
    seen += event.kind == "row"
    if seen == 9:
        os.kill(os.getpid(), signal.SIGKILL)

run_search(resume_settings(json.loads(sys.argv[1])), on_progress=lambda message: None, on_event=on_event)
"""


def test_a_killed_starter_goes_on_and_comes_to_the_same_end(
    whole: tuple[Path, StudyRecord], tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    given = tiny_search(tiny, out)
    done = warm().run("python", "-c", DYING_STARTER, json.dumps(given))
    assert done.returncode == -signal.SIGKILL, done.stderr
    kept = rows_of(out)["0"]
    assert len(kept) == 9
    record = run_quietly({"out": str(out)})
    assert record.search_s is None, "how long the killed one had searched is not known"
    rows = rows_of(out)["0"]
    assert rows[:9] == kept
    assert len(rows) == len(set(rows)), "a row was run twice"
    assert same(record, whole[1])


# A worker that is killed in the middle of its second trial; the pipe tells the starter that it is gone.
DYING_WORKER = """
import os, signal, sys
from pathlib import Path
from flatout.engines.steering.search.run_search import join_search
from flatout.engines.steering.settings import make_settings, read_settings

path, arguments = Path(sys.argv[1]), sys.argv[2:]
seen = 0
def on_event(event):
    global seen
    seen += event.kind == "row"
    if seen == 7:
        os.kill(os.getpid(), signal.SIGKILL)

name = arguments[arguments.index("--worker") + 1]
# Held open until the process is gone.
pipe = open(path.parent / "pipe", "w")
settings = make_settings(read_settings(path))
join_search(settings, worker=name, on_progress=lambda message: None, on_event=on_event)
"""


def test_what_a_killed_worker_left_open_is_taken_over(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    os.mkfifo(out / "pipe")
    monkeypatch.setattr(
        run_module,
        "joining_command",
        lambda path: [str(warm().bin / "python"), "-c", DYING_WORKER, str(path)],
    )
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    has_met = False

    def on_event(event: Event) -> None:
        nonlocal has_met
        if event.kind == "row" and not has_met:
            has_met = True
            (out / "pipe").read_text()  # until the other worker is dead

    settings = resume_settings(tiny_search(tiny, out, workers=2))
    record = run_search(settings, on_progress=said.append, on_event=on_event)
    assert "worker 1 ended: killed by SIGKILL; another worker takes over its trials" in said
    assert "taking over what 1 left open" in said
    rows = rows_of(out)
    assert len(rows["1"]) > 7, "its open trials were not finished under its name"
    counted = collections.Counter(row for held in rows.values() for row in held if row[0] is not None)
    assert max(counted.values()) == 1, "a finished row was run again"
    assert len(record.trials) == 12 and not record.count("running") and not record.count("failed")
    assert record.retest is not None


def test_a_model_that_cannot_be_packed_is_searched_through_its_own_forward(
    whole: tuple[Path, StudyRecord], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flatout.engines.steering.trials import packed_trials

    def refuse(model: object) -> None:
        raise BadInput("it is of a family that nobody reads")

    monkeypatch.setattr(packed_trials, "read_decoder", refuse)
    said: list[str] = []
    settings = resume_settings(tiny_search(tiny, tmp_path / "run"))
    record = run_search(settings, on_progress=said.append, on_event=lambda event: None)
    assert any("own forward" in line and "nobody reads" in line for line in said)
    assert same(record, whole[1])
    assert record.examples == whole[1].examples


def test_two_starters_of_one_folder_are_refused(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with run_module._only_one(out), pytest.raises(BadInput, match="another search runs in"):
        run_quietly(tiny_search(tiny, out))


def test_a_cluster_of_gpus_is_not_searched_on_its_cpus(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRay([(8, 0), (8, 4)]).install(monkeypatch)
    on_cpu = run_module.place_model(tiny / "model", device="cpu")
    monkeypatch.setattr(run_module, "place_model", lambda *_, **__: on_cpu)
    with pytest.raises(BadInput, match=r"no GPU, but the nodes.*entrypoint-num-gpus 1"):
        run_quietly(tiny_search(tiny, tmp_path / "run", ray="auto", device="auto"))


def test_a_missing_neutral_file_is_named_before_anything_runs(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(BadInput, match="cannot be read"):
        run_quietly({**tiny_search(tiny, out), "neutral": str(tmp_path / "absent.txt")})
    assert not out.exists()


def test_a_question_that_cannot_be_asked_is_named_before_anything_is_fitted(
    tiny: Path, tmp_path: Path
) -> None:
    out, questions = tmp_path / "run", tmp_path / "questions.jsonl"
    long = [{"prompt": f"{n} " * 4000, "positive": "yes", "negative": "no"} for n in range(4)]
    questions.write_text("".join(json.dumps(one) + "\n" for one in long))
    with pytest.raises(BadInput, match=r"tokens with its answer; the model has \d+ positions"):
        run_quietly(tiny_search(tiny, out, questions=str(questions)))
    assert not (out / "vectors").exists()


def test_a_joining_worker_draws_from_the_same_study(
    whole: tuple[Path, StudyRecord], tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = resume_settings(tiny_search(tiny, out, trials=3, vectors=str(whole[0] / "vectors")))
    save_settings(settings.folder, settings)
    join_search(settings, worker="elsewhere", on_progress=lambda message: None, on_event=lambda event: None)
    assert set(rows_of(out)) == {"elsewhere"}
    study = study_of(settings, worker="0")
    assert study.num_asked() == 3 and study.open_workers() == set()
    record = run_quietly({"out": str(out)})
    assert len(record.trials) == 3


def test_a_study_of_another_model_is_refused(
    whole: tuple[Path, StudyRecord], tiny: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(other)
    with pytest.raises(BadInput, match="was started with another model"):
        run_quietly({"out": str(whole[0]), "model": str(other)})


@pytest.mark.parametrize("wrong", [{"layers": "2-40"}, {"position": "300"}])
def test_settings_that_cannot_work_do_not_bind_the_corrected_ones(
    wrong: dict[str, object], tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(BadInput):
        run_quietly(tiny_search(tiny, out, **wrong))
    assert not (out / "settings.json").exists() and not (out / "vectors").exists()
    assert len(run_quietly(tiny_search(tiny, out, trials=2)).trials) == 2
