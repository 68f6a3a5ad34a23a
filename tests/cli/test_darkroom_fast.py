"""The fast Darkroom job computes what the slow one does, and its evaluation sees what the model sees."""

from __future__ import annotations

import importlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.cli import modules_of
from tests.support.gpu import no_synchronisation
from tests.support.warm_python import warm

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "darkroom"
MODULES = ("histories", "dataset", "model", "train", "fast_model", "fast_data", "fast_step", "every_moment",
           "train_fast", "rollout", "evaluate")  # fmt: skip
# No rows at all, an end of a region, both regions in part and in full, and others.
SAMPLES = [0, 79, 80, 121, 158, 159, 1100, 1700]


@pytest.fixture(scope="module")
def darkroom() -> Iterator[SimpleNamespace]:
    with modules_of(FOLDER, MODULES) as modules:
        yield modules


@pytest.fixture(scope="module")
def histories(darkroom: SimpleNamespace) -> Any:
    goals, _held_out = darkroom.histories.split_goals(2, seed=0)
    return darkroom.histories.learning_histories(goals, histories_per_goal=1, num_steps=1000, seed=0)


@pytest.fixture(scope="module")
def weights(darkroom: SimpleNamespace) -> dict[str, Tensor]:
    torch.manual_seed(0)
    state: dict[str, Tensor] = darkroom.model.DarkroomTransformer().state_dict()
    return state


def slow_batch(darkroom: SimpleNamespace, histories: Any, samples: list[int]) -> Any:
    source = darkroom.dataset.RegionDataset(histories)
    return darkroom.dataset.collate([source[i] for i in samples])


def fast_batch(darkroom: SimpleNamespace, histories: Any, samples: Any, *, one_shape: bool = False) -> Any:
    data = darkroom.fast_data
    batches = data.batches_on(
        data.moments(histories), device="cpu", batch_size=1, seed=0, one_shape=one_shape
    )
    return batches.gather(np.asarray(samples))


def fast_model(darkroom: SimpleNamespace, weights: dict[str, Tensor], **flags: bool) -> Any:
    model = darkroom.fast_model.FastDarkroom(**flags)
    model.load_state_dict(weights)
    return model


