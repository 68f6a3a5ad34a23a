"""The verbs by themselves: extract, fit, search, apply and report as a script would call them."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import huggingface_hub
import pytest
from safetensors.torch import load_file, save_file

from flatout.engines.steering import verbs
from flatout.engines.steering.report.record import StudyRecord
from flatout.engines.steering.search.halved_search import Event
from flatout.engines.steering.vectors import formats
from flatout.ground.errors import BadInput
from flatout.ground.runs import list_runs
from tests.support.steering import tiny_search, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("steering"))


@pytest.fixture(scope="module")
def run(tiny: Path) -> tuple[Path, StudyRecord]:
    out = tiny / "run"
    done = verbs.steer(tiny_search(tiny, out))
    assert done.record is not None and done.out == str(out)
    return out, done.record


def test_extraction_tells_what_it_gave(tiny: Path, tmp_path: Path) -> None:
    counts: list[tuple[int, int]] = []
    given = tiny_search(tiny, tmp_path, layers="1-2", store=str(tmp_path / "store"))
    done = verbs.steer_extract(given, on_count=lambda *count: counts.append(count))
    assert (done.num_texts, done.layers, done.width) == (160, (1, 2), 32)
    assert counts[-1] == (160, 160)
    assert list((tmp_path / "store").glob("*.safetensors"))
    assert done.num_read == 0 and done.break_even is not None and "storing pays from use" in done.break_even
    stored = 160 * 2 * 32 * 4
    again = verbs.steer_extract({**given, "tiers": ("cpu=1MB", "cpu=10"), "store_limit": "1GB"})
    assert (again.num_read, again.break_even) == (160, None)
    assert [tier.held_bytes for tier in again.tiers] == [stored, 0]
    small = verbs.steer_extract({**given, "tiers": (f"cpu={stored // 2}", "cpu=1MB")})
    assert [tier.held_bytes for tier in small.tiers] == [
        stored // 2,
        stored // 2,
    ]  # the older half was displaced
    with pytest.raises(BadInput, match=r"store_limit='much'.*tier 'tpu=1GB' is not DEVICE=SIZE"):
        verbs.steer_extract({**given, "tiers": ("tpu=1GB",), "store_limit": "much"})


def test_fit_leaves_the_questions_of_the_test_alone_unless_told(tiny: Path, tmp_path: Path) -> None:
    given = tiny_search(tiny, tmp_path, vectors=str(tmp_path / "v"), store=str(tmp_path / "store"))
    seen: list[int] = []
    (half,) = verbs.steer_fit(given, on_count=lambda done, total: seen.append(total))
    verbs.steer_fit(given, whole=True, on_count=lambda done, total: seen.append(total))
    assert (min(seen), max(seen)) == (80, 160)
    assert Path(half.path).is_file() and half.layers == (0, 1, 2, 3) and min(half.norms) > 0


def test_a_model_of_the_hub_is_the_folder_that_the_hub_fetched(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = lambda name, **_: str(tiny / "model") if name == "owner/tiny" else ""  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    given = tiny_search(tiny, tmp_path, vectors=str(tmp_path / "v"), store=str(tmp_path / "store"))
    (of_hub,) = verbs.steer_fit({**given, "model": "owner/tiny"})
    held = load_file(of_hub.path)
    (of_folder,) = verbs.steer_fit({**given, "vectors": str(tmp_path / "again")})
    assert all(held[name].equal(tensor) for name, tensor in load_file(of_folder.path).items())


def test_a_search_writes_its_report(run: tuple[Path, StudyRecord]) -> None:
    out, record = run
    assert "<h2>On fresh questions</h2>" in (out / "report.html").read_text()
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert verbs.steer_report(out) == record == verbs.steer_report(out / "result.json")


def test_modes_and_several_layers_are_searched_and_the_winner_is_applied_as_it_was_found(
    tiny: Path, run: tuple[Path, StudyRecord], tmp_path: Path
) -> None:
    vectors = str(run[0] / "vectors")
    choices = {"modes": ("clamp", "project-out"), "spans": (2, 3), "sampler": "random", "layers": "0-1,3"}
    given = tiny_search(tiny, tmp_path / "modes", vectors=vectors, trials=5, examples=1, **choices)
    record = verbs.steer(given).record
    assert record is not None and record.winner is not None and record.examples
    assert {(trial.mode, trial.span) for trial in record.trials} <= {
        (mode, span) for mode in ("clamp", "project-out") for span in (2, 3)
    }
    assert (
        f"and the {record.winner.span - 1} after it, mean-difference, {record.winner.mode}"
        in record.headline()
    )
    shown = record.examples[0]
    (again,) = verbs.steer_apply([shown.prompt], run=tmp_path / "modes", max_new_tokens=4)
    assert again == shown


def test_a_search_that_has_not_ended_is_reported_as_far_as_it_is(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    seen = 0

    def interrupting(event: Event) -> None:
        nonlocal seen
        seen += event.kind == "complete"
        if seen:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        verbs.steer(tiny_search(tiny, out, rungs=1), on_event=interrupting)
    record = verbs.steer_report(out, html=tmp_path / "half.html", png=tmp_path / "half.png")
    assert record.count("complete") == 1 and record.count("running") == 5
    assert record.retest is None
    assert "not been tested on fresh questions" in (tmp_path / "half.html").read_text()


def test_a_folder_with_other_files_is_not_written_into(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "vectors").mkdir()
    given = tiny_search(tiny, tmp_path, trials=2, examples=0)
    with pytest.raises(BadInput, match=r"is not empty: it holds report\.html"):
        verbs.steer(given)
    assert (tmp_path / "report.html").read_text() == "mine"
    (tmp_path / "report.html").unlink()
    assert verbs.steer(given).record is not None  # vectors may be there before


def test_the_winner_of_a_run_and_a_named_vector_are_the_same(
    tiny: Path, run: tuple[Path, StudyRecord], tmp_path: Path
) -> None:
    out, record = run
    winner = record.winner
    assert winner is not None
    prompts = [example.prompt for example in record.examples]
    by_run = verbs.steer_apply(prompts, model=tiny / "model", run=out, max_new_tokens=4, device="cpu")
    assert by_run == list(record.examples)
    own = out / "vectors" / f"{winner.method}.safetensors"
    plain, control = tmp_path / "plain.safetensors", tmp_path / "control.gguf"
    for file in (plain, control):
        verbs.steer_convert(own, to=file, plain=True)
    for vectors in (own, plain, control):
        named = verbs.steer_apply(
            prompts,
            model=tiny / "model",
            vectors=vectors,
            layer=winner.layer,
            strength=winner.strength,
            max_new_tokens=4,
            device="cpu",
        )
        assert named == by_run, vectors
    (zero,) = verbs.steer_apply(
        prompts[:1], model=tiny / "model", run=out, strength=0.0, max_new_tokens=4, device="cpu"
    )
    assert zero.steered == zero.unsteered


def test_a_run_that_was_moved_is_applied_with_its_own_model(
    run: tuple[Path, StudyRecord], tmp_path: Path
) -> None:
    out, record = run
    moved = tmp_path / "moved"
    shutil.copytree(out, moved)
    settings = json.loads((moved / "settings.json").read_text())
    (moved / "settings.json").write_text(json.dumps({**settings, "out": "where it was made"}))
    prompts = [example.prompt for example in record.examples]
    assert verbs.steer_apply(prompts, run=moved, max_new_tokens=4, device="cpu") == list(record.examples)
    with pytest.raises(BadInput, match="no model is given"):
        verbs.steer_apply(
            ["is"], vectors=out / "vectors" / "mean-difference.safetensors", layer=1, strength=1.0
        )


def test_vectors_of_another_library_are_searched_and_given_back(
    tiny: Path, run: tuple[Path, StudyRecord], tmp_path: Path
) -> None:
    fitted = run[0] / "vectors" / "mean-difference.safetensors"
    out = verbs.steer_convert(fitted, to=tmp_path / "out" / "there.gguf", model="llama")
    assert (out.method, len(out.layers), out.width) == ("mean-difference", 4, 32)
    plain = verbs.steer_convert(fitted, to=tmp_path / "out" / "there.safetensors", plain=True)
    held = load_file(plain.path)
    assert held.keys() == {f"layer.{layer}" for layer in out.layers}  # a dict of steering-vectors
    vectors, again = (formats.read(path) for path in (fitted, plain.path))
    assert all(tensor.equal(vectors.added(layer=int(n[6:]), strength=1.0)) for n, tensor in held.items())
    assert again.layers == out.layers and again.method == "imported"
    back = verbs.steer_convert(out.path, to=tmp_path / "vectors" / "theirs.safetensors")
    assert (back.method, back.layers) == ("imported", out.layers)
    given = tiny_search(tiny, tmp_path / "run", methods=("theirs",), vectors=str(tmp_path / "vectors"))
    record = verbs.steer({**given, "trials": 2, "examples": 0}).record
    assert record is not None and {trial.method for trial in record.trials} == {"theirs"}
    for source, to, words in (
        (tmp_path / "x.pt", "y.gguf", "is a pickle, which flatout never loads"),
        (fitted, "y.pt", "neither .gguf nor .safetensors"),
    ):
        with pytest.raises(BadInput, match=words):
            verbs.steer_convert(source, to=tmp_path / to)


def test_vectors_of_another_model_are_used_with_a_warning(
    tiny: Path, run: tuple[Path, StudyRecord], tmp_path: Path
) -> None:
    given = {"vectors": run[0] / "vectors" / "mean-difference.safetensors", "layer": 1, "strength": 0.1}
    other = tmp_path / "model"
    shutil.copytree(tiny / "model", other)
    weights = other / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] * 2}, weights, {"format": "pt"})
    with pytest.warns(RuntimeWarning, match="fitted on other weights"):
        verbs.steer_apply(["is"], model=other, device="cpu", max_new_tokens=1, **given)  # type: ignore[arg-type]
    with warnings.catch_warnings(action="error"):
        verbs.steer_apply(["is"], model=tiny / "model", device="cpu", max_new_tokens=1, **given)  # type: ignore[arg-type]


def test_what_apply_cannot_do_is_named(tiny: Path, run: tuple[Path, StudyRecord], tmp_path: Path) -> None:
    vectors = run[0] / "vectors" / "mean-difference.safetensors"
    for changes, words in (
        ({}, "either --run or --vectors"),
        ({"vectors": vectors}, "no layer or no strength"),
        ({"vectors": vectors, "layer": 9, "strength": 1.0}, "no vector for layer 9"),
        ({"vectors": vectors, "layer": 1, "strength": 1.0, "mode": "twist"}, "mode 'twist'"),
        ({"run": tmp_path}, "a study of flatout steer is needed"),
    ):
        with pytest.raises(BadInput, match=words):
            verbs.steer_apply(["is"], model=tiny / "model", device="cpu", **changes)  # type: ignore[arg-type]


def test_a_run_without_a_winner_cannot_be_applied(
    tiny: Path, run: tuple[Path, StudyRecord], tmp_path: Path
) -> None:
    document = json.loads((run[0] / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps({**document, "best": None}))
    with pytest.raises(BadInput, match="has no winner"):
        verbs.steer_apply(["is"], model=tiny / "model", run=tmp_path, device="cpu")


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="a study of flatout steer is needed"):
        verbs.steer_report(tmp_path)


def test_a_search_without_a_folder_gets_one_among_the_runs_and_is_resumed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_RUNS", str(tmp_path / "runs"))
    with pytest.raises(BadInput, match="no run of flatout steer to resume"):
        verbs.steer({}, resume=True)
    given = tiny_search(tiny, tmp_path, trials=2, examples=0)
    del given["out"]
    first = verbs.steer(given)
    ((folder, run),) = list_runs(kind="steer")
    assert first.out == str(folder) and "questions" in folder.name
    assert run.end == "finished" and (folder / "report.html").is_file()
    again = verbs.steer({"trials": 4}, resume=True)
    assert again.out == first.out
    assert again.record is not None and len(again.record.trials) == 4
    with pytest.raises(BadInput, match="holds no search to resume"):
        verbs.steer({**given, "out": str(tmp_path / "other")}, resume=True)
