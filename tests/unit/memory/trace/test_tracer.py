"""Traces of small models: every byte that can be counted by hand is there, and nothing lives twice."""

from __future__ import annotations

from collections import Counter, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.predict.replay import with_own_sizes
from flatout.memory.process.isolated_process import check_backward, run_isolated
from flatout.memory.trace.record import Trace
from flatout.memory.trace.tracer import trace_job
from tests.support.memory import (
    alive_at_end_of_first_step,
    bytes_by_component,
    job_of,
    language_model_job,
    mlp_job,
    traced,
    under_rules,
)

WIDTH = 32


@dataclass
class Sample:
    x: Tensor


MLP_PARAMETERS = 2 * (WIDTH * WIDTH + WIDTH)
PLAIN = Recipe()


def kept(trace: Trace) -> dict[str, int]:
    return bytes_by_component(alive_at_end_of_first_step(trace))


@cache
def language_model(recipe: Recipe = PLAIN) -> Trace:
    return traced(language_model_job(), recipe)


def total(trace: Trace) -> dict[str, int]:
    return bytes_by_component(list(trace.storages))


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (torch.optim.AdamW, 2),
        (lambda parameters: torch.optim.AdamW(parameters, foreach=False), 2),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 3),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1),
    ],
    ids=["adamw", "adamw-loop", "amsgrad", "sgd", "momentum"],
)
def test_an_optimizer_keeps_its_states_and_no_counters(make: Callable[..., Any], states: int) -> None:
    trace = traced(mlp_job(width=WIDTH, make_optimizer=make))
    assert trace.num_parameters == trace.num_trainable == MLP_PARAMETERS
    found = kept(trace)
    assert found["parameters"] == found["gradients"] == 4 * MLP_PARAMETERS
    assert found.get("optimizer state", 0) == states * 4 * MLP_PARAMETERS
    assert found["inputs"] == 4 * 8 * WIDTH
    assert set(found) <= {"parameters", "gradients", "optimizer state", "inputs", "workspaces"}


def test_the_counters_of_a_fused_optimizer_are_on_the_device() -> None:
    fused = mlp_job(width=WIDTH, make_optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True))
    num_tensors = 4
    assert kept(traced(fused))["optimizer state"] == 2 * 4 * MLP_PARAMETERS + 4 * num_tensors


def test_every_storage_is_born_once_and_dies_at_most_once() -> None:
    trace = traced(language_model_job(), Recipe(precision="bf16", accumulation=2, clip_norm=1.0))
    counts = Counter(trace.events.tolist())
    assert set(counts.values()) == {1}
    births = [event for event in trace.events.tolist() if event >= 0]
    assert births == list(range(len(trace.storages)))
    place = {event: index for index, event in enumerate(trace.events.tolist())}
    assert all(place[~event] < index for event, index in place.items() if event < 0)


def test_two_traces_of_one_job_have_the_same_sizes() -> None:
    first, second = language_model(), traced(language_model_job())
    assert with_own_sizes(first).num_bytes.tolist() == with_own_sizes(second).num_bytes.tolist()
    assert first.marks == second.marks


def test_a_model_that_copies_its_layers_is_not_called_a_bug() -> None:
    """Under test a warning is an error, also in the process of a trace."""

    def make_model() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    trace = traced(job_of(make_model, lambda *, batch_size: torch.zeros(batch_size, 4, 8)))
    assert trace.num_trainable == sum(parameter.numel() for parameter in make_model().parameters())


def test_the_first_and_the_next_step_have_the_phases_of_a_step() -> None:
    trace = traced(mlp_job(), Recipe(accumulation=2))
    phases = ["forward", "backward", "forward", "backward", "optimizer"]
    for step in ("first", "next"):
        found = [phase for _at, which, phase in trace.marks if which == step]
        assert [phase for i, phase in enumerate(found) if i == 0 or phase != found[i - 1]] == phases


