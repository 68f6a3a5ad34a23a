from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.measure.arms.recurrence import LibraryRecurrence, propose
from flatout.measure.clock import Clock
from flatout.measure.evidence import Place, Site
from flatout.measure.user_code import UserCode
from tests.support.measure import line_of

HERE = Path(__file__)
POSITIONS, ROWS, INPUTS, HIDDEN = 6, 3, 4, 5


def run(cell: Any, frames: torch.Tensor, state: Any = None) -> list[Any]:
    """The outputs of every position."""
    outputs = []
    for frame in frames:
        state = cell(frame, state)  # at: cell
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return outputs


def continued(cell: Any, frame: torch.Tensor) -> None:
    state = None
    for _ in range(3):
        state = cell(frame, state)  # at: continued
        frame = frame + state[0].mean()


def stepped(layer: Any, frames: torch.Tensor, state: Any = None, *, time: int = 0) -> torch.Tensor:
    """The outputs of a layer that is given one position at a time."""
    outputs = []
    for frame in frames.split(1, time):
        output, state = layer(frame, state)  # at: layer
        outputs.append(output)
    return torch.cat(outputs, time)


def fed_back(layer: Any, frame: torch.Tensor) -> None:
    state = None
    for _ in range(3):
        output, state = layer(frame, state)  # at: fed back
        frame = output.argmax(-1, keepdim=True).float()


def learning(layer: Any, frames: torch.Tensor) -> None:
    state = None
    for frame in frames.split(1):
        output, state = layer(frame, None if state is None else state.detach())  # at: learning
        output.sum().backward()


def make(marker: str, function: str) -> LibraryRecurrence:
    place = Place(file=HERE.name, line=line_of(HERE, marker), function=function)
    return LibraryRecurrence(UserCode(str(HERE.parent)), Clock(), lambda: 0, place=place, suspicion=0.5)


@pytest.fixture
def arm() -> Iterator[LibraryRecurrence]:
    arm = make("cell", "run")
    yield arm
    arm.end()


@pytest.fixture
def frames() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(POSITIONS, ROWS, INPUTS)


def cells() -> dict[str, Any]:
    return {
        "lstm": nn.LSTMCell(INPUTS, HIDDEN),
        "lstm without bias": nn.LSTMCell(INPUTS, HIDDEN, bias=False),
        "gru": nn.GRUCell(INPUTS, HIDDEN),
        "rnn": nn.RNNCell(INPUTS, HIDDEN, nonlinearity="relu"),
    }


class Calls:
    """Counts the calls of a cell's own forward."""

    def __init__(self, cell: Any) -> None:
        self.num = 0
        cell.register_forward_hook(self.add)

    def add(self, *_: Any) -> None:
        self.num += 1


@pytest.mark.parametrize("name", list(cells()))
def test_a_layer_computes_what_the_loop_computed(
    arm: LibraryRecurrence, frames: torch.Tensor, name: str
) -> None:
    cell = cells()[name]
    calls = Calls(cell)
    arm.begin()
    expected = run(cell, frames)
    torch.stack(expected).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in cell.parameters()]
    arm.step_end()
    assert calls.num == POSITIONS
    for _ in range(2):
        cell.zero_grad()
        outputs = run(cell, frames)
        torch.stack(outputs).square().sum().backward()
        arm.step_end()
        assert all(map(torch.allclose, outputs, expected))
        grads = [parameter.grad for parameter in cell.parameters()]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads, gradients, strict=True))
    assert calls.num == POSITIONS and arm.refusal is None and not arm.fell_back
    arm.end()
    run(cell, frames)
    assert calls.num == 2 * POSITIONS


def test_every_sequence_of_a_step_begins_with_the_state_it_is_given(
    arm: LibraryRecurrence, frames: torch.Tensor
) -> None:
    cell = nn.LSTMCell(INPUTS, HIDDEN)
    state = (torch.ones(ROWS, HIDDEN), torch.zeros(ROWS, HIDDEN))
    arm.begin()
    first, second = run(cell, frames), run(cell, frames[:2], state)
    arm.step_end()
    assert all(map(torch.allclose, run(cell, frames), first))
    assert all(map(torch.allclose, run(cell, frames[:2], state), second))


def test_stacked_cells_at_one_line_are_layers_of_their_own(
    arm: LibraryRecurrence, frames: torch.Tensor
) -> None:
    lower, upper = nn.GRUCell(INPUTS, HIDDEN), nn.GRUCell(HIDDEN, HIDDEN)
    calls = Calls(lower), Calls(upper)
    arm.begin()
    expected = run(upper, torch.stack(run(lower, frames)))
    arm.step_end()
    assert all(map(torch.allclose, run(upper, torch.stack(run(lower, frames))), expected))
    assert [each.num for each in calls] == [POSITIONS, POSITIONS] and arm.refusal is None


def test_gradients_reach_what_lies_before_and_longer_sequences_go_on(
    arm: LibraryRecurrence, frames: torch.Tensor
) -> None:
    cell, upstream = nn.GRUCell(INPUTS, HIDDEN), torch.ones(INPUTS, requires_grad=True)
    arm.begin()
    run(cell, frames[:2])
    arm.step_end()
    outputs = run(cell, frames * upstream)
    assert len(outputs) == POSITIONS
    outputs[-1].sum().backward()
    assert upstream.grad is not None


