"""Whole runs: what they leave, how they go on, and what they refuse."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatout.api import report_run
from flatout.engines.evolution.settings import read_settings
from flatout.engines.evolution.tasks.prompt_file import PromptFile
from flatout.engines.evolution.training import trainer
from flatout.engines.evolution.training.records import EpochRecord, read_log
from flatout.engines.evolution.training.trainer import evolve, open_run
from flatout.engines.run import checkpoints
from flatout.engines.run.ranks import Ranks
from flatout.ground import runs
from flatout.ground.errors import BadInput, BatchDoesNotFit, ChildDied, Interrupted
from flatout.monitor.past.engine_runs import digest_run
from flatout.multiplex.decode import generator
from tests.support.evolution import save_tiny, save_tiny_texts, tiny_settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def tensors(out: Path, epoch: int) -> dict[str, Any]:
    return load_file(out / "checkpoints" / f"epoch-{epoch:06d}" / "tensors.safetensors")


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def test_a_run_leaves_its_log_its_checkpoints_its_model_and_a_plot(model: Path, tmp_path: Path) -> None:
    out, seen, notes = tmp_path / "run", [], []
    settings = tiny_settings(model, out, save_model=True)
    outcome = evolve(settings, on_event=seen.append, on_progress=notes.append)
    assert [record.epoch for record in seen] == [0, 1, 2, 3, 4]
    assert [record.reward_heldout is not None for record in seen] == [True, False, True, False, True]
    assert seen == read_log(out)
    for record in seen[1:]:
        assert 0 <= record.reward_train <= 1
        assert record.tokens_per_s > 0 and record.rewards_per_s > 0 and record.plain_share > 0
        assert record.failed_rows == 0
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["epoch-000002", "epoch-000004"]
    assert (outcome.epochs, outcome.untrained_score, outcome.score) == (
        4,
        seen[0].reward_heldout,
        seen[4].reward_heldout,
    )
    assert outcome.plot is not None and Path(outcome.plot).read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").iterdir())
    saved = load_file(out / "model" / "model.safetensors")
    master = tensors(out, 4)["master/model.layers.0.self_attn.o_proj"]
    assert saved["model.layers.0.self_attn.o_proj.weight"].equal(master)
    assert any("members per chunk: 4" in note for note in notes)
    assert any(note.startswith("steps: eager") for note in notes)
    assert "frozen: model.embed_tokens.weight (512), model.layers.*.input_layernorm.weight (32)" in "".join(
        notes
    )
    assert [len(record.samples) for record in seen] == [4, 0, 4, 0, 4]
    shown = seen[-1].samples[0]
    assert len(shown.prompt.split()) == 3 and len(shown.completion.split()) == 2 and 0 <= shown.reward <= 1
    assert outcome.report is not None
    report_run(out, html=tmp_path / "again.html", png=tmp_path / "again.png")
    page = Path(outcome.report).read_text()
    assert (tmp_path / "again.html").read_text() == page and (tmp_path / "again.png").is_file()
    assert "model.embed_tokens.weight (512)" in page and shown.completion in page


SCHEDULED = {"lr_schedule": "cosine", "sigma_schedule": "linear", "schedule_epochs": 3, "optimizer": "adamw"}


@pytest.mark.parametrize("changes", [{}, {**SCHEDULED, "lr": 0.01}, {"temperature": 1.0}])
def test_a_resumed_run_goes_on_bit_for_bit(changes: dict[str, Any], model: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    evolve(tiny_settings(model, whole, **changes))
    evolve(tiny_settings(model, parts, epochs=2, **changes))
    evolve({"out": str(parts), "epochs": 4}, resume=True)
    assert same(tensors(whole, 4), tensors(parts, 4))
    if "lr_schedule" in changes:
        steps = [(each.sigma, each.lr) for each in read_log(whole)[1:]]
        assert steps[0] == (0.1, 0.01) and steps[3] == pytest.approx((0.01, 0.0))
        assert steps[1] == pytest.approx((0.07, 0.0075)) and steps[0] > steps[1] > steps[2] > steps[3]
    records = [
        [(each.epoch, each.reward_train, each.reward_heldout, each.statistics) for each in read_log(out)]
        for out in (whole, parts)
    ]
    assert records[0] == records[1]


def test_an_interrupt_in_the_middle_of_an_epoch_leaves_a_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    evolve(tiny_settings(model, whole))
    generate = trainer.Eggroll.generate
    calls = []

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if self.epoch == 3 and not options["plain"]:
            signal.raise_signal(signal.SIGINT)
        return generate(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(trainer.Eggroll, "generate", interrupted)
        with pytest.raises(Interrupted, match="3 of 4 epochs are kept"):
            evolve(tiny_settings(model, parts))
    assert calls
    evolve({"out": str(parts)}, resume=True)
    assert same(tensors(whole, 4), tensors(parts, 4))


def test_a_run_without_enough_memory_goes_on_with_fewer_rows_to_the_same_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, less = tmp_path / "whole", tmp_path / "less"
    evolve(tiny_settings(model, whole))
    made, notes = generator.Generator.__init__, []

    def too_small(self: Any, *arguments: Any, **options: Any) -> None:
        if options["slots"] > 4:
            raise torch.OutOfMemoryError(f"{options['slots']} rows")
        made(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(generator.Generator, "__init__", too_small)
        evolve(tiny_settings(model, less), on_progress=notes.append)
        told = [note for note in notes if "out of memory" in note]
        assert len(told) == 2 and "with 16 rows at once: continuing with 8" in told[0]
        assert same(tensors(whole, 4), tensors(less, 4))
        state = json.loads((less / "checkpoints" / "epoch-000004" / "state.json").read_text())
        assert state["rows"] == 4  # a run that resumes does not try again what did not fit
        patched.setattr(generator.Generator, "__init__", lambda *_, **__: (_ for _ in ()).throw(oom()))
        with pytest.raises(BatchDoesNotFit, match="not even one row"):
            evolve(tiny_settings(model, tmp_path / "none"))


def oom() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("none left")


def test_an_interrupt_during_an_update_waits_for_its_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = trainer.Eggroll.tell

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return tell(self, *arguments, **options)

    monkeypatch.setattr(trainer.Eggroll, "tell", interrupted)
    with pytest.raises(Interrupted, match="1 of 4 epochs are kept"):
        evolve(tiny_settings(model, tmp_path / "run"))
    assert [record.epoch for record in read_log(tmp_path / "run")] == [0, 1]


def told(out: Path) -> list[tuple[Any, ...]]:
    """What a log says of every epoch, but for times."""
    return [
        (each.epoch, each.reward_train, each.reward_heldout, each.samples, each.statistics)
        for each in read_log(out)
    ]


def test_an_epoch_whose_judgement_was_interrupted_is_in_the_log_and_judged_later(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    evolve(tiny_settings(model, whole))
    judge = trainer.Answers.held_out

    def interrupted(self: Any) -> Any:
        if self._es.epoch == 2:
            signal.raise_signal(signal.SIGINT)
        return judge(self)

    with monkeypatch.context() as patched:
        patched.setattr(trainer.Answers, "held_out", interrupted)
        with pytest.raises(Interrupted, match="2 of 4 epochs are kept"):
            evolve(tiny_settings(model, parts))
    assert [(each.epoch, each.reward_heldout) for each in read_log(parts)][2] == (2, None)
    evolve({"out": str(parts)}, resume=True)
    assert told(parts) == told(whole)


class Deputy(Ranks):
    """The first rank of the second node, which computes everything here and loses the first in an epoch."""

    first, is_deputy = False, True  # type: ignore[assignment]
    lost_in = 0

    def gather(self, values: Any, *, what: str = "flags") -> Any:
        self.lost_in -= what == "rewards"
        if self.lost_in == 0:
            raise ChildDied("another rank is gone")
        return values


@pytest.mark.parametrize(("lost_in", "written"), [(1, 0), (3, 2), (3, 3)])
def test_who_is_left_writes_the_record_that_the_first_did_not_come_to_write(
    lost_in: int, written: int, model: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    evolve(tiny_settings(model, whole))
    deputy = Deputy(device=torch.device("cpu"))
    deputy.lost_in = lost_in
    settings, _ = open_run(tiny_settings(model, parts), parts, resume=False)
    survivor = trainer.Trainer(settings, ranks=deputy)
    with survivor._open_log() as first:
        for record in read_log(whole)[:written]:
            first.write(record)
        first._file.write(b'{"epoch": 2, "rewa')  # it was killed here
    with pytest.raises(ChildDied, match="gone"):
        survivor.run()
    assert [record.epoch for record in read_log(parts)] == [*range(lost_in if written else 0)]
    evolve({"out": str(parts)}, resume=True)
    assert told(parts) == told(whole) and same(tensors(whole, 4), tensors(parts, 4))


def test_a_record_is_on_the_disk_before_the_checkpoint_that_knows_its_epoch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "run", []
    flush, save = trainer.RunLog.flush, checkpoints.Checkpoints.save

    def flushed(self: Any) -> None:
        flush(self)
        seen.append([record.epoch for record in read_log(out)][-1])

    def saved(self: Any, number: int, **options: Any) -> Any:
        assert seen[-1] == number
        return save(self, number, **options)

    monkeypatch.setattr(trainer.RunLog, "flush", flushed)
    monkeypatch.setattr(checkpoints.Checkpoints, "save", saved)
    evolve(tiny_settings(model, out))
    assert seen == [2, 4]


def problems(folder: Path) -> Path:
    path = folder / "problems.jsonl"
    rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_task_of_text_needs_a_tokenizer(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no tokenizer"):
        evolve(tiny_settings(model, tmp_path / "run", task=str(problems(tmp_path)), task_options={}))


def rewarded(folder: Path, reward: str) -> dict[str, Any]:
    """Settings of a run on texts with a reward of the user's."""
    model = save_tiny_texts(folder / "model")
    return tiny_settings(
        model,
        folder / "run",
        task=str(problems(folder)),
        task_options={"reward": reward},
        max_new_tokens=4,
        epochs=1,
        reward_workers=1,
    )