def test_a_shared_weight_has_one_gradient() -> None:
    """Gradients of its two uses meet in one sum; of a product turned over, which is a view, in a storage of
    its own (`test_gradients_meet_as_in_pytorch_itself`).
    """
    trace = language_model()
    found = kept(trace)
    assert found["gradients"] == found["parameters"] == 4 * trace.num_parameters
    assert "temporaries" not in found
    table_bytes = 4 * 100 * 32
    sums = [each for each in trace.storages if each.op == "aten.add.Tensor" and each.phase == "backward"]
    assert [each.num_bytes for each in sums].count(table_bytes) == 2  # once in each step


def test_gradients_meet_in_place_in_whatever_order_their_dimensions_lie() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x.to(memory_format=torch.channels_last))
            return hidden.sin() + self.second(hidden).sin()

    trace = traced(job_of(Residual, lambda batch_size: torch.randn(batch_size, 16, 24, 24)))
    image_bytes = 8 * 16 * 24 * 24 * 4
    met = [each.op for each in trace.storages if each.phase == "backward" and each.num_bytes == image_bytes]
    assert met
    assert "aten.add.Tensor" not in met


class Doubled(torch.autograd.Function):
    """Whose forward and backward add as they say: into a tensor of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.sin() + gradient.cos()


def sums_of(forward: Callable[[Tensor], Tensor]) -> list[int]:
    """Bytes of the sums that a backward makes, of a batch of 8 x 64 x 4 floats."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 4))

        def forward(self, x: Tensor) -> Tensor:
            return forward(x * self.weight)

    trace = traced(job_of(Model, lambda batch_size: torch.randn(batch_size, 64, 4)))
    first = trace.storages[: len(trace.storages) // 2]
    return [each.num_bytes for each in first if each.op == "aten.add.Tensor" and each.phase == "backward"]


def test_a_backward_of_code_without_a_module_is_traced() -> None:
    """As exec makes it of a cell: its globals have no name."""
    space: dict[str, Any] = {"torch": torch}
    exec(
        "class Doubled(torch.autograd.Function):\n"
        "    forward = staticmethod(lambda ctx, x: x + x)\n"
        "    backward = staticmethod(lambda ctx, gradient: gradient.sin() + gradient.cos())\n",
        space,
    )
    assert sums_of(space["Doubled"].apply) == sums_of(Doubled.apply)


@pytest.mark.parametrize(
    ("forward", "num_sums"),
    [
        (lambda x: x.sin() + x.cos(), 0),
        (Doubled.apply, 1),
        (lambda x: x.sin().sum() + x.view(8, 256).cos().sum(), 1),  # the gradient of a view is a view
        (lambda x: x.view(8, 256).sin().sum() + x.cos().sum(), 0),
    ],
    ids=["in place", "in Python", "into a view", "a view into another"],
)
def test_gradients_meet_as_in_pytorch_itself(forward: Callable[[Tensor], Tensor], num_sums: int) -> None:
    assert sums_of(forward) == [8 * 64 * 4 * 4] * num_sums
    x = torch.randn(8, 64, 4, requires_grad=True)
    loss = forward(x * 2).sum()
    with torch.autograd.profiler.profile(use_kineto=False) as seen:
        loss.backward()
    assert [event.name for event in seen.function_events].count("aten::add") == num_sums


def test_the_gradient_of_a_largest_value_is_written_in_place() -> None:
    """As autograd does on the GPU; tensors without data are written into a copy."""

    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).max(dim=1)[0].sum()

    trace = traced(job_of(Largest, lambda batch_size: torch.randn(batch_size, 64, 4)))
    ops = [each.op for each in trace.storages if each.num_bytes == 8 * 64 * 4 * 4]
    assert any("new_zeros" in op for op in ops)
    assert not any("scatter" in op for op in ops)


def test_a_copied_input_is_held_beside_the_workspace() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(16, 32, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[:, :16]).sum()

    trace = traced(job_of(Part, lambda batch_size: torch.randn(batch_size, 32, 40, 40)))
    start = next(at for at, _step, _phase in trace.marks)
    copy, result, workspace, *_ = (int(event) for event in trace.events[start:] if event >= 0)
    assert trace.storages[copy].num_bytes == 8 * 16 * 40 * 40 * 4
    assert trace.storages[result].op == "aten.convolution.default"
    deaths = [int(event) for event in trace.events[start:] if event < 0]
    assert deaths.index(~workspace) < deaths.index(~copy)