def test_optimizer_steps_under_the_arm_stay_with_the_cell(
    arm: LibraryRecurrence, frames: torch.Tensor
) -> None:
    cell = nn.LSTMCell(INPUTS, HIDDEN)
    memory = cell.weight_ih.data_ptr()
    arm.begin()
    run(cell, frames)
    arm.step_end()
    before = run(cell, frames)[-1]
    with torch.no_grad():
        cell.weight_ih += 0.5
    arm.step_end()
    after = run(cell, frames)[-1]
    assert not torch.allclose(before, after)
    arm.end()
    assert cell.weight_ih.data_ptr() == memory
    assert torch.allclose(run(cell, frames)[-1], after)


def test_a_sequence_that_goes_on_from_its_own_output_is_refused() -> None:
    cell = nn.LSTMCell(INPUTS, HIDDEN)
    calls = Calls(cell)
    arm = make("continued", "continued")
    arm.begin()
    for _ in range(2):
        continued(cell, torch.ones(ROWS, INPUTS))
        arm.step_end()
    arm.end()
    assert arm.refusal is not None and "earlier result" in arm.refusal
    assert calls.num == 6


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_layer_that_is_called_by_position_is_called_once(
    frames: torch.Tensor, kind: Any, batch_first: bool
) -> None:
    layer = kind(INPUTS, HIDDEN, num_layers=2, batch_first=batch_first)
    inputs = frames.transpose(0, 1) if batch_first else frames
    calls, arm = Calls(layer), make("layer", "stepped")
    arm.begin()
    expected = stepped(layer, inputs, time=int(batch_first))
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in layer.parameters()]
    arm.step_end()
    assert calls.num == POSITIONS and arm.refusal is None
    layer.zero_grad()
    outputs = stepped(layer, inputs, time=int(batch_first))
    outputs.square().sum().backward()
    arm.end()
    assert calls.num == POSITIONS + 1 and not arm.fell_back
    assert torch.allclose(outputs, expected, atol=1e-6)
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-5)


@pytest.mark.parametrize(
    ("marker", "function", "frame", "reason"),
    [
        ("fed back", fed_back, torch.ones(1, ROWS, 1), "earlier result"),
        ("learning", learning, torch.ones(3, ROWS, 1), "a backward pass runs between"),
        ("layer", stepped, None, "more than one position"),
    ],
)
def test_a_layer_whose_positions_cannot_be_one_call_is_refused(
    marker: str, function: Any, frame: Any, reason: str
) -> None:
    layer, backwards = nn.GRU(1, HIDDEN), [0]
    place = Place(file=HERE.name, line=line_of(HERE, marker), function=function.__name__)
    arm = LibraryRecurrence(
        UserCode(str(HERE.parent)), Clock(), lambda: backwards[0], place=place, suspicion=0.5
    )
    if marker == "learning":
        layer.weight_ih_l0.register_hook(lambda _: backwards.__setitem__(0, backwards[0] + 1))
    if marker == "layer":
        frame = Whole(torch.ones(3, ROWS, 1))
    arm.begin()
    for _ in range(2):
        function(layer, frame)
        arm.step_end()
    arm.end()
    assert arm.refusal is not None and reason in arm.refusal


class Whole:
    """A sequence that is not split."""

    def __init__(self, frames: torch.Tensor) -> None:
        self.frames = frames

    def split(self, *_: int) -> list[torch.Tensor]:
        return [self.frames]


def test_computed_weights_and_missing_cells_are_refused(arm: LibraryRecurrence, frames: torch.Tensor) -> None:
    cell = nn.utils.parametrizations.weight_norm(nn.GRUCell(INPUTS, HIDDEN), "weight_ih")
    arm.begin()
    run(cell, frames)
    arm.step_end()
    assert arm.refusal is not None and "not its own" in arm.refusal
    arm.end()
    other = make("cell", "run")
    other.begin()
    other.step_end()
    assert other.refusal is not None and "no cell" in other.refusal
    other.end()
    assert torch._C._len_torch_function_stack() == 0 and "__call__" not in vars(nn.GRUCell)


def test_a_line_that_calls_a_cell_many_times_is_proposed(context: Any) -> None:
    def site(calls: float, host_s: float | None) -> Site:
        place = Place(file="model.py", line=16)
        backward_s = None if host_s is None else 0.2
        return Site(
            kind="cell", op="lstm_cell", place=place, via="torch/nn/modules/rnn.py:1", calls_per_step=calls,
            host_s=host_s, backward_s=backward_s,
        )  # fmt: skip

    (arm,) = propose(context(sites=(site(48, 0.3),), attributed_step_s=2.0))
    assert (arm.label, arm.suspicion) == ("library-recurrence model.py:16", 0.25)
    assert not list(propose(context(sites=(site(3, 0.3),), attributed_step_s=2.0)))
    untimed = context(sites=(site(48, None),), phases_s={"forward": 0.3, "backward": 0.4})
    assert [arm.suspicion for arm in propose(untimed)] == [0.7]
