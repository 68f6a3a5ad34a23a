from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatout.measure.lines.counted_calls import InnerModules, count_calls, count_creations
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode

HERE = Path(__file__)


@pytest.fixture
def patches() -> Any:
    made = Patches()
    yield made
    made.undo()


def test_checkpoints_and_calls_of_the_cache_are_counted_once(
    patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    count_calls(lambda op, frame, device, spent_s: seen.append((op, device)), patches)
    x = torch.ones(3, requires_grad=True)
    for reentrant in (True, False):
        checkpoint(torch.tanh, x, use_reentrant=reentrant).sum().backward()
    torch.cuda.empty_cache()
    assert seen == [("checkpoint", "cpu")] * 2 + [("empty_cache", "cuda")]
    patches.undo()
    checkpoint(torch.tanh, x, use_reentrant=False)
    assert len(seen) == 3


def test_collectives_of_several_ranks_are_counted_and_those_of_sharded_tensors(
    patches: Patches, tmp_path: Path
) -> None:
    from torch import distributed
    from torch.distributed import _functional_collectives as functional

    seen: list[str] = []
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        count_calls(lambda op, frame, device, spent_s: seen.append(op), patches)
        distributed.all_reduce(torch.ones(3))
        distributed.barrier()
        functional.wait_tensor(torch.ones(3))
        assert seen == ["all_reduce", "barrier", "wait_tensor"]
        name = "all_gather_single"  # of versions from 2.13 on, whose sharded models call it
        name = name if hasattr(distributed, name) else "all_gather_into_tensor"
        getattr(distributed, name)(torch.ones(3), torch.ones(3))
        assert name in seen
        num = len(seen)
        patches.undo()
        distributed.barrier()
        assert len(seen) == num
    finally:
        distributed.destroy_process_group()


def test_constructors_that_no_mode_sees_are_counted_and_stay_types(patches: Patches) -> None:
    seen: list[tuple[str, Any, int]] = []
    whole, real, pickled = torch.LongTensor([1]), torch.FloatTensor, pickle.dumps(torch.FloatTensor)

    def note(name: str, args: Any, tensor: Any, frame: Any, spent_s: float) -> None:
        assert spent_s > 0
        seen.append((name, tensor.tolist(), frame.f_lineno))

    count_creations(note, patches)
    first = sys._getframe().f_lineno + 1
    made = torch.FloatTensor([2.0])
    made = torch.Tensor([3.0])
    assert seen == [("FloatTensor", [2.0], first), ("Tensor", [3.0], first + 1)]
    assert type(made) is torch.Tensor
    assert isinstance(made, torch.FloatTensor)
    assert not isinstance(whole, torch.FloatTensor)
    assert whole.type(torch.FloatTensor).dtype is torch.FloatTensor.dtype is torch.float32
    assert nn.Linear(1, 1).type(torch.DoubleTensor).weight.dtype is torch.float64
    assert {real: 1}[torch.FloatTensor] == 1
    assert str(torch.FloatTensor | None) == "torch.FloatTensor | None"
    assert pickle.dumps(torch.FloatTensor) == pickled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        torch.set_default_tensor_type(torch.FloatTensor)
    nn.Parameter(made.clone())
    with pytest.raises(TypeError):
        torch.LongTensor("a", "b")
    assert len(seen) == 2
    patches.undo()
    torch.Tensor([4.0])
    assert torch.FloatTensor is real
    assert "__init__" not in vars(torch.Tensor)
    assert len(seen) == 2


def test_modules_that_a_line_calls_in_turn(patches: Patches) -> None:
    inner = InnerModules(UserCode(str(HERE.parent)))
    inner.watch(patches)
    inner.num_steps = 1
    experts, x = [nn.Sequential(nn.Linear(2, 2)) for _ in range(4)], torch.ones(8, 2)
    for number, expert in enumerate(experts):
        expert(x[: number + 1])
        line = sys._getframe().f_lineno - 1
    for layer in experts:
        x = layer(x)
    for _ in range(9):
        nn.Linear(2, 2)
    first, second = inner.evidence()
    assert (first.module, first.place.line, first.num_modules, first.calls_per_step) == (
        "Sequential",
        line,
        4,
        4,
    )
    assert (first.rows_differ, second.rows_differ) == (True, False)
    patches.undo()
    experts[0](x)
    assert inner.evidence()[0].calls_per_step == 4


def test_layers_of_a_second_network_get_other_rows_and_are_no_experts(patches: Patches) -> None:
    """A coarse network and a fine one, called one after the other, as radiance fields do."""
    inner = InnerModules(UserCode(str(HERE.parent)))
    inner.watch(patches)
    for network, rows in (([nn.Linear(2, 2) for _ in range(8)], 4), ([nn.Linear(2, 2) for _ in range(8)], 6)):
        x = torch.ones(rows, 2)
        for layer in network:
            x = layer(x)
    (found,) = inner.evidence()
    assert (found.num_modules, found.rows_differ) == (16, False)


def test_a_failure_of_ours_is_kept_and_harms_nothing(patches: Patches) -> None:
    inner = InnerModules(None)  # type: ignore[arg-type]
    inner.watch(patches)
    assert nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)
    assert isinstance(inner.failure, AttributeError)