def test_a_loss_that_is_averaged_in_place_keeps_its_elements() -> None:
    job = job_of(
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda batch_size: torch.randn(batch_size, WIDTH),
        loss=lambda model, x: nn.functional.mse_loss(model(x), x),
    )
    (kept_bytes, *_again) = [
        each.num_bytes for each in traced(job).storages if each.op == "aten.mse_loss.default"
    ]
    assert kept_bytes == 4 * WIDTH * job.sizes["batch_size"]


def test_accumulation_keeps_one_set_of_gradients() -> None:
    once, thrice = (language_model(Recipe(accumulation=count)) for count in (1, 3))
    assert kept(thrice)["gradients"] == kept(once)["gradients"] == 4 * once.num_parameters
    assert total(thrice)["activations"] > 2 * total(once)["activations"]
    assert with_own_sizes(thrice).peak_allocated_bytes() >= with_own_sizes(once).peak_allocated_bytes()


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    def half_frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[0].requires_grad_(False)
        return model

    trace = traced(job_of(half_frozen, lambda batch_size: torch.randn(batch_size, WIDTH)))
    found = kept(trace)
    assert trace.num_trainable == MLP_PARAMETERS // 2
    assert found["parameters"] == 4 * MLP_PARAMETERS
    assert found["gradients"] == 2 * MLP_PARAMETERS
    assert found["optimizer state"] == 4 * MLP_PARAMETERS


def test_half_precision_is_by_autocast_copies_or_by_the_model_itself() -> None:
    plain, bf16, pure = (
        traced(mlp_job(width=WIDTH), Recipe(precision=precision))
        for precision in ("fp32", "bf16", "pure-bf16")
    )
    assert "autocast copies" not in total(plain)
    assert kept(bf16)["parameters"] == kept(bf16)["gradients"] == 4 * MLP_PARAMETERS
    assert total(bf16)["autocast copies"] == 2 * 2 * 2 * WIDTH * WIDTH + 2 * 2 * 2 * WIDTH  # of two steps
    assert kept(pure)["parameters"] == kept(pure)["gradients"] == 2 * MLP_PARAMETERS
    assert kept(pure)["optimizer state"] == 4 * MLP_PARAMETERS


def test_fp16_brings_a_scaler_and_still_steps() -> None:
    bf16, fp16 = (traced(mlp_job(), Recipe(precision=each, clip_norm=1.0)) for each in ("bf16", "fp16"))
    assert kept(fp16)["optimizer state"] == kept(bf16)["optimizer state"] > 0
    assert len(fp16.storages) > len(bf16.storages)
    assert any("_amp_" in storage.op or "reciprocal" in storage.op for storage in fp16.storages)


def test_checkpointing_lowers_activations() -> None:
    plain, checkpointed = (language_model(Recipe(checkpointing=flag)) for flag in (False, True))
    assert total(checkpointed)["activations"] < 0.7 * total(plain)["activations"]
    assert kept(checkpointed)["gradients"] == kept(plain)["gradients"]


def test_evaluation_has_no_gradients() -> None:
    trace = traced(language_model_job(), Recipe(mode="evaluate"))
    assert set(kept(trace)) <= {"parameters", "inputs", "workspaces"}
    assert {phase for _at, _step, phase in trace.marks} == {"forward"}
    assert not {"gradients", "optimizer state", "activations"} & set(total(trace))


def test_storages_know_the_module_that_made_them() -> None:
    modules = {storage.module for storage in language_model().storages}
    assert {"embedding", "blocks.0.feed.0", "blocks.1.norm", None} <= modules


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.norm(x))
        return result


def test_buffers_are_counted() -> None:
    trace = traced(job_of(Normalized, lambda batch_size: torch.randn(batch_size, WIDTH)))
    assert kept(trace)["buffers"] == 2 * 4 * WIDTH + 8  # mean, variance and a counter