def test_a_reward_by_name_scores_a_file_of_sources_and_targets(tmp_path: Path) -> None:
    path, seen = tmp_path / "numbers.jsonl", []
    path.write_text("".join(json.dumps({"source": f"{n}", "target": f"{n}"}) + "\n" for n in range(40)))
    for reward in ("exact", "numeric", "bleu"):
        settings = {**rewarded(tmp_path, reward), "out": str(tmp_path / reward), "task": str(path)}
        evolve(settings, on_event=seen.append)
        assert seen[-1].failed_rows == 0


def test_a_task_object_runs_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}", "total": n}) + "\n" for n in range(40)))
    reward: Any = {"exact": 1.0, "format:[0-9]": 0.5}
    task = PromptFile(path=path, reward=reward, max_new_tokens=3, stop=("\n",))
    settings = {**rewarded(tmp_path, "exact"), "task": task, "task_options": {}, "max_new_tokens": None}
    first = evolve(settings)
    assert first.last is not None and first.last.failed_rows == 0
    saved = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert saved["task"].endswith(":PromptFile") and saved["task_options"]["stop"] == ["\n"]
    assert evolve({**settings, "epochs": 2}, resume=True).epochs == 2
    with pytest.raises(BadInput, match="task_options work only for a named task"):
        evolve({**settings, "task_options": {"length": 2}})
    with pytest.raises(BadInput, match="has no name"):
        evolve({**settings, "task": object()})


