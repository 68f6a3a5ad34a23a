"""The CPU, made to choose as CUDA does; always in a child, because it stays so."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flatout.memory.cuda import rules
from flatout.memory.jobs.job import Recipe
from flatout.memory.process.isolated_process import run_in_child
from tests.support.memory import job_of, traced, under_rules

BF16, FLOAT = torch.bfloat16, torch.float32


def dtypes_under_autocast() -> dict[str, torch.dtype]:
    x = torch.empty(4, 8)
    half = torch.empty(4, 8, dtype=BF16)
    with torch.autocast("cpu", dtype=BF16):
        return {
            "mm": (x @ x.t()).dtype,
            "einsum": torch.einsum("ij,kj->ik", x, x).dtype,
            "softmax": half.softmax(-1).dtype,
            "sum": half.sum(-1).dtype,
            "pow": half.pow(2).dtype,
            "exp": half.exp().dtype,
            "layer_norm": F.layer_norm(half, (8,)).dtype,
            "gelu": F.gelu(half).dtype,
            "add": (half + half).dtype,
            "mse_loss": F.mse_loss(half, half).dtype,
            "promoted": torch.addcmul(half, half, x).dtype,
        }


def test_autocast_casts_what_cuda_casts() -> None:
    """The lists of torch.amp's documentation: products lower, sums and norms in float, the rest as it is."""
    assert under_rules(dtypes_under_autocast).result == {
        "mm": BF16,
        "einsum": BF16,
        "softmax": FLOAT,
        "sum": FLOAT,
        "pow": FLOAT,
        "exp": FLOAT,
        "layer_norm": FLOAT,
        "gelu": BF16,
        "add": BF16,
        "mse_loss": FLOAT,
        "promoted": FLOAT,
    }


