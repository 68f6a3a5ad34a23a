"""Arms on a real GPU: what they change there, and that they leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.measure.arms.batched_call import BatchedCall
from flatout.measure.arms.batches.staged import Staged
from flatout.measure.arms.batches.workers import Workers
from flatout.measure.arms.precision import Autocast, Tf32, narrow_dtype
from flatout.measure.arms.reads_free import ReadsFree
from flatout.measure.arms.recurrence import LibraryRecurrence
from flatout.measure.clock import Clock
from flatout.measure.evidence import Place
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.loading.workers import LOG
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode
from tests.support.gpu import no_synchronisation
from tests.support.measure import line_of

pytestmark = pytest.mark.gpu

HERE = Path(__file__)
USER_CODE = UserCode(str(HERE.parent))


def place(marker: str, function: str) -> Place:
    return Place(file=HERE.name, line=line_of(HERE, marker), function=function)


# Reads


READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "if": lambda x: "high" if x.sum() > 5 else "low",
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu().numpy().tolist(),
    "to": lambda x: x.to("cpu").numpy().tolist(),
    "format": lambda x: f"{x.sum():.1f}",
    "print": lambda x: f"{x!s}",
}


@pytest.mark.parametrize("name", READERS)
def test_reads_of_the_user_wait_for_nothing(name: str) -> None:
    read = READERS[name]
    first, later = torch.ones(3, device="cuda"), torch.full((3,), 9.0, device="cuda")
    arm = ReadsFree(USER_CODE, Clock(), device="cuda", suspicion=0.5)
    arm.begin()
    try:
        value = read(first)
        arm.step_end()
        with no_synchronisation():
            assert read(later) == value
    finally:
        arm.end()
    assert read(later) != value
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        read(later)


# Formats


def test_autocast_narrows_the_forward_pass_alone_and_puts_parameters_back() -> None:
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[tuple[torch.dtype, bool]] = []

    def step() -> None:
        optimizer.zero_grad()
        out = model(torch.ones(8, 64, device="cuda"))
        out.register_hook(lambda gradient: seen.append((out.dtype, torch.is_autocast_enabled("cuda"))))
        loss = nn.BCELoss()(torch.sigmoid(out), torch.ones_like(out))  # autocast alone would raise
        loss.backward()
        optimizer.step()

    step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    dtype = narrow_dtype("cuda")
    assert dtype is not None
    arm = Autocast(Clock(), optimizer, device="cuda", dtype=dtype, suspicion=0.5)
    arm.begin()
    for _ in range(3):
        step()
        arm.step_end()
    arm.end()
    assert arm.refusal is None
    assert seen[1:] == [(getattr(torch, dtype), False)] * 3
    assert all(map(torch.equal, model.parameters(), before))
    step()
    assert seen[-1] == (torch.float32, False)


def test_tf32_is_on_in_the_block_alone() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    assert torch.get_float32_matmul_precision() == "highest"
    a, b = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
    exact, arm = a @ b, Tf32(suspicion=0.5)
    arm.begin()
    rounded = a @ b
    arm.end()
    assert arm.refusal is None
    assert not torch.equal(rounded, exact) and torch.equal(a @ b, exact)


# Batches


@pytest.fixture
def watch() -> Iterator[LoaderWatch]:
    LOG.reset()
    patches = Patches()
    watch = LoaderWatch(Clock(), USER_CODE)
    watch.install(patches)
    yield watch
    patches.undo()


def kept_batches(watch: LoaderWatch, **options: Any) -> Iterator[Any]:
    """Batches of (inputs, lengths), of which four were kept."""
    data = TensorDataset(torch.randn(400, 256), torch.arange(400))
    watch.keeping = True
    batches = iter(DataLoader(data, batch_size=8, **options))
    for _ in range(4):
        next(batches)
        watch.num_steps += 1
    watch.keeping = False
    return batches


@pytest.mark.parametrize("where", ["pinned", "device"])
def test_staged_batches_are_copied_without_waiting(
    watch: LoaderWatch, where: Literal["pinned", "device"]
) -> None:
    batches = kept_batches(watch)
    arm = Staged(watch, where=where, suspicion=0.3)
    watch.begin_serving(arm.serves)
    arm.begin()
    inputs, _lengths = next(batches)
    expected = inputs.to("cuda")
    arm.step_end()
    for _ in range(3):
        next(batches)
    inputs, lengths = next(batches)  # the fifth of four: the first one again
    assert inputs.is_pinned() == (where == "pinned") and inputs.is_cuda == (where == "device")
    assert lengths.device.type == "cpu" and not lengths.is_pinned()
    with no_synchronisation():
        moved = inputs.to("cuda")
    assert torch.equal(moved, expected)
    arm.end()
    watch.begin_serving(None)
    inputs, _lengths = next(batches)
    assert arm.refusal is None and not inputs.is_pinned()
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        inputs.to("cuda")


def test_workers_are_started_beside_a_used_gpu(watch: LoaderWatch) -> None:
    torch.ones(1, device="cuda").sum().item()
    batches = kept_batches(watch, pin_memory=True)
    arm = Workers(watch, num_workers=2, cores=4.0, suspicion=0.3)
    watch.begin_serving(arm.serves)
    arm.begin()
    try:
        assert arm.refusal is None
        for _ in range(4):
            inputs, _lengths = next(batches)
            assert inputs.is_pinned()
            inputs.cuda(non_blocking=True)
            arm.step_end()
    finally:
        arm.end()
        arm.close()
        watch.begin_serving(None)


# Loops of calls


def energies(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(row) for row in rows.split(1)])  # at: rows


def test_rows_are_computed_in_one_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1)).cuda()
    rows = torch.randn(12, 16, device="cuda")
    arm = BatchedCall(
        USER_CODE,
        Clock(),
        lambda: 0,
        types=[nn.Sequential],
        place=place("rows", "energies"),
        suspicion=0.5,
    )
    arm.begin()
    expected = energies(model, rows)
    expected.sum().backward()  # the same gradient for every row: the first one's stands for all
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    arm.step_end()
    calls: list[int] = []
    handle = model.register_forward_hook(lambda module, args, result: calls.append(len(args[0])))
    model.zero_grad()
    outputs = energies(model, rows)
    outputs.sum().backward()
    arm.end()
    handle.remove()
    assert arm.refusal is None and calls == [12]
    assert torch.allclose(outputs, expected, atol=1e-4)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None and torch.allclose(parameter.grad, gradient, atol=1e-3)


def run(cell: Any, frames: torch.Tensor) -> torch.Tensor:
    state, outputs = None, []
    for frame in frames:
        state = cell(frame, state)  # at: cell
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("autocast", [False, True], ids=["32 bits", "autocast"])
def test_a_recurrent_layer_takes_the_place_of_a_loop(kind: type[nn.Module], autocast: bool) -> None:
    torch.manual_seed(0)
    cell: Any = kind(24, 32).cuda()
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
    frames = torch.randn(10, 6, 24, device="cuda")
    memory = [parameter.data_ptr() for parameter in cell.parameters()]
    arm = LibraryRecurrence(USER_CODE, Clock(), lambda: 0, place=place("cell", "run"), suspicion=0.5)

    def outputs_of_a_step() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            outputs = run(cell, frames)
        outputs.float().square().mean().backward()
        return outputs

    arm.begin()
    expected = outputs_of_a_step()
    gradients = [parameter.grad.clone() for parameter in cell.parameters()]
    arm.step_end()
    calls: list[Any] = []
    handle = cell.register_forward_hook(lambda *_: calls.append(1))
    cell.zero_grad()
    outputs = outputs_of_a_step()  # torch warns, and so fails, where the weights are not in one piece
    assert not calls and arm.refusal is None
    tolerance = 5e-2 if autocast else 5e-3  # TF32 products
    assert torch.allclose(outputs.float(), expected.float(), atol=tolerance)
    for parameter, gradient in zip(cell.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=tolerance)
    optimizer.step()
    arm.step_end()
    trained = outputs_of_a_step()
    arm.step_end()
    arm.end()
    assert [parameter.data_ptr() for parameter in cell.parameters()] == memory
    assert torch.allclose(outputs_of_a_step().float(), trained.float(), atol=tolerance)
    assert len(calls) == len(frames)
    handle.remove()
