"""Runs from end to end on a tiny encoder: trained, interrupted, gone on with, evaluated, asked, exported."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatout.engines.adapters import run_folder, verbs
from flatout.engines.adapters.assembly import AdapterAssembly
from flatout.engines.adapters.evaluation.results import KIND as EVALUATION
from flatout.engines.adapters.evaluation.results import Evaluation
from flatout.engines.adapters.settings import read_settings
from flatout.engines.adapters.training.records import BEST, KIND, PHASES, TRAINING, checkpoints_of
from flatout.engines.run.log import read_log
from flatout.engines.run.ranks import Ranks
from flatout.ground.documents import read_document
from flatout.ground.errors import BadInput, Interrupted
from flatout.ground.runs import list_runs
from tests.support.adapters import generated, save_tiny, tiny_settings, with_phase


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of more threads round in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    verbs.adapt(tiny_settings(model, out))
    return out


def weights(out: Path, phase: str, name: str = TRAINING) -> dict[str, Any]:
    found = checkpoints_of(out, phase).latest()
    assert found is not None and found.state.finished
    return load_file(found.path / f"{name}.safetensors")


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def interrupting(text: str) -> Callable[[str], None]:
    """Ctrl-C when a line of progress says `text`."""

    def on_line(line: str) -> None:
        if line.startswith(text):
            os.kill(os.getpid(), signal.SIGINT)

    return on_line


def test_a_run_leaves_what_it_says(whole: Path) -> None:
    status = verbs.adapt_status(whole)
    assert [(phase.name, phase.step, phase.finished) for phase in status.phases] == [
        ("phase1", 6, True),
        ("phase2", 10, True),
        ("phase3", 4, True),
    ]
    assert set(status.phases[0].progress) == {"sentiment", "translation"}
    assert {"accuracy", "macro_f1", "loss"} == set(status.phases[0].progress["sentiment"].scores)
    assert (whole / "run.png").stat().st_size > 10_000
    assert list((whole / "tensorboard").iterdir())
    records = read_log(whole, KIND)
    last = {record.phase: record for record in records}
    assert set(last) == set(PHASES)
    assert {"sentiment", "translation"} <= set(last["phase1"].losses)
    assert {"router", "confidence", "total"} <= set(last["phase2"].losses)
    assert {"sentiment", "translation", "router", "total"} >= set(last["phase3"].losses) & {"sentiment"}
    assert last["phase2"].routing["accuracy"] is not None


def test_the_schedule_counts_optimizer_steps_and_ends_at_its_end(whole: Path) -> None:
    """Two batches make one step here: a schedule of batches would have stopped halfway."""
    rates = [
        record.learning_rates["sentiment"] for record in read_log(whole, KIND) if record.phase == "phase1"
    ]
    assert rates == sorted((rate for rate in rates if rate is not None), reverse=True)
    assert rates[-1] == 0.0 and rates[-2] == pytest.approx(0.001 / 6)


@pytest.mark.parametrize(
    ("phase", "moment"), [("phase1", "phase1 3/"), ("phase2", "phase2 4/"), ("phase3", "phase3 1/")]
)
def test_an_interrupted_phase_goes_on_bit_for_bit(
    phase: str, moment: str, model: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    given = tiny_settings(model, out)
    with pytest.raises(Interrupted, match=f"of {phase} is kept .*--resume"):
        verbs.adapt(given, on_line=interrupting(moment))
    stopped = checkpoints_of(out, phase).latest()
    assert stopped is not None and not stopped.state.finished and stopped.state.step < stopped.state.steps
    notes: list[str] = []
    verbs.adapt(given, resume=True, on_progress=notes.append)
    assert any(note.startswith(f"{phase}: continuing after step {stopped.state.step}") for note in notes)
    for each in PHASES:
        assert same(weights(out, each), weights(whole, each)), each
        assert same(weights(out, each, BEST), weights(whole, each, BEST)), each


def test_an_adapter_that_has_left_stays_away(model: Path, tmp_path: Path) -> None:
    def given(name: str) -> dict[str, Any]:
        settings = tiny_settings(model, tmp_path / name)
        settings["tasks"]["sentiment"]["steps"] = 2
        return settings

    verbs.adapt(given("whole"), phases=("phase1",))
    with pytest.raises(Interrupted):
        verbs.adapt(given("broken"), phases=("phase1",), on_line=interrupting("phase1 4/"))
    lines: list[str] = []
    verbs.adapt(given("broken"), phases=("phase1",), resume=True, on_line=lines.append)
    last = read_log(tmp_path / "broken", KIND)[-1]
    assert set(last.losses) == {"translation"}
    for name in (TRAINING, BEST):
        assert same(weights(tmp_path / "broken", "phase1", name), weights(tmp_path / "whole", "phase1", name))


def test_a_finished_phase_is_skipped_and_said_so(model: Path, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}
    notes: list[str] = []
    outcome = verbs.adapt(tiny_settings(model, whole), resume=True, on_progress=notes.append)
    assert outcome.skipped == PHASES
    assert [note for note in notes if "is finished" in note] == [
        f"{phase} is finished at step {step}: it is not trained again"
        for phase, step in zip(PHASES, (6, 10, 4), strict=True)
    ]
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}


def test_without_resume_what_is_there_is_left_alone(model: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"phase1 in .* is finished, at step 6 .*--resume"):
        verbs.adapt(tiny_settings(model, whole))
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"not empty: it holds thesis\.txt"):
        verbs.adapt(tiny_settings(model, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(BadInput, match="phase2 needs phase1, which is not finished"):
        verbs.adapt(tiny_settings(model, tmp_path / "other"), phases=("phase2",))


def test_a_checkpoint_of_another_model_is_refused_and_kept(whole: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=1)
    for ask in (
        lambda: verbs.adapt_evaluate(whole, model=str(other)),
        lambda: verbs.adapt_predict(whole, ["a film"], model=str(other)),
        lambda: verbs.adapt_export(whole, to=tmp_path / "peft", model=str(other)),
    ):
        with pytest.raises(BadInput, match="belongs to a model other than"):
            ask()
    assert not (tmp_path / "peft").exists()
    assert weights(whole, "phase3")


def test_a_resume_with_other_settings_names_the_setting(model: Path, whole: Path) -> None:
    given = with_phase(tiny_settings(model, whole), "phase3", steps=5)
    with pytest.raises(BadInput, match=r"the run has phase3\.steps=4, but 5 is given"):
        verbs.adapt(given, resume=True)


def test_the_same_seed_gives_the_same_run(model: Path, whole: Path, tmp_path: Path) -> None:
    verbs.adapt(tiny_settings(model, tmp_path / "run"), phases=("phase1",))
    assert same(weights(tmp_path / "run", "phase1"), weights(whole, "phase1"))


def test_phases_begin_with_the_best_weights_of_the_one_before(whole: Path) -> None:
    first, second = weights(whole, "phase1", BEST), weights(whole, "phase2", BEST)
    adapters = [name for name in first if name.startswith(("adapters/", "heads/", "decoder/"))]
    assert adapters and all(first[name].equal(second[name]) for name in adapters)
    routers = [name for name in second if name.startswith("router/")]
    assert any(not first[name].equal(second[name]) for name in routers)
    assert not second["router/calibration"].equal(torch.tensor([1.0, 1.0, 0.0, 0.0]))


def test_heads_alone_are_trained_in_a_folder_of_their_own_and_stand_beside(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    given = tiny_settings(model, out)
    verbs.adapt(given, heads_only=True)
    best = weights(out / "heads-only", "phase1", BEST)
    assert not [name for name in best if name.startswith("adapters/")]
    verbs.adapt(given)
    found, page = verbs.adapt_evaluate(out)
    assert found.heads_only is not None and set(found.heads_only) == {"sentiment", "translation"}
    assert read_document(out / "evaluation.json", Evaluation, EVALUATION) == found
    assert "sentiment" in page.read_text(encoding="utf-8")
    assert found.routing is not None and sum(map(sum, found.routing.confusion)) == 8
    assert {scores.routing for scores in found.scores} >= {"oracle", "routed", "single", "uniform", "random"}


def test_without_out_a_run_gets_a_folder_among_the_runs_and_the_latest_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {**tiny_settings(model, tmp_path), "out": None}
    with pytest.raises(BadInput, match=r"has no run of flatout adapt to resume .*--out"):
        verbs.adapt(given, heads_only=True)
    with pytest.raises(Interrupted):
        verbs.adapt(given, phases=("phase1",), on_line=interrupting("phase1 3/"))
    ((folder, run),) = list_runs(kind="adapt")
    assert folder.parent == tmp_path / ".flatout" / "runs" and run.end == "interrupted"
    outcome = verbs.adapt(given, phases=("phase1",), resume=True)
    assert Path(outcome.out) == folder and outcome.status.phases[0].finished
    assert read_settings(folder)["out"] == str(folder)
    heads = verbs.adapt(given, heads_only=True)
    assert Path(heads.out) == folder / "heads-only"


def test_a_run_is_scored_and_asked_under_another_routing_than_its_own(whole: Path) -> None:
    kept = run_folder.settings_of(whole).router
    found, _ = verbs.adapt_evaluate(whole, split="validation", top_k=2, threshold=0.25)
    assert found.routing is not None and found.split == "validation"
    assert (found.routing.top_k, found.routing.threshold) == (2, 0.25)
    assert run_folder.settings_of(whole).router == kept
    (mixed,) = verbs.adapt_predict(whole, ["the film is deeply moving"], top_k=2)
    assert len(mixed.weights) == 2
    for wrong in ({"top_k": 0}, {"threshold": 2.0}, {"split": "train"}):
        with pytest.raises(BadInput, match=next(iter(wrong))):
            verbs.adapt_evaluate(whole, **wrong)


def test_texts_are_answered_under_the_task_that_the_router_picks(whole: Path) -> None:
    found = verbs.adapt_predict(whole, ["the film is deeply moving", "the man sees the house"])
    assert len(found) == 2
    assert all(each.task in ("sentiment", "translation") for each in found)
    assert all(
        each.confidence is not None and sum(each.weights.values()) == pytest.approx(1) for each in found
    )
    (forced,) = verbs.adapt_predict(whole, ["the film is deeply moving"], task="sentiment")
    assert forced.task == "sentiment" and forced.text in ("negative", "positive")
    assert forced.confidence is None
    with pytest.raises(BadInput, match="did you mean sentiment"):
        verbs.adapt_predict(whole, ["a film"], task="sentimant")
    with pytest.raises(BadInput, match="no task of this run takes a text with a context"):
        verbs.adapt_predict(whole, ["Where?"], context="There.")


def test_what_is_exported_is_what_peft_computes(model: Path, whole: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModel

    folders = verbs.adapt_export(whole, to=tmp_path / "peft")
    assert [folder.name for folder in folders] == ["sentiment", "translation"]
    assert json.loads((folders[0] / "adapter_config.json").read_text())["r"] == 2
    settings = run_folder.settings_of(whole, device="cpu")
    with AdapterAssembly(settings, ranks=Ranks(device=torch.device("cpu"))) as assembly:
        assembly.load_best(run_folder.furthest(whole))
        batch = assembly.parts["sentiment"].task.collate(
            assembly.rows("sentiment", "test", number=3).examples, adapter=0, pad_id=assembly.pad_id
        )
        with torch.no_grad():
            (ours,) = assembly.encoder((batch.block,))
    base = AutoModel.from_pretrained(model)
    theirs = PeftModel.from_pretrained(base, folders[0]).eval()
    with torch.no_grad():
        states = theirs(input_ids=batch.block.ids, attention_mask=batch.block.mask()).last_hidden_state
    there = batch.block.mask()
    torch.testing.assert_close(ours[there], states[there], rtol=1e-4, atol=1e-5)


def test_the_router_picks_the_same_task_without_flatout(
    model: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of docs/adapters.md, on this run."""
    page = (Path(__file__).parents[4] / "docs" / "adapters.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    texts = ["the film is deeply moving", "the man sees the house", "a story", "in the house of a man"]
    verbs.adapt_export(whole, to=tmp_path / "exported")
    (tmp_path / "minilm").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(lines.replace('["What a wonderful film."]', repr(texts)), names)
    ours = verbs.adapt_predict(whole, texts, top_k=2)
    assert names["tasks"] == [each.task for each in ours]
    for each, shares in zip(ours, names["shares"].tolist(), strict=True):
        found = [each.weights[name] for name in names["said"]["tasks"]]
        assert found == pytest.approx(shares, abs=1e-5)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_with_and_without_scaled_losses(precision: str, model: Path, tmp_path: Path) -> None:
    """What a GPU runs, in its arithmetic: the encoder in half, adapters and heads in float32."""
    out = tmp_path / "run"
    given = tiny_settings(model, out, precision=precision)
    verbs.adapt(given)
    found = checkpoints_of(out, "phase1").latest()
    assert found is not None
    assert bool(found.state.extra["scalers"]) == (precision == "float16")
    assert {tensor.dtype for tensor in found.tensors(TRAINING).values()} == {torch.float32}
    losses = [record.losses["translation"] for record in read_log(out, KIND) if record.phase == "phase1"]
    assert all(loss is not None for loss in losses)
    assert verbs.adapt_predict(out, ["a film"], task="sentiment")[0].text in ("negative", "positive")


def test_an_unfinished_run_without_a_router_asks_for_a_task(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    verbs.adapt(tiny_settings(model, out), phases=("phase1",))
    with pytest.raises(BadInput, match="no router yet"):
        verbs.adapt_predict(out, ["a film"])
    assert verbs.adapt_predict(out, ["a film"], task="translation")[0].task == "translation"
    found, _ = verbs.adapt_evaluate(out)
    assert found.routing is None
    with pytest.raises(BadInput, match="holds no run of adapters"):
        verbs.adapt_status(tmp_path)


def test_bad_rows_are_named_by_their_line_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "fine", "label": 1}\n{"text": "torn\n')
    given = tiny_settings(model, tmp_path / "run")
    given["tasks"]["sentiment"] = {"data": {"path": str(rows)}}
    with pytest.raises(BadInput, match=r"rows\.jsonl:2") as caught:
        verbs.adapt(given)
    assert "\n" not in str(caught.value)
    given["tasks"]["sentiment"] = {"data": {**generated(), "sauce": "x"}}
    with pytest.raises(BadInput, match="did you mean source"):
        verbs.adapt(given)


def test_why_an_adapter_left_is_in_the_log_the_status_and_the_report(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = AdapterAssembly.loss

    def spoilt(self: Any, adapter: int, states: Any, batch: Any) -> Any:
        loss = plain(self, adapter, states, batch)
        return loss * float("nan") if self.names[adapter] == "sentiment" else loss

    monkeypatch.setattr(AdapterAssembly, "loss", spoilt)
    out = tmp_path / "run"
    settings = tiny_settings(model, out, log_every=100, checkpoint_every=100)
    settings = with_phase(settings, "phase1", steps=21, accumulate=1, evaluate_every=100)
    notes: list[str] = []
    outcome = verbs.adapt(settings, phases=("phase1",), on_progress=notes.append)
    said = "sentiment left at step 20: its loss is not a number"
    assert said in notes
    assert [record.notes for record in read_log(out, KIND) if record.step == 20] == [(said,)]
    progress = outcome.status.phases[0].progress["sentiment"]
    assert (progress.done, progress.left_because) == (20, "its loss is not a number")
    _, page = verbs.adapt_evaluate(out)
    assert f"phase1: {said}." in page.read_text(encoding="utf-8")


def test_a_scored_part_without_a_class_is_said_by_the_run_and_on_its_page(
    model: Path, tmp_path: Path
) -> None:
    labels = ["negative"] * 45 + ["positive"] * 45
    for name, first in (("train", 0), ("validation", 500), ("test", 900)):
        rows = [{"text": f"film {first + number}", "label": label} for number, label in enumerate(labels)]
        given = rows if name == "train" else rows[:45]  # a file of the user's is taken as it is
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in given))
    settings = tiny_settings(model, tmp_path / "run")
    settings["tasks"]["sentiment"] = {"rank": 2, "data": {"path": str(tmp_path)}}
    said: list[str] = []
    with pytest.raises(Interrupted):
        verbs.adapt(settings, phases=("phase1",), on_progress=said.append, on_line=interrupting("phase1 3/"))
    verbs.adapt(settings, phases=("phase1",), resume=True, on_progress=said.append)
    note = "rows that are scored (8) lack 1 of 2 classes of its training rows (positive); score more rows"
    assert said.count(f"sentiment: the validation {note}") == 1
    found, page = verbs.adapt_evaluate(tmp_path / "run", rows=8, on_progress=said.append)
    assert found.notes == (f"sentiment: the test {note}.",) and found.notes[0] in said
    shown = page.read_text(encoding="utf-8")
    assert f"phase1: sentiment: the validation {note}." in shown and found.notes[0] in shown


def test_an_export_leaves_the_adapters_of_another_run_alone(model: Path, whole: Path, tmp_path: Path) -> None:
    verbs.adapt(tiny_settings(model, tmp_path / "other", seed=1), phases=("phase1",))
    to = tmp_path / "peft"
    to.mkdir()
    (to / "notes.txt").write_text("mine")
    verbs.adapt_export(tmp_path / "other", to=to, tasks=["sentiment"])
    verbs.adapt_export(tmp_path / "other", to=to)  # a run replaces what it exported
    files = {path: path.read_bytes() for path in to.rglob("*") if path.is_file()}
    for tasks in (None, ["translation"]):
        with pytest.raises(
            BadInput, match=r"peft/sentiment holds an adapter of .*other \(choose another --to, "
        ):
            verbs.adapt_export(whole, to=to, tasks=tasks)
    with pytest.raises(BadInput, match=r"peft/sentiment holds an adapter of .*other"):
        verbs.adapt_export(whole, to=to / "sentiment")
    assert files == {path: path.read_bytes() for path in to.rglob("*") if path.is_file()}
    (to / "sentiment" / "flatout_run.json").unlink()
    with pytest.raises(BadInput, match="peft/sentiment holds an adapter of an unknown run"):
        verbs.adapt_export(tmp_path / "other", to=to)


@pytest.mark.parametrize("num_validation", [8, 9])
def test_a_phase_that_was_judged_on_first_rows_resumes_only_if_those_are_all(
    model: Path, tmp_path: Path, num_validation: int
) -> None:
    settings = tiny_settings(model, tmp_path / "run")
    settings["tasks"]["sentiment"]["data"]["num_validation"] = num_validation
    with pytest.raises(Interrupted):
        verbs.adapt(settings, phases=("phase1",), on_line=interrupting("phase1 3/"))
    found = checkpoints_of(tmp_path / "run", "phase1").latest()
    assert found is not None and found.state.version == 2
    small = found.path / "state.json"
    small.write_text(json.dumps({**json.loads(small.read_text()), "version": 1}))
    if num_validation == 8:
        assert verbs.adapt(settings, phases=("phase1",), resume=True).status.phases[0].finished
        return
    with pytest.raises(BadInput, match=r"judged on the first 8 of 9 validation rows of sentiment.*--out"):
        verbs.adapt(settings, phases=("phase1",), resume=True)
    assert verbs.adapt_evaluate(tmp_path / "run")[0].num_rows["sentiment"] == 4


BROKEN = """
from flatout.engines.adapters.tasks.kinds.sentiment import Sentiment


class Mood(Sentiment):
    name = "mood"

    def METHOD(self, *given, **named):
        return self.there_is_no_such_thing
"""


@pytest.mark.parametrize("method", ["generated_row", "head", "targets_of", "loss", "text_scores"])
def test_what_a_task_of_the_user_raises_is_named_as_the_user_s(
    model: Path, tmp_path: Path, method: str
) -> None:
    (tmp_path / "mood.py").write_text(BROKEN.replace("METHOD", method))
    settings = tiny_settings(model, tmp_path / "run", tasks_folder=str(tmp_path))
    settings["tasks"] = {"mood": {"rank": 2, "data": generated()}}
    said = r"the task file mood\.py raised AttributeError: .*there_is_no_such_thing.* \(at .*mood\.py:9\)"
    with pytest.raises(BadInput, match=said):
        verbs.adapt(settings, phases=("phase1",))


def test_a_run_whose_task_breaks_later_names_the_task_too(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mood.py"
    path.write_text(BROKEN.replace("METHOD", "unused"))
    settings = tiny_settings(model, tmp_path / "run", tasks_folder=str(tmp_path))
    settings["tasks"] = {"mood": {"rank": 2, "data": generated()}}
    verbs.adapt(settings, phases=("phase1",))
    path.write_text(BROKEN.replace("METHOD", "answer"))
    for ask in (
        lambda: verbs.adapt_evaluate(tmp_path / "run"),
        lambda: verbs.adapt_predict(tmp_path / "run", ["a film"], task="mood"),
    ):
        with pytest.raises(BadInput, match=r"the task file mood\.py raised AttributeError"):
            ask()
