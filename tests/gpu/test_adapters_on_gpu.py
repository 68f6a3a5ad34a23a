"""Adapters on a GPU: all products, variable-length attention and recorded steps are the plain ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path as FolderPath
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from flatout.engines.adapters.lora import attention
from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.fused_step import AdapterOptimizer, FusedStep, StepSettings
from flatout.engines.adapters.lora.token_blocks import layout
from flatout.engines.adapters.training.phase3_joint import JointStep
from flatout.engines.adapters.training.records import BEST, KIND, checkpoints_of
from flatout.engines.run.log import read_log
from flatout.multiplex.products import side_stream
from flatout.multiplex.products.ranges import Path, add_products
from tests.support.adapters import opened, phase_run, save_tiny, tiny_settings
from tests.support.adapters_packed import (
    Batch,
    batches,
    bert,
    blocks,
    class_loss,
    difference,
    filled,
    heads,
    roberta,
    specs,
)
from tests.support.invoke import invoke

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
EQUAL = ((3, 8), (2, 12), (6, 4))
UNEQUAL = ((3, 7), (2, 12), (4, 5))


def loss_of(states: Sequence[Tensor]) -> Tensor:
    weights = torch.linspace(0.5, 2.0, states[0].shape[-1], device=states[0].device)
    return torch.stack([(one.float() * weights).pow(3).mean() for one in states]).sum()


def run(
    model: Any, *, dtype: torch.dtype, path: Path | None, shapes: Any, kernel: Any = None
) -> tuple[list[Tensor], Tensor]:
    """States and gradients of one pass; padding is left out of the states."""
    bank = filled(AdapterBank(model, specs(), dtype=dtype))
    given = blocks(shapes, device="cuda")
    with PackedEncoder(model, bank, dtype=dtype, path=path) as encoder:
        if kernel is not None:
            encoder.kernel = kernel
        states = encoder(given)
        masked = [state * block.mask()[..., None] for state, block in zip(states, given, strict=True)]
        loss_of(masked).backward()
    return [state.detach().float() for state in masked], bank.gradients.clone()


def close(ours: tuple[list[Tensor], Tensor], theirs: tuple[list[Tensor], Tensor], *, share: float) -> None:
    """Equal within a share of the largest value."""
    for own, their in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        assert (own - their).abs().max() <= share * their.abs().max()


@pytest.mark.parametrize("make", [bert, roberta])
@pytest.mark.parametrize("path", get_args(Path))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_products_is_the_loop_in_float32(path: Path, dtype: torch.dtype, make: Any) -> None:
    if path == "grouped" and dtype != torch.bfloat16:
        pytest.skip("torch's grouped product is for bfloat16")
    shapes = EQUAL if path == "batched" else UNEQUAL
    expected = run(make().cuda(), dtype=torch.float32, path="loop", shapes=shapes)
    found = run(make().cuda(), dtype=dtype, path=path, shapes=shapes)
    close(found, expected, share=1e-3 if dtype == torch.float32 else 6e-2)


@pytest.mark.parametrize("path", get_args(Path))
def test_products_beside_the_stream_are_those_on_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = EQUAL if path == "batched" else UNEQUAL
    dtype = torch.bfloat16 if path == "grouped" else torch.float32
    expected = run(bert().cuda(), dtype=dtype, path=path, shapes=shapes)
    monkeypatch.setattr(side_stream, "BRANCH_TOKENS", 0)
    found = run(bert().cuda(), dtype=dtype, path=path, shapes=shapes)
    close(found, expected, share=1e-3 if dtype == torch.float32 else 6e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_added_in_float32_into_a_strided_view(dtype: torch.dtype) -> None:
    a, b = (torch.randn(3, 64, 128, device="cuda").to(dtype) for _ in range(2))
    wide = torch.zeros(3, 64, 512, device="cuda")
    into = wide[:, :, 128:192]
    add_products(into, a, b.mT, alpha=2.0)
    add_products(into, a, b.mT, alpha=2.0)
    expected = 4 * torch.bmm(a.float(), b.float().mT)
    torch.testing.assert_close(into, expected, rtol=1e-3, atol=1e-2)
    assert not wide[:, :, :128].any() and not wide[:, :, 192:].any()
    flat = torch.zeros(64, 512, device="cuda")
    add_products(flat[:, :64], a[0], b[0].T)
    torch.testing.assert_close(flat[:, :64], expected[0] / 4, rtol=1e-3, atol=1e-2)


def test_the_variable_length_kernel_is_the_portable_one() -> None:
    decision = attention.choose_kernel(device=torch.device("cuda"), dtype=torch.bfloat16)
    if decision.value != "varlen":
        pytest.skip(decision.reason)
    portable = attention.choose_kernel(device=torch.device("cpu"), dtype=torch.bfloat16)
    found = run(bert().cuda(), dtype=torch.bfloat16, path=None, shapes=UNEQUAL, kernel=decision)
    expected = run(bert().cuda(), dtype=torch.bfloat16, path=None, shapes=UNEQUAL, kernel=portable)
    close(found, expected, share=6e-2)


def test_attention_of_the_kernel_keeps_rows_apart() -> None:
    if attention.choose_kernel(device=torch.device("cuda"), dtype=torch.bfloat16).value != "varlen":
        pytest.skip("no variable-length kernel here")
    chosen = layout(blocks(UNEQUAL, device="cuda"))
    generator = torch.Generator(device="cuda").manual_seed(0)
    query, key, value = (
        torch.randn(1, 4, chosen.frame.num_tokens, 8, generator=generator, device="cuda").bfloat16()
        for _ in range(3)
    )
    found = {}
    for kernel in get_args(attention.AttentionKernel):
        with attention.rows(attention.bounds_of(chosen, kernel)):
            out, _ = attention.packed_attention(torch.nn.Identity(), query, key, value, None, scaling=0.3)
        real = torch.cat([block.mask().flatten() for block in blocks(UNEQUAL, device="cuda")])
        found[kernel] = out[0, real].float()
    torch.testing.assert_close(found["varlen"], found["portable"], rtol=2e-2, atol=2e-2)


class Trained:
    """A model under training on the GPU."""

    def __init__(self, *, graph: Any, accumulation: int = 1) -> None:
        model = bert().cuda()
        self.bank = filled(AdapterBank(model, specs(), dtype=torch.bfloat16))
        own = heads(self.bank.names, device="cuda")
        self.encoder = PackedEncoder(model, self.bank, dtype=torch.bfloat16)
        self.optimizer = AdapterOptimizer(
            self.bank,
            settings={name: StepSettings(lr=1e-3, num_steps=40) for name in self.bank.names},
            heads=own,
        )
        self.step = FusedStep(
            self.encoder,
            optimizer=self.optimizer,
            loss=lambda adapter, states, batch: class_loss(own[self.bank.names[adapter]], states, batch),
            accumulation=accumulation,
            graph=graph,
        )


def steps(shapes: Any = UNEQUAL) -> list[list[Batch]]:
    """Batches of the same shapes and other numbers."""
    return [batches(blocks(shapes, seed=seed, device="cuda"), seed=seed) for seed in range(6)]


@pytest.mark.parametrize("shapes", [EQUAL, UNEQUAL])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_recorded_step_is_the_eager_one(accumulation: int, shapes: Any) -> None:
    eager, recorded = (
        Trained(graph="off", accumulation=accumulation),
        Trained(graph="on", accumulation=accumulation),
    )
    for given in steps(shapes):
        torch.testing.assert_close(recorded.step(given), eager.step(given), rtol=2e-2, atol=2e-2)
    assert recorded.step.decision.value == "graph" and len(recorded.step._graphs) == accumulation
    torch.testing.assert_close(recorded.bank.factors, eager.bank.factors, rtol=2e-2, atol=2e-3)
    assert recorded.optimizer.num_steps("a") == eager.optimizer.num_steps("a") == 6 // accumulation


def test_an_adapter_may_leave_recorded_steps() -> None:
    trained = Trained(graph="on")
    given = steps()
    for one in given[:4]:
        trained.step(one)
    trained.optimizer.finish("b")
    before = trained.bank.factors[1].clone()
    for one in given[2:]:
        losses = trained.step([batch for batch in one if batch.block.adapter != 1])
        assert losses.isnan().tolist() == [False, True, False]
    assert trained.bank.factors[1].equal(before) and len(trained.step._graphs) == 2


def test_a_loss_that_asks_the_device_goes_on_eagerly_and_says_why() -> None:
    trained = Trained(graph="on")
    plain = trained.step._loss

    def asking(adapter: int, states: Tensor, batch: Any) -> Tensor:
        loss = plain(adapter, states, batch)
        return loss * (1.0 if loss.item() > 0 else 0.5)

    trained.step._loss = asking
    for given in steps()[:4]:
        assert trained.step(given).isfinite().all()
    assert trained.step.decision.value == "eager" and "recorded" in trained.step.decision.reason


def test_a_recorded_joint_step_moves_everything_as_the_eager_one(tmp_path: FolderPath) -> None:
    """Phase 3: adapters, heads and router in one step, on mixed batches whose shapes come again."""
    model = save_tiny(tmp_path / "tiny")
    found = []
    for graphs in (False, True):
        settings = tiny_settings(model, tmp_path / f"run-{graphs}")
        # A recorded step draws other numbers for dropout than one that runs operator by operator.
        changes: dict[str, Any] = {
            "tasks": {name: {**task, "dropout": 0.0} for name, task in settings["tasks"].items()},
            **{part: {**settings[part], "dropout": 0.0} for part in ("decoder", "router")},
            "phase3": {
                **settings["phase3"], "single_task_first": 0.0, "single_task_last": 0.0, "noise": "softmax"
            },
        }  # fmt: skip
        with opened(model, tmp_path / f"run-{graphs}", device="cuda", graphs=graphs, **changes) as assembly:
            step = JointStep(phase_run(assembly, "phase3", steps=12))
            assembly.train()
            for number in range(12):
                step(number)
            assert step.decision.value == ("graph" if graphs else "eager")
            assert bool(step._recorder.graphs) == graphs
            found.append({name: value.clone() for name, value in assembly.weights().items()})
    eager, recorded = found
    for name, value in eager.items():
        torch.testing.assert_close(recorded[name], value, rtol=2e-2, atol=2e-3, msg=name)


def test_without_adapters_it_is_the_plain_model() -> None:
    model = bert().cuda()
    given = blocks(UNEQUAL, device="cuda")
    expected = [
        model(input_ids=block.ids, attention_mask=block.mask().long()).last_hidden_state for block in given
    ]
    with PackedEncoder(model, AdapterBank(model, specs())) as encoder, torch.no_grad():
        for ours, theirs, block in zip(encoder(given, adapters=False), expected, given, strict=True):
            assert difference(ours, theirs, block) < 1e-3


def test_float16_with_scaled_losses_learns_what_float32_learns(tmp_path: FolderPath) -> None:
    """As on a T4, by the command line: trained in all phases, scored and asked."""
    model, scores, losses = save_tiny(tmp_path / "tiny"), {}, {}
    for precision in ("float32", "float16"):
        out = tmp_path / precision
        given = tiny_settings(model, out, precision=precision, device="cuda")
        given["tasks"] = {name: {**task, "dropout": 0.0} for name, task in given["tasks"].items()}
        given["decoder"] = {**given["decoder"], "dropout": 0.0}
        given["phase1"] = {**given["phase1"], "steps": 40, "evaluate_every": 20, "lr": 3e-3}
        config = tmp_path / f"{precision}.json"
        config.write_text(json.dumps(given))  # JSON is YAML
        adapt("train", config, "--phase", "all")
        found = checkpoints_of(out, "phase1").latest()
        assert found is not None and found.state.config["precision"] == precision
        scalers = found.state.extra["scalers"]
        assert bool(scalers) == (precision == "float16")
        assert all(1.0 <= scaler["scale"] <= 65536.0 for scaler in scalers.values())
        weights = found.tensors(BEST)
        assert all(value.dtype == torch.float32 and value.isfinite().all() for value in weights.values())
        records = [record for record in read_log(out, KIND) if record.phase == "phase1"]
        losses[precision] = [record.losses["translation"] for record in records]
        scored = json.loads(adapt("evaluate", out, "--rows", "8", "--json"))
        scores[precision] = scored["scores"][0]["by_task"]
        said = json.loads(adapt("predict", out, "the film is moving", "--task", "sentiment", "--json"))
        assert said["answers"][0]["text"] in ("negative", "positive")
    assert losses["float16"][0] == pytest.approx(losses["float32"][0], rel=2e-2)
    assert losses["float16"][-1] < 0.95 * losses["float16"][0]  # it learns
    assert losses["float16"][-1] == pytest.approx(losses["float32"][-1], rel=0.1)
    assert scores["float16"].keys() == scores["float32"].keys()


def adapt(*arguments: object) -> str:
    done = invoke("adapt", *arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_every_part_of_a_step_is_its_plain_form_on_the_gpu() -> None:
    script = FolderPath(__file__).parents[2] / "benchmarks" / "adapters" / "verify.py"
    done = subprocess.run(
        [sys.executable, script, "--device", "cuda"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