def test_a_value_that_decides_is_taken_from_integers_and_guessed_from_floats() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            x: Tensor = self.table(tokens)
            if int(tokens.max()) == 9:
                x = torch.cat([x, x])
            return x * x.mean().item()

    def trace(largest: int) -> Trace:
        return traced(job_of(Deciding, lambda batch_size: torch.full((batch_size,), largest)))

    nine, eight = trace(9), trace(8)
    assert any("cat" in storage.op for storage in nine.storages)
    assert not any("cat" in storage.op for storage in eight.storages)
    assert [guess.answer for guess in eight.guesses] == ["the value of a float32 taken as 1.0"]
    assert eight.guesses[0].module == "Deciding"


@pytest.mark.parametrize("make", [lambda x: SimpleNamespace(x=x), Sample, lambda x: UserDict({"x": x})])
def test_tensors_of_any_structure_are_inputs(make: Callable[[Tensor], Any]) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = model(batch["x"] if isinstance(batch, UserDict) else batch.x).sum()
        return found

    job = job_of(
        lambda: nn.Linear(WIDTH, WIDTH), lambda batch_size: make(torch.randn(batch_size, WIDTH)), loss=loss
    )
    assert kept(traced(job, batch_size=5))["inputs"] == 4 * 5 * WIDTH


def test_sparse_gradients_are_refused_with_a_way_on() -> None:
    job = job_of(
        lambda: nn.Embedding(100, 8, sparse=True),
        lambda batch_size: torch.zeros(batch_size, 3, dtype=torch.int64),
    )
    with pytest.raises(BadInput, match=r"sparse tensor .* sparse=False"):
        traced(job)


def test_whether_tensors_are_the_same_is_known_of_integers_and_guessed_of_weights() -> None:
    asked: list[bool] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        asked[:] = [torch.equal(batch["ids"], batch["ids"] + 1), torch.equal(batch["ids"], batch["ids"])]
        assert asked == [False, True]
        found: Tensor = model(batch["x"]).sum()
        return found

    def batch(batch_size: int) -> dict[str, Tensor]:
        return {"ids": torch.arange(batch_size), "x": torch.zeros(batch_size, WIDTH)}

    job = job_of(lambda: orthogonal(nn.Linear(WIDTH, WIDTH)), batch, loss=loss)
    answers = [guess.answer for guess in traced(job).guesses]
    assert answers == ["two tensors taken as the same"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("where", ["batch", "step"])
def test_nested_tensors_are_refused_with_a_way_on(layout: torch.layout, where: str) -> None:
    def nested(rows: Any) -> Tensor:
        return torch.nested.as_nested_tensor(list(rows), layout=layout)

    def batch(batch_size: int) -> Tensor:
        rows = [torch.zeros(length + 1, WIDTH) for length in range(batch_size)]
        return nested(rows) if where == "batch" else torch.zeros(batch_size, 3, WIDTH)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = torch.nested.to_padded_tensor(model(nested(batch)), 0.0).sum()
        return found

    job = job_of(lambda: nn.Linear(WIDTH, WIDTH), batch, loss=loss)
    with pytest.raises(BadInput, match=r"nested \(ragged\) tensors.* padded to the longest"):
        traced(job)


def test_an_encoder_that_nests_padded_rows_in_evaluation_is_traced_with_its_padding() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)

    def batch(batch_size: int) -> dict[str, Tensor]:
        mask = torch.zeros(batch_size, 16, dtype=torch.bool)
        mask[:, 12:] = True
        return {"src": torch.zeros(batch_size, 16, WIDTH), "src_key_padding_mask": mask}

    def make_job(nested: bool) -> Job:
        return job_of(
            lambda: nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested),
            batch,
            loss=lambda model, batch: model(**batch).sum(),
        )

    trace, dense = (traced(make_job(nested), Recipe(mode="evaluate")) for nested in (True, False))
    assert [guess.answer for guess in trace.guesses] == ["every row taken as long as the longest"] * 2
    assert not dense.guesses
    assert total(trace)["parameters"] == total(dense)["parameters"]
    assert total(trace)["temporaries"] >= 4 * 5 * 16 * WIDTH