def test_a_reward_that_raises_costs_its_rows_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_rewards.py").write_text(
        "def of_odd(completion, answer):\n    return len(completion) / (int(answer['answer']) % 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    seen, notes = [], []
    evolve(rewarded(tmp_path, "odd_rewards:of_odd"), on_event=seen.append, on_progress=notes.append)
    assert seen[-1].failed_rows is not None and 0 < seen[-1].failed_rows < 16 * 4
    assert seen[-1].failed_rows % 16 == 0  # every member fails on the same prompts
    assert seen[-1].reward_train is not None
    assert any("rewards failed" in note and "ZeroDivisionError" in note for note in notes), notes


def test_a_reward_that_always_raises_ends_the_run_at_once(tmp_path: Path) -> None:
    seen, notes = [], []
    with pytest.raises(BadInput, match=r"none of the 64 rows .* has a reward: 64 failed: .*TypeError"):
        # a text divided by a mapping
        evolve(rewarded(tmp_path, "operator:truediv"), on_event=seen.append, on_progress=notes.append)
    assert [record.epoch for record in seen] == [0]
    assert all("TypeError" in note for note in notes if "rewards failed" in note)
    assert sum("rewards failed" in note for note in notes) > 1, notes  # of the held-out prompts too


def test_a_reward_that_is_not_for_every_row_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_rewards.py").write_text(
        "def of_some(completions, answer):\n"
        "    return [len(c) if int(a) % 2 else None for c, a in zip(completions, answer)]\n"
        "def of_none(completion, answer):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    seen, notes = [], []
    evolve(rewarded(tmp_path, "some_rewards:of_some"), on_event=seen.append, on_progress=notes.append)
    last = seen[-1]
    assert last.failed_rows == 0 and last.reward_train is not None
    assert 0 < last.statistics["reward_failures"] < 16 * 4  # rows without a reward
    assert not any("failed" in note for note in notes), notes
    none = {**rewarded(tmp_path, "some_rewards:of_none"), "out": str(tmp_path / "none")}
    with pytest.raises(BadInput, match=r"none of the 64 rows .* has a reward: the reward is None for each"):
        evolve(none)


def test_a_run_resumed_with_another_reward_shows_the_reward_it_has(tmp_path: Path) -> None:
    settings = rewarded(tmp_path, "operator:truediv")
    with pytest.raises(BadInput, match="none of the 64 rows of the first epoch has a reward"):
        evolve(settings)
    out, options = tmp_path / "run", {"reward": "numeric"}
    notes: list[str] = []
    evolve({**settings, "task_options": options}, resume=True, on_progress=notes.append)
    assert f"{out} has no checkpoint yet: starting from epoch 0" in notes
    assert read_settings(out)["task_options"] == options
    headers = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines() if "format" in line]
    assert [each["settings"]["task_options"]["reward"] for each in headers] == ["operator:truediv", "numeric"]
    assert [record.epoch for record in read_log(out)] == [0, 1]
    assert digest_run(out).steps == 1