def evaluate_layer() -> list[bool]:
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
    x = torch.empty(2, 8, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        answers = [torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda")]
        layer(x)
    return [*answers, torch.is_autocast_enabled()]


def test_code_that_asks_whether_autocast_is_on_goes_the_way_it_goes_on_cuda() -> None:
    made = under_rules(evaluate_layer)
    assert made.result == [True, False, False]
    assert not made.sizes_of("transformer_encoder_layer")  # the fast path, which autocast excludes


def test_questions_about_loaded_libraries_import_nothing() -> None:
    def asked() -> list[str]:
        class Lazy(types.ModuleType):
            def __getattr__(self, name: str) -> object:
                raise AssertionError(f"asked for {name}")

        plain = types.ModuleType("transformers.plain")
        vars(plain)["is_tracing"] = lambda: True
        sys.modules.update({"transformers.lazy": Lazy("transformers.lazy"), "transformers.plain": plain})
        rules.after_imports()
        return [str(vars(plain)["is_tracing"]())]

    assert run_in_child(asked) == ["False"]


def drop(train: bool) -> list[int]:
    x = torch.empty(64, 64, requires_grad=True)
    F.dropout(x, 0.1, train)
    return list(x.shape)


def test_dropout_keeps_a_mask_of_bytes() -> None:
    made = under_rules(drop, True)
    assert sorted(made.sizes_of("dropout")) == [64 * 64, 4 * 64 * 64]
    mask, result = (storage for storage in made.storages if "dropout" in storage.op)
    assert (mask.num_bytes, result.num_bytes) == (64 * 64, 4 * 64 * 64)  # the mask is born first
    assert under_rules(drop, False).sizes_of("dropout") == []


def softmax_of_half() -> torch.dtype:
    return torch.empty(64, 64, dtype=torch.float16).softmax(-1, dtype=FLOAT).dtype


def test_softmax_reads_half_and_writes_float_in_one_kernel() -> None:
    made = under_rules(softmax_of_half)
    assert made.result is FLOAT
    assert made.sizes_of("softmax") == [4 * 64 * 64]
    assert made.sizes_of("_to_copy") == []


def multiply_groups() -> list[Any]:
    rows = torch.empty(12, 16, requires_grad=True)
    weights = torch.empty(3, 16, 8, requires_grad=True)
    ends = torch.tensor([4, 8, 12], dtype=torch.int32)
    result = torch._grouped_mm(rows, weights, offs=ends)
    result.sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    return [result.dtype, *(list(each.shape) for each in (result, rows.grad, weights.grad))]


def test_products_of_groups_take_float32() -> None:
    assert under_rules(multiply_groups).result == [FLOAT, [12, 8], [12, 16], [3, 16, 8]]


def add_a_bias() -> list[int]:
    layer = nn.Linear(16, 32)
    x = torch.empty(4, 16, 8).transpose(1, 2)
    return list(layer(x).shape)


def test_a_bias_is_added_in_place() -> None:
    made = under_rules(add_a_bias)
    assert made.result == [4, 8, 32]
    assert made.sizes_of("aten.add.") == []


def move_a_module() -> list[bool]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    same = model[0].weight
    model.to("cpu")
    kept = model[0].weight is same
    model.to(BF16)
    return [
        kept,
        model[0].weight is model[1].weight,
        model[0].weight.dtype is BF16,
        isinstance(model[0].weight, nn.Parameter),
        not model[0].bias.requires_grad,
        model[2].running_mean.dtype is BF16,
        model[2].num_batches_tracked.dtype is torch.long,
    ]


def test_a_module_is_cast_and_shared_weights_stay_shared() -> None:
    assert under_rules(move_a_module).result == [True] * 7


def initialise() -> list[int]:
    return list(nn.init.trunc_normal_(torch.empty(4, 4)).shape)


def test_a_truncated_normal_ends() -> None:
    assert under_rules(initialise).result == [4, 4]


@pytest.mark.parametrize("foreach", [None, False])
def test_optimizers_take_their_foreach_form_by_default(foreach: bool | None) -> None:
    job = job_of(
        lambda: nn.Linear(8, 8),
        lambda batch_size: torch.empty(batch_size, 8),
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=foreach),
    )
    trace = traced(job, Recipe(precision="fp16"))
    names = {storage.op for storage in trace.storages if storage.phase == "optimizer"}
    assert any("_foreach_sqrt" in name for name in names) is (foreach is None)
    assert any(storage.component == "optimizer state" for storage in trace.storages)


def install_twice() -> list[Any]:
    rules.install(compute_capability=None)
    first = list(rules._installed)
    apply = nn.Module._apply
    rules.install(compute_capability=(8, 0))
    with FakeTensorMode():
        fake = isinstance(nn.Linear(2, 2).to(BF16).weight.data, FakeTensor)
    real = nn.Linear(2, 2).to(BF16).weight.dtype
    return [len(first), first == rules._installed, nn.Module._apply is apply, fake, real]


def test_the_rules_are_installed_once_and_leave_real_modules_alone() -> None:
    assert run_in_child(install_twice) == [1, True, True, True, BF16]
    assert rules._installed == []


def masks_of_transformers() -> list[bool]:
    import transformers.masking_utils as masking

    with FakeTensorMode():
        fake = torch.ones(1)
        before = bool(masking.is_tracing(fake))
        rules.after_imports()
        return [before, bool(masking.is_tracing(fake))]


def test_transformers_does_not_take_the_trace_for_a_compiler() -> None:
    pytest.importorskip("transformers")
    assert run_in_child(masks_of_transformers) == [True, False]


def step_where_cuda_cannot_be_asked() -> float:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA was used before this process was forked")

    accelerator, cuda = torch.accelerator, torch.cuda
    vars(accelerator)["current_accelerator"] = vars(cuda)["is_available"] = refuse
    rules.install_for_no_data()
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0, foreach=False).step()
    return float(weight.detach()[0])


def test_an_optimizer_steps_in_a_child_of_a_process_that_used_cuda() -> None:
    assert run_in_child(step_where_cuda_cannot_be_asked) == pytest.approx(0.5)