def test_tensors_nested_in_a_batch_are_inputs() -> None:
    def batch(batch_size: int) -> dict[str, Any]:
        return {"x": [torch.randn(batch_size, WIDTH), torch.randn(batch_size, WIDTH)], "name": "text"}

    job: Job = job_of(
        lambda: nn.Linear(WIDTH, WIDTH), batch, loss=lambda model, batch: model(sum(batch["x"])).sum()
    )
    assert kept(traced(job, batch_size=5))["inputs"] == 2 * 4 * 5 * WIDTH


def test_a_process_that_traced_is_the_only_one_changed() -> None:
    before = nn.Module._apply
    traced(mlp_job())
    assert nn.Module._apply is before


def shared_and_scaled() -> Trace:
    check_backward()

    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
        model[1].weight = model[0].weight
        return model

    job = job_of(
        make, lambda batch_size: torch.zeros(batch_size, 3, dtype=torch.long), sizes={"batch_size": 2}
    )
    return trace_job(job, Recipe(precision="pure-bf16"), device="meta")


def test_a_trace_on_another_device_than_the_cpu_needs_no_rules_of_cuda() -> None:
    """As on CUDA: modules are moved and cast, and shared weights stay shared."""
    trace = run_isolated(shared_and_scaled, what="a test")
    assert trace.num_parameters == 16 * 8
    assert [each.num_bytes for each in trace.storages if each.component == "parameters"] == [16 * 8 * 2]
    assert (
        sum(each.num_bytes for each in trace.storages if each.component == "optimizer state")
        == 2 * 16 * 8 * 2
    )


def test_a_layer_norm_copies_before_it_makes_its_result() -> None:
    def normed() -> None:
        x = torch.empty(4, 8, 16).transpose(1, 2)
        torch.nn.functional.layer_norm(x, (8,))

    ops = [born.op for born in under_rules(normed).storages]
    first = next(at for at, op in enumerate(ops) if "layer_norm" in op)
    assert ops[first].startswith("workspace of") and ops[first + 1].startswith("aten.native_layer_norm")


class Nested(torch.optim.Optimizer):
    """Keeps a matrix per dimension in a list, as Shampoo does, and an optimizer within."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.within = torch.optim.Adam(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("factors", [p.new_zeros(size, size) for size in p.shape])
        self.within.step()


def test_state_in_lists_and_in_an_optimizer_within_is_counted_and_stays() -> None:
    trace = traced(mlp_job(width=WIDTH, make_optimizer=Nested))
    factors = 4 * 2 * 3 * WIDTH * WIDTH  # of a weight and a bias, in both layers
    assert kept(trace)["optimizer state"] == factors + 2 * 4 * MLP_PARAMETERS
    assert total(trace)["optimizer state"] == kept(trace)["optimizer state"]  # made once for both steps


class Replacing(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data = p.data - 0.1 * p.grad


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))
        self.seen = torch.zeros(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.average = 0.9 * self.average + 0.1 * self.layer.weight.detach()
        self.seen = self.seen + 1.0
        return self.layer(x)


def alive_at(trace: Trace, step: str, phase: str) -> dict[str, int]:
    at = next(index for index, name, begun in trace.marks if (name, begun) == (step, phase))
    alive = {event for event in trace.events[:at].tolist() if event >= 0}
    alive -= {~event for event in trace.events[:at].tolist() if event < 0}
    return bytes_by_component([trace.storages[number] for number in alive])


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_what_a_step_replaces_is_there_in_the_next(phase: str) -> None:
    trace = traced(mlp_job(width=WIDTH, make_optimizer=lambda params: Replacing(params, {})))
    assert alive_at(trace, "next", phase)["parameters"] == 4 * MLP_PARAMETERS
    averaging = traced(job_of(Averaging, lambda batch_size: torch.randn(batch_size, WIDTH)))
    assert alive_at(averaging, "next", phase)["buffers"] == 2 * 4 * WIDTH * WIDTH


def test_a_parameter_that_is_not_part_of_the_model_is_refused() -> None:
    stranger = nn.Linear(WIDTH, 3)
    apply = {"stranger": stranger}
    job = job_of(
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda batch_size: torch.randn(batch_size, WIDTH),
        loss=lambda model, batch: apply["stranger"](model(batch)).sum(),
    )
    with pytest.raises(BadInput, match="that is not part of the model"):
        traced(job)