def gradient(model: torch.nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_samples_are_those_of_the_slow_loader(darkroom: SimpleNamespace, histories: Any) -> None:
    source = darkroom.dataset.RegionDataset(histories)
    samples = darkroom.fast_data.moments(histories)
    assert len(samples) == len(source) == 1920
    every = np.arange(len(source))
    slow, fast = (
        slow_batch(darkroom, histories, list(every)),
        fast_batch(darkroom, histories, every, one_shape=True),
    )
    num_rows = np.array(slow["previous_length"]) + np.array(slow["current_length"])
    there = torch.arange(159) < torch.from_numpy(num_rows)[:, None]
    rows = darkroom.fast_model.transition_rows(slow)
    assert torch.equal(fast["transitions"], torch.where(there[..., None], rows, 0.0))
    assert torch.equal(fast["cell"], slow["query"] @ torch.tensor([9, 1]))
    for name in ("previous_length", "current_length", "target_type", "target_action"):
        assert torch.equal(fast[name], torch.as_tensor(slow[name])), name


def test_an_epoch_draws_every_sample_once(darkroom: SimpleNamespace, histories: Any) -> None:
    data = darkroom.fast_data
    samples = data.moments(histories)
    drawn = []
    for shard in range(2):
        batches = data.batches_on(
            samples, device="cpu", batch_size=60, seed=3, shard=shard, num_shards=2, one_shape=True
        )
        assert len(batches) == 16
        drawn += [batch["transitions"].sum((1, 2)) * 1000 + batch["cell"] for batch in batches]
    whole = fast_batch(darkroom, histories, np.arange(1920))
    expected = whole["transitions"].sum((1, 2)) * 1000 + whole["cell"]
    assert torch.equal(torch.cat(drawn).sort().values, expected.sort().values)
    assert not torch.equal(torch.cat(drawn), expected)


def test_batches_go_on_after_an_epoch_in_another_order(darkroom: SimpleNamespace, histories: Any) -> None:
    data = darkroom.fast_data
    batches = data.batches_on(data.moments(histories), device="cpu", batch_size=960, seed=3)
    cells = [batch["cell"] for batch in islice(data.endless(batches), 4)]
    assert not torch.equal(torch.cat(cells[:2]), torch.cat(cells[2:]))
    assert torch.equal(torch.cat(cells[:2]).sort().values, torch.cat(cells[2:]).sort().values)


def test_more_samples_per_batch_than_there_are_is_refused(darkroom: SimpleNamespace, histories: Any) -> None:
    from flatout.ground.errors import BadInput

    data = darkroom.fast_data
    with pytest.raises(BadInput, match="1920 samples do not fill one batch of 1000 on each of 2 ranks"):
        data.batches_on(data.moments(histories), device="cpu", batch_size=1000, seed=0, num_shards=2)


def test_parameters_have_the_same_names(darkroom: SimpleNamespace, weights: dict[str, Tensor]) -> None:
    fast = darkroom.fast_model.FastDarkroom().state_dict()
    assert {name: value.shape for name, value in fast.items()} == {n: v.shape for n, v in weights.items()}


@pytest.fixture(scope="module", params=[(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
def slow_step(
    request: pytest.FixtureRequest, darkroom: SimpleNamespace, histories: Any, weights: dict[str, Tensor]
) -> SimpleNamespace:
    """Loss and gradient of the slow model in a type, and how near the fast one must come."""
    dtype, tolerance = request.param
    model = darkroom.model.DarkroomTransformer()
    model.load_state_dict(weights)
    batch = slow_batch(darkroom, histories, SAMPLES)
    batch |= {name: batch[name].to(dtype) for name in ("states", "actions", "rewards", "next_states")}
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # the slow model pads with tensors of the default type
    try:
        loss = darkroom.model.imitation_loss(*model.to(dtype)(batch), batch)
    finally:
        torch.set_default_dtype(previous)
    return SimpleNamespace(loss=loss.item(), gradient=gradient(model, loss), dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("answer_row", [False, True])
@pytest.mark.parametrize("one_shape", [False, True])
def test_gradient_is_that_of_the_slow_model(
    darkroom: SimpleNamespace,
    histories: Any,
    weights: dict[str, Tensor],
    slow_step: SimpleNamespace,
    causal: bool,
    answer_row: bool,
    one_shape: bool,
) -> None:
    batch = fast_batch(darkroom, histories, SAMPLES, one_shape=one_shape)
    batch["transitions"] = batch["transitions"].to(slow_step.dtype)
    model = fast_model(darkroom, weights, causal=causal, answer_row=answer_row).to(slow_step.dtype)
    loss = darkroom.fast_model.imitation_loss_without_waiting(*model(batch), batch)
    assert abs(loss.item() - slow_step.loss) <= slow_step.tolerance
    assert (gradient(model, loss) - slow_step.gradient).abs().max() <= slow_step.tolerance
    assert slow_step.gradient.abs().max() > 0.1


def test_fast_model_reads_slow_batches_too(
    darkroom: SimpleNamespace, histories: Any, weights: dict[str, Tensor]
) -> None:
    model = fast_model(darkroom, weights)
    from_slow = model(slow_batch(darkroom, histories, SAMPLES))
    from_fast = model(fast_batch(darkroom, histories, SAMPLES))
    torch.testing.assert_close(from_slow, from_fast, rtol=0, atol=1e-6)


def test_mended_answers_do_not_depend_on_the_batch(
    darkroom: SimpleNamespace, histories: Any, weights: dict[str, Tensor]
) -> None:
    """A sample alone has no padding, so the slow model reads its query, as the mended one always does."""
    slow_model = darkroom.model.DarkroomTransformer()
    slow_model.load_state_dict(weights)
    together = fast_batch(darkroom, histories, SAMPLES)
    mended, _types = fast_model(darkroom, weights, mend=True)(together)
    alone = torch.cat([slow_model(slow_batch(darkroom, histories, [sample]))[0] for sample in SAMPLES])
    torch.testing.assert_close(mended, alone, rtol=0, atol=1e-5)
    as_written, _types = fast_model(darkroom, weights)(together)
    assert (as_written - alone).abs().max() > 0.01


@pytest.mark.parametrize("region", [0, 3])
def test_every_moment_is_eighty_samples(
    darkroom: SimpleNamespace, histories: Any, weights: dict[str, Tensor], region: int
) -> None:
    module = darkroom.every_moment
    data = darkroom.fast_data
    model = fast_model(darkroom, weights, mend=True)
    loss_of = darkroom.fast_model.imitation_loss_without_waiting
    regions = data.batches_on(
        data.last_moments(histories), device="cpu", batch_size=1, seed=0, one_shape=True
    )
    *logits, targets = module.logits_of_every_moment(model, regions.gather(np.array([region])))
    samples = fast_batch(darkroom, histories, np.arange(region * 80, region * 80 + 80))
    expected = model(samples)
    torch.testing.assert_close(logits, list(expected), rtol=0, atol=1e-5)
    for name in ("cell", "target_action", "target_type"):
        assert torch.equal(targets[name], samples[name]), name
    found = gradient(model, loss_of(*logits, targets))
    assert (found - gradient(model, loss_of(*expected, samples))).abs().max() <= 1e-6


@pytest.mark.parametrize("fused", [False, True])
def test_steps_lead_to_the_weights_of_the_slow_loop(
    darkroom: SimpleNamespace,
    histories: Any,
    weights: dict[str, Tensor],
    fused: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = [SAMPLES[:4], SAMPLES[4:], SAMPLES[2:6]]
    slow_model = darkroom.model.DarkroomTransformer()
    slow_model.load_state_dict(weights)
    settings = darkroom.train.read_settings(["--steps", "3", "--log-every", "3", "--device", "cpu"])
    slow_batches = (slow_batch(darkroom, histories, samples) for samples in chosen)
    darkroom.train.train(slow_model, slow_batches, settings)
    printed = re.search(r"loss (\d\.\d+)  action accuracy (\d\.\d+)", capsys.readouterr().out)
    assert printed is not None

    levers = darkroom.fast_step.Levers(causal=True, answer_row=True, fused=fused)
    step = darkroom.fast_step.FastStep(fast_model(darkroom, weights), levers=levers, lr=1e-3)
    for samples in chosen:
        step(fast_batch(darkroom, histories, samples))
    assert step.metrics() == pytest.approx([float(printed[1]), float(printed[2])], abs=1e-3)
    assert_same_weights(step.model, slow_model)


def assert_same_weights(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """But for the biases of keys: their gradient is zero, and AdamW makes whole steps of its rounding."""
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        if name.endswith("in_proj_bias"):
            one, other = (torch.cat([bias[:64], bias[128:]]) for bias in (one, other))
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5, msg=name)


def test_bf16_stays_near(darkroom: SimpleNamespace, histories: Any, weights: dict[str, Tensor]) -> None:
    losses = []
    for bf16 in (False, True):
        levers = darkroom.fast_step.Levers(bf16=bf16)
        step = darkroom.fast_step.FastStep(fast_model(darkroom, weights), levers=levers, lr=1e-3)
        step(fast_batch(darkroom, histories, SAMPLES))
        losses.append(step.metrics()[0])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.03)


def test_a_batch_is_learned_by_heart(darkroom: SimpleNamespace, histories: Any) -> None:
    torch.manual_seed(0)
    levers = darkroom.fast_step.Levers(causal=True, answer_row=True, fused=True)
    step = darkroom.fast_step.FastStep(darkroom.fast_model.FastDarkroom(mend=True), levers=levers, lr=1e-3)
    batch = fast_batch(darkroom, histories, [5, 79, 130, 600])
    step(batch)
    before, _accuracy = step.metrics()
    for _ in range(39):
        step(batch)
    step.metrics()
    step(batch)
    assert step.metrics()[0] < 0.2 * before


def test_rooms_pay_what_the_optimal_agent_earns(darkroom: SimpleNamespace) -> None:
    cells = torch.cartesian_prod(torch.arange(9), torch.arange(9))
    rooms = darkroom.rollout.Darkrooms(cells)
    earned = torch.zeros(81)
    for _ in range(20):
        action = darkroom.histories.towards(cells.numpy(), rooms.cells_E2.numpy())
        earned += rooms.step(torch.from_numpy(action))[1]
    assert torch.equal(earned, darkroom.rollout.optimal_returns(cells))


@pytest.mark.parametrize("mend", [False, True])
def test_acting_with_a_cache_is_the_forward_of_training(
    darkroom: SimpleNamespace, weights: dict[str, Tensor], mend: bool
) -> None:
    """At chosen moments of a stream, the logits of the actor are those of the sample it stands for."""
    model = fast_model(darkroom, weights, mend=mend).eval()
    goals = torch.tensor([[4, 5], [0, 0]])
    rooms = darkroom.rollout.Darkrooms(goals)
    generator = torch.Generator().manual_seed(0)
    seen: list[Tensor] = []
    checked = 0
    with torch.no_grad():
        actor = darkroom.rollout.InContextActor(model, num_environments=2)
        for t in range(250):
            if t % 20 == 0:
                rooms.begin_episode()
            logits = actor.logits(rooms.cells_E2)
            if t in (0, 1, 30, 79, 80, 81, 159, 160, 249):
                checked += 1
                expected = model(sample_at(t, seen, rooms.cells_E2))[0][:2]
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
            actions = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
            transition, _reward = rooms.step(actions)
            actor.remember(transition)
            seen.append(transition)
    assert checked == 9


def sample_at(t: int, seen: list[Tensor], cells: Tensor) -> dict[str, Tensor]:
    """The batch of both streams at step t, with a sample of full length behind them."""
    region, position = divmod(t, 80)
    previous = 80 if region else 0
    rows = torch.zeros(3, 159, 10)
    for i, transition in enumerate(seen[region * 80 - previous :]):
        rows[:2, i] = transition
    return {
        "transitions": rows,
        "cell": torch.cat([cells @ torch.tensor([9, 1]), torch.zeros(1, dtype=torch.long)]),
        "previous_length": torch.tensor([previous, previous, 80]),
        "current_length": torch.tensor([position, position, 79]),
    }


def test_script_trains_saves_and_is_evaluated(
    darkroom: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, figures = tmp_path / "weights.safetensors", tmp_path / "rollout.json"
    flags = ["--size", "small", "--histories", "1", "--batch-size", "4", "--steps", "4", "--log-every", "2"]
    darkroom.train_fast.main(
        [*flags, "--mend", "--every-moment", "--device", "cpu", "--save", str(checkpoint)]
    )
    printed = capsys.readouterr().out
    assert "16 histories, 192 samples, training on cpu, levers: causal, answer_row, fused" in printed
    assert len(re.findall(r"step +\d+  loss \d\.\d{4}  action accuracy [01]\.\d{3}", printed)) == 2

    flags = ["--episodes", "10", "--environments", "1", "--device", "cpu", "--json", str(figures)]
    darkroom.evaluate.main([str(checkpoint), *flags])
    assert "held_out  model" in capsys.readouterr().out
    result = json.loads(figures.read_text())
    assert result["trained_with"] == {
        "mend": 1, "every_moment": 1, "goals": 16, "histories": 1, "history_steps": 1000, "batch_size": 4,
        "steps": 4, "seed": 0,
    }  # fmt: skip
    assert len(result["held_out"]["goals"]) == 65
    training = {tuple(goal) for goal in result["training"]["goals"]}
    assert len(training) == 16
    assert training.isdisjoint(tuple(goal) for goal in result["held_out"]["goals"])
    for goals in ("held_out", "training"):
        found = result[goals]
        assert all(len(found[agent]["mean_by_episode"]) == 10 for agent in ("model", "random", "learner"))
        assert found["learner"]["last_episodes"] == pytest.approx(found["optimal"])
        assert found["random"]["last_episodes"] < 3


def test_checkpoints_that_cannot_be_used_are_named(darkroom: SimpleNamespace, tmp_path: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(b"\x00\x01")
    for path in (cut, tmp_path / "absent.safetensors"):
        with pytest.raises(SystemExit, match=rf"{path.name} cannot be read: .* train_fast.py --save"):
            darkroom.evaluate.main([str(path), "--device", "cpu"])


def test_rise_is_measured_over_environments(darkroom: SimpleNamespace) -> None:
    rng = np.random.default_rng(0)
    rising = darkroom.evaluate.curve(np.arange(20) + rng.normal(size=(30, 20)))
    flat = darkroom.evaluate.curve(rng.normal(size=(30, 20)))
    assert rising["rise"] == pytest.approx(15, abs=0.5)
    assert rising["rise_low"] < rising["rise"] < rising["rise_high"]
    assert flat["rise_low"] < 0 < flat["rise_high"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--goals", "82"], "1 to 81 goals"),
        (["--batch-size", "0"], "--batch-size 0: at least 1"),
        (["--levers", "causal,turbo"], "--levers turbo: not one of causal, answer_row, fused"),
        (["--levers", "graph", "--device", "cpu"], "a CUDA graph needs a CUDA device, not cpu"),
        (["--every-moment"], "give both"),
    ],
)
def test_bad_flags_are_refused(
    darkroom: SimpleNamespace, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        darkroom.train_fast.read_settings(flags)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_two_ranks_average_two_shards(darkroom: SimpleNamespace, tmp_path: Path) -> None:
    """Two gloo processes against one process that averages the gradients of both shards itself."""
    checkpoint = tmp_path / "ranks.safetensors"
    flags = ["--size", "small", "--goals", "2", "--histories", "1", "--batch-size", "3", "--steps", "2"]
    ranks = torchrun([*flags, "--mend", "--levers", "causal,answer_row", "--save", str(checkpoint)])
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stdout.count("saved") == 1

    goals, _held_out = darkroom.histories.split_goals(2, seed=0)
    histories = darkroom.histories.learning_histories(goals, histories_per_goal=1, num_steps=1000, seed=0)
    torch.manual_seed(0)
    model = darkroom.fast_model.FastDarkroom(mend=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = darkroom.fast_data
    shards = [
        iter(
            data.batches_on(
                data.moments(histories), device="cpu", batch_size=3, seed=0, shard=shard, num_shards=2
            )
        )
        for shard in range(2)
    ]
    for _ in range(2):
        optimizer.zero_grad()
        for shard in shards:
            batch = next(shard)
            loss = darkroom.fast_model.imitation_loss_without_waiting(*model(batch), batch)
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found, known = darkroom.evaluate.load(checkpoint, device="cpu")
    assert (known["mend"], known["goals"], known["seed"]) == (1, 2, 0)
    assert_same_weights(found, model)


def torchrun(flags: list[str]) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return warm().run(
        "torchrun", *launcher, "examples/darkroom/train_fast.py", *flags, "--device", "cpu", cwd=ROOT
    )


def test_benchmark_and_its_page(tmp_path: Path) -> None:
    """A run of a few steps: every arm is there, losses and gradients agree, and the page shows them."""
    flags = ["--size", "small", "--batch-size", "2", "--levers", "causal", "--curve-steps", "4"]
    flags += ["--device", "cpu", "--seconds", "1"]
    done = warm().run("python", "benchmarks/darkroom/run.py", *flags, "--save", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    table, line = done.stdout.rstrip().rsplit("\n", 1)
    result = json.loads(line)
    assert result["errors"] == {}
    assert list(result["arms"]) == ["as_written", "seeds_fix", "gather", "gather+causal"]
    assert all(re.search(rf"^{re.escape(name)} ", table, re.MULTILINE) for name in result["arms"])
    for reference in ("as_written", "seeds_fix"):
        gaps = result["gradients"][reference]
        assert gaps.pop("largest") > 0.1
        assert max(gaps.values()) <= 1e-6
        for name in ("gather", "gather+causal"):
            assert result["curves"][reference][name] == pytest.approx(
                result["curves"][reference][reference], abs=1e-4
            )

    sys.path.insert(0, str(ROOT / "docs"))
    try:
        figures = importlib.import_module("darkroom_figures")
    finally:
        sys.path.remove(str(ROOT / "docs"))
    page = (ROOT / "docs" / "darkroom.md").read_text()
    assert len(re.findall(r"<!-- darkroom: \w+ -->", page)) == 4
    shown = figures.with_tables(page, folder=tmp_path)
    assert "| + attention told it is causal |" in shown
    assert shown.count("Not measured yet") == 1  # the rollout
    assert figures.with_tables(page, folder=tmp_path / "none").count("Not measured yet") == 4


@pytest.mark.gpu
def test_a_step_never_waits_for_the_gpu(
    darkroom: SimpleNamespace, histories: Any, weights: dict[str, Tensor]
) -> None:
    data = darkroom.fast_data
    batches = data.endless(data.batches_on(data.moments(histories), device="cuda", batch_size=8, seed=0))
    levers = darkroom.fast_step.Levers(causal=True, answer_row=True, fused=True)
    step = darkroom.fast_step.FastStep(fast_model(darkroom, weights).cuda(), levers=levers, lr=1e-3)
    step(next(batches))
    with no_synchronisation():
        for _ in range(3):
            step(next(batches))


@pytest.mark.gpu
def test_a_graph_trains_like_single_launches(
    darkroom: SimpleNamespace, histories: Any, weights: dict[str, Tensor]
) -> None:
    data = darkroom.fast_data
    losses = []
    for graph in (False, True):
        batches = data.batches_on(
            data.moments(histories), device="cuda", batch_size=8, seed=0, one_shape=True
        )
        levers = darkroom.fast_step.Levers(causal=True, answer_row=True, fused=True, graph=graph)
        step = darkroom.fast_step.FastStep(fast_model(darkroom, weights).cuda(), levers=levers, lr=1e-3)
        losses.append([])
        for batch in islice(data.endless(batches), 12):
            step(batch)
            losses[-1].append(step.metrics()[0])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
