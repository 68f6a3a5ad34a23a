"""The Darkroom example: honest histories, the true shape of its data, and a slow forward that is right."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.cli import modules_of
from tests.support.warm_python import warm

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "darkroom"
MODULES = ("histories", "dataset", "model", "train")
FLOATS = ("states", "actions", "rewards", "next_states")
GUILTY = "# guilty: row-indexing-in-loop, tensor-created-in-loop"


@pytest.fixture(scope="module")
def darkroom() -> Iterator[SimpleNamespace]:
    with modules_of(FOLDER, MODULES) as modules:
        yield modules


def make_histories(module: ModuleType, *, goals: int, seed: int = 0, num_steps: int = 1000) -> Any:
    training, _held_out = module.split_goals(goals, seed=seed)
    return module.learning_histories(training, histories_per_goal=2, num_steps=num_steps, seed=seed)


def test_goals_are_split_without_overlap(darkroom: SimpleNamespace) -> None:
    training, held_out = darkroom.histories.split_goals(73, seed=3)
    assert len(training) == 73
    assert len(held_out) == 8
    assert len({tuple(goal) for goal in np.concatenate([training, held_out])}) == 81


def test_histories_obey_the_grid(darkroom: SimpleNamespace) -> None:
    h = make_histories(darkroom.histories, goals=73)
    moves = darkroom.histories.MOVES[h.actions]
    np.testing.assert_array_equal(h.next_states, np.clip(h.states + moves, 0, 8))
    np.testing.assert_array_equal(h.rewards, (h.next_states == h.goals[:, None]).all(-1))
    episode_starts = np.arange(h.num_steps) % 20 == 0
    assert (h.states[:, episode_starts] == 4).all()
    follows = ~episode_starts[1:]
    np.testing.assert_array_equal(h.states[:, 1:][:, follows], h.next_states[:, :-1][:, follows])
    assert set(np.unique(h.actions)) == {0, 1, 2, 3, 4}


def test_the_learner_learns(darkroom: SimpleNamespace) -> None:
    h = make_histories(darkroom.histories, goals=73)
    reward_by_tenth = h.rewards.reshape(len(h), 10, 100).mean(axis=(0, 2))
    assert (np.diff(reward_by_tenth[:5]) > 0).all()
    assert reward_by_tenth[-1] > 10 * reward_by_tenth[0]


def test_histories_are_given_by_the_seed(darkroom: SimpleNamespace) -> None:
    one, same, other = (make_histories(darkroom.histories, goals=5, seed=seed) for seed in (1, 1, 2))
    for name in ("goals", "states", "actions", "rewards", "next_states"):
        np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
    assert (one.actions != other.actions).any()


def test_samples_have_113_rows_on_average(darkroom: SimpleNamespace) -> None:
    samples = darkroom.dataset.RegionDataset(make_histories(darkroom.histories, goals=1))
    previous, current, rows = np.array(
        [
            (sample["previous_length"], sample["current_length"], len(sample["states"]))
            for sample in map(samples.__getitem__, range(len(samples)))
        ]
    ).T
    np.testing.assert_array_equal(rows, previous + current)
    assert set(previous) == {0, 80}
    assert set(current) == set(range(80))
    assert round(rows.mean()) == 113


def test_a_sample_is_a_moment_of_a_history(darkroom: SimpleNamespace) -> None:
    h = make_histories(darkroom.histories, goals=2)
    samples = darkroom.dataset.RegionDataset(h)
    region, position, history = 3, 17, 2
    sample = samples[(history * samples.num_regions + region) * 80 + position]
    moment = region * 80 + position
    rows = slice((region - 1) * 80, moment)
    for name in ("states", "actions", "rewards", "next_states"):
        np.testing.assert_array_equal(sample[name], getattr(h, name)[history, rows])
    np.testing.assert_array_equal(sample["query"], h.states[history, moment])
    assert sample["target_action"] == h.actions[history, moment]
    assert sample["target_type"] == 0

    last = samples[79]
    assert (last["previous_length"], last["target_type"], last["target_action"]) == (0, 2, -1)


def test_collate_pads_with_zeros(darkroom: SimpleNamespace) -> None:
    samples = darkroom.dataset.RegionDataset(make_histories(darkroom.histories, goals=1))
    short, long = samples[3], samples[100]
    batch = darkroom.dataset.collate([short, long])
    assert batch["states"].shape == (2, 100, 2)
    assert batch["actions"].shape == (2, 100, 5)
    np.testing.assert_array_equal(batch["states"][0, :3], short["states"])
    np.testing.assert_array_equal(batch["next_states"][1], long["next_states"])
    np.testing.assert_array_equal(batch["actions"][1].argmax(-1), long["actions"])
    assert not batch["states"][0, 3:].any()
    assert not batch["rewards"][0, 3:].any()
    assert (batch["previous_length"], batch["current_length"]) == ([0, 80], [3, 20])


def build_vectorised(
    model: Any, context: Tensor, query: Tensor, previous_length: list[int], current_length: list[int]
) -> Tensor:
    """All tokens by one gather from a table of rows, query, start, end and zero."""
    num_samples, num_rows, _ = context.shape
    query_row, start_row, end_row, zero_row = range(num_rows, num_rows + 4)
    previous = torch.tensor(previous_length)[:, None]
    current = torch.tensor(current_length)[:, None]
    before = torch.where(previous > 0, previous + 2, 0)
    place = torch.arange(int((before + current).max()) + 2)[None]
    after = place - before
    row = torch.where(after == current + 1, query_row, zero_row)
    row = torch.where(after <= current, previous + after - 1, row)
    row = torch.where(after == 0, start_row, row)
    row = torch.where(place < before, place - 1, row)
    row = torch.where((place < before) & (place == previous + 1), end_row, row)
    row = torch.where((place < before) & (place == 0), start_row, row)

    kind = model.token_type.weight
    start = (model.region_start + kind[1]).expand(num_samples, 1, -1)
    end = (model.region_end + kind[2]).expand(num_samples, 1, -1)
    table = torch.cat([context + kind[0], query + kind[0], start, end, torch.zeros_like(query)], dim=1)
    return table[torch.arange(num_samples)[:, None], row]


@pytest.fixture
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_precision")
def test_gradient_equals_a_vectorised_forward(
    darkroom: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    samples = darkroom.dataset.RegionDataset(make_histories(darkroom.histories, goals=1))
    # No rows at all, an end of a region, both regions in part and in full, the second history.
    batch = darkroom.dataset.collate([samples[i] for i in (0, 79, 80, 121, 159, 1100)])
    batch = {name: value.double() if name in FLOATS else value for name, value in batch.items()}
    model = darkroom.model.DarkroomTransformer()

    def loss_and_gradient() -> tuple[float, Tensor]:
        model.zero_grad()
        loss = darkroom.model.imitation_loss(*model(batch), batch)
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    slow_loss, slow = loss_and_gradient()
    monkeypatch.setattr(darkroom.model.DarkroomTransformer, "build_sequence", build_vectorised)
    fast_loss, fast = loss_and_gradient()
    assert slow.abs().max() > 0.1
    assert abs(slow_loss - fast_loss) <= 1e-12
    assert (slow - fast).abs().max() <= 1e-12


def printed_losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", output)]


def test_loss_falls(darkroom: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """One batch over and over, which a sound training step learns by heart."""
    torch.manual_seed(0)
    samples = darkroom.dataset.RegionDataset(make_histories(darkroom.histories, goals=2))
    batch = darkroom.dataset.collate([samples[i] for i in (5, 79, 130, 600)])
    settings = darkroom.train.read_settings(["--steps", "40", "--log-every", "5", "--device", "cpu"])
    darkroom.train.train(darkroom.model.DarkroomTransformer(), itertools.repeat(batch), settings)
    losses = printed_losses(capsys.readouterr().out)
    assert len(losses) == 8
    assert losses[-1] < 0.2 * losses[0]


def test_script_repeats_itself_whatever_the_workers(
    darkroom: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--size", "small", "--goals", "2", "--batch-size", "2", "--steps", "3", "--log-every", "1"]
    command = ["python", "examples/darkroom/train.py", *flags, "--device", "cpu"]
    script = warm().run(*command, cwd=ROOT, check=True)
    darkroom.train.main([*flags, "--workers", "0", "--device", "cpu"])
    losses = printed_losses(script.stdout)
    assert len(losses) == 3
    assert re.search(r"step +3  loss \d\.\d{4}  action accuracy [01]\.\d{3}  \d+\.\d\d it/s", script.stdout)
    assert losses == pytest.approx(printed_losses(capsys.readouterr().out), abs=2e-4)


def test_sizes_fill_only_what_is_not_given(darkroom: SimpleNamespace) -> None:
    full = darkroom.train.read_settings([])
    assert (full.goals, full.histories, full.history_steps, full.batch_size) == (73, 100, 1000, 512)
    small = darkroom.train.read_settings(["--size", "small", "--goals", "3"])
    assert (small.goals, small.batch_size) == (3, 16)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--goals", "82"], "1 to 81 goals"),
        (["--history-steps", "79"], "needs 80 steps"),
        (["--batch-size", "0"], "--batch-size 0: at least 1"),
    ],
)
def test_bad_flags_are_refused(
    darkroom: SimpleNamespace, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        darkroom.train.read_settings(flags)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_guilty_lines_hold_both_operations() -> None:
    lines = (FOLDER / "model.py").read_text().splitlines()
    guilty = [line for line in lines if line.endswith(GUILTY)]
    assert len(guilty) == 2
    for line in guilty:
        assert "context[b, t]" in line
        assert "torch.tensor(" in line


def test_readme_names_the_true_lines() -> None:
    rows = re.findall(r"\| `(\w+\.py):(\d+)` \| `(.+)` \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 21
    for file, line, code in rows:
        assert code in (FOLDER / file).read_text().splitlines()[int(line) - 1], f"{file}:{line}"


def test_needs_only_torch_and_numpy() -> None:
    """The slow job; `train_fast.py` and what it is made of need flatout too."""
    sources = [FOLDER / f"{name}.py" for name in MODULES]
    known = {*sys.stdlib_module_names, *MODULES, "torch", "numpy"}
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            assert {name.split(".")[0] for name in names} <= known, source.name