def test_a_finished_run_keeps_its_score_when_it_is_resumed(model: Path, tmp_path: Path) -> None:
    settings, notes = tiny_settings(model, tmp_path / "run"), []
    first = evolve(settings)
    again = evolve(settings, resume=True, on_progress=notes.append)
    assert again.score is not None and again.score == first.score
    assert "epoch 4 is done: nothing is left to train; --epochs asks for more" in notes


def test_a_tiny_model_learns_to_copy_digits(model: Path, tmp_path: Path) -> None:
    """Chance is one digit in ten; more than three is a model that looks at the right place."""
    seen: list[EpochRecord] = []
    settings = tiny_settings(model, tmp_path / "run", population=128, prompts=8, epochs=40, rows=256)
    evolve({**settings, "evaluate_every": 40, "checkpoint_every": 40}, on_event=seen.append)
    rewards = [record.reward_train or 0.0 for record in seen[1:]]
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-20:]) / 20 > 0.35


def test_what_cannot_be_resumed_is_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    evolve(tiny_settings(model, out, epochs=1))
    with pytest.raises(BadInput, match="is not empty"):
        evolve(tiny_settings(model, out))
    with pytest.raises(BadInput, match=r"the run has sigma=0\.1"):
        evolve(tiny_settings(model, out, sigma=0.2), resume=True)
    with pytest.raises(BadInput, match="has no checkpoint to resume"):
        evolve({"out": str(tmp_path / "absent"), "epochs": 2}, resume=True)
    other = save_tiny(tmp_path / "other", seed=5)
    with pytest.raises(BadInput, match="belongs to a model other"):
        evolve({"out": str(out), "model": str(other), "epochs": 2}, resume=True)


def test_a_run_that_did_not_begin_is_begun(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings, found = open_run(tiny_settings(model, out), out, resume=True)
    assert found is None and settings.population == 16


def test_a_process_that_was_started_again_resumes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    evolve(tiny_settings(model, out, epochs=2))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    seen: list[EpochRecord] = []
    evolve(tiny_settings(model, out), on_event=seen.append)
    assert [record.epoch for record in seen] == [3, 4]


def test_another_number_of_threads_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, notes = tmp_path / "run", []
    evolve(tiny_settings(model, out, epochs=1))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        evolve({"out": str(out), "epochs": 2}, resume=True, on_progress=notes.append)
    finally:
        torch.set_num_threads(threads)
    assert any("last bits" in note for note in notes)


def test_prompts_that_do_not_fit_the_model_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="exceed the model's 256"):
        evolve(tiny_settings(model, tmp_path / "run", max_new_tokens=300))


def test_int8_weights_run_too(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    evolve(tiny_settings(model, out, arithmetic="int8", lr=0.3, epochs=1))
    assert tensors(out, 1)["integers/model.layers.0.mlp.down_proj"].dtype == torch.int8


def test_without_a_folder_a_run_lands_among_all_runs_and_resumes_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLATOUT_RUNS", raising=False)
    settings = tiny_settings(model, tmp_path, epochs=1)
    del settings["out"]
    outcome = evolve(settings)
    [(folder, run)] = runs.list_runs()
    assert outcome.out == str(folder) and folder.is_relative_to(tmp_path / ".flatout" / "runs")
    assert (run.kind, run.end, runs.state_of(run)) == ("evolve", "finished", "ended")
    again = evolve({"epochs": 2}, resume=True)
    assert (again.out, again.epochs) == (outcome.out, 2)
    # A run folder stands wherever a settings file does.
    more = evolve({**read_settings(folder), "epochs": 3}, resume=True)
    assert (more.out, more.epochs) == (outcome.out, 3)


def test_a_run_that_fails_says_so_in_its_folder(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(BadInput, match="none of the 64 rows"):
        evolve(rewarded(tmp_path, "operator:truediv"))
    assert "none of the 64 rows" in (runs.read_run(out).end or "")


@pytest.mark.parametrize("noise", ["int8", "normal"])
def test_half_precision_without_bfloat16_runs_too(noise: str, model: Path, tmp_path: Path) -> None:
    """What a T4 computes in."""
    out, seen = tmp_path / "run", []
    evolve(tiny_settings(model, out, dtype="float16", noise=noise, epochs=2), on_event=seen.append)
    assert [record.epoch for record in seen] == [0, 1, 2]
    assert tensors(out, 2)["master/model.layers.0.mlp.down_proj"].dtype == torch.float32
