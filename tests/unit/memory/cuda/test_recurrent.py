"""Recurrent layers: the reserve that was measured, and the shapes of PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from flatout.memory.cuda.recurrent import DROPOUT_STATE_PER_MULTIPROCESSOR
from tests.support.memory import job_of, traced, under_rules

STEPS, BATCH, WIDTH, HIDDEN = 64, 16, 128, 256
EMPTY = "empty"


def run(kind: type[nn.RNNBase], train: bool = True, **options: Any) -> list[tuple[int, ...]]:
    layer = kind(WIDTH, HIDDEN, **options).train(train)
    x = torch.empty(STEPS, BATCH, WIDTH)
    if not train:
        with torch.no_grad():
            output, last = layer(x)
    else:
        output, last = layer(x)
        output.sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
    states = last if isinstance(last, tuple) else (last,)
    return [tuple(each.shape) for each in (output, *states)]


@pytest.mark.parametrize(
    ("kind", "options", "reserve_bytes"),
    [
        (nn.LSTM, {}, 5_243_136),
        (nn.LSTM, {"num_layers": 2}, 11_534_592),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}, 23_068_928),
        (nn.LSTM, {"num_layers": 2, "dropout": 0.2}, 11_567_360),
        (nn.GRU, {}, 6_291_712),
    ],
)
def test_the_reserve_is_as_measured(kind: Any, options: dict[str, Any], reserve_bytes: int) -> None:
    made = under_rules(lambda: run(kind, **options))
    assert made.sizes_of(EMPTY).count(reserve_bytes) == 1
    plain = kind(WIDTH, HIDDEN, **options)
    output, last = plain(torch.zeros(2, 3, WIDTH))
    states = last if isinstance(last, tuple) else (last,)
    directions = 2 if options.get("bidirectional") else 1
    assert made.result[0] == (STEPS, BATCH, directions * HIDDEN)
    assert output.shape[-1] == made.result[0][-1]
    assert [shape[::2] for shape in made.result[1:]] == [tuple(state.shape[::2]) for state in states]


MIB = 2**20


@pytest.mark.parametrize(
    ("kind", "width", "rows", "options", "packed", "workspace_mib"),
    [
        (nn.LSTM, 640, 64, {"num_layers": 2}, False, 184.125),
        (nn.LSTM, 512, 64, {"num_layers": 2, "bidirectional": True}, False, 318.0),
        (nn.LSTM, 640, 64, {"num_layers": 2}, True, 117.875),
        (nn.GRU, 640, 64, {"num_layers": 2}, False, 156.3125),
        (nn.GRU, 640, 64, {"num_layers": 2}, True, 95.6875),
        (nn.RNN, 640, 16, {"num_layers": 2}, False, 48.578125),
        (nn.LSTM, 640, 176, {"num_layers": 2}, False, 434.59375),
    ],
)
def test_the_workspace_is_as_measured(
    kind: Any, width: int, rows: int, options: dict[str, Any], packed: bool, workspace_mib: float
) -> None:
    """Single calls of 128 steps in float32; packed ones are 64 to 128 long, evenly spread."""

    def call() -> None:
        x = torch.empty(rows, 128, width)
        layer = kind(width, width, batch_first=True, **options)
        if packed:
            with torch.utils._python_dispatch._disable_current_modes():
                lengths = torch.linspace(64, 128, rows).round().long()
            layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        else:
            layer(x)

    assert int(workspace_mib * MIB) in under_rules(call).sizes_of(EMPTY)


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "half", "measured"),
    [
        (nn.LSTM, (64, 128, 256), {}, False, 62_260_480),
        (nn.LSTM, (64, 128, 256), {}, True, 102_237_440),  # weights kept on the chip
        (nn.LSTM, (64, 256, 650), {}, True, 146_606_912),
        (nn.LSTM, (64, 128, 512), {"num_layers": 2}, False, 139_461_888),
        (nn.LSTM, (64, 128, 512), {"bidirectional": True}, True, 154_141_952),
        (nn.GRU, (64, 128, 256), {}, True, 34_669_824),
        (nn.GRU, (64, 128, 512), {"bidirectional": True}, False, 251_135_232),
        (nn.GRU, (128, 32, 512), {"num_layers": 2}, True, 45_154_816),
        (nn.RNN, (64, 128, 256), {}, False, 135_529_728),
        (nn.RNN, (256, 64, 1024), {}, True, 516_686_592),
        (nn.RNN, (64, 128, 512), {}, False, 112_461_056),
        (nn.RNN, (64, 128, 256), {"num_layers": 2}, True, 85_198_080),
        (nn.RNN, (64, 128, 256), {"bidirectional": True}, True, 106_300_672),
    ],
)
def test_the_workspace_with_steps_first_is_as_measured(
    kind: Any, sizes: tuple[int, int, int], options: dict[str, Any], half: bool, measured: int
) -> None:
    """Single calls of steps, rows and units, in float32 or under autocast."""

    def call() -> None:
        width = sizes[-1]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            kind(width, width, **options)(torch.empty(*sizes))

    found = under_rules(call).sizes_of(EMPTY)
    assert min(abs(num_bytes - measured) for num_bytes in found) < 4096


@pytest.mark.parametrize(
    ("kind", "num_layers", "sizes", "half", "measured_mib"),
    [(nn.LSTM, 3, (128, 256), False, 563.533), (nn.LSTM, 3, (256, 200), True, 435.237)],
)
def test_a_stack_whose_input_is_narrower_takes_less(
    kind: Any, num_layers: int, sizes: tuple[int, int], half: bool, measured_mib: float
) -> None:
    """Calls of a recorded job, 24 values in and 768 units."""

    def call() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            kind(24, 768, num_layers=num_layers, batch_first=True)(torch.empty(*sizes, 24))

    found = under_rules(call).sizes_of(EMPTY)
    assert min(abs(num_bytes / MIB - measured_mib) for num_bytes in found) < 0.01


def test_a_narrow_stack_with_dropout_takes_the_output_of_a_layer_beside() -> None:
    """The peaks of a forecaster and of a transducer at three batches each have that block."""

    def workspace(dropout: float) -> int:
        def call() -> None:
            nn.LSTM(25, 256, num_layers=3, dropout=dropout, batch_first=True)(torch.empty(512, 168, 25))

        _reserve, found, *_ = sorted(under_rules(call).sizes_of(EMPTY), reverse=True)
        return found

    assert workspace(0.1) - workspace(0.0) == 512 * 168 * 256 * 4


def test_an_lstm_of_few_units_takes_more_forward() -> None:
    """As recorded of two recurrent layers of 160 units: 298.2 MiB forward and 88.4 backward."""

    def call() -> None:
        layer = nn.LSTM(160, 160, batch_first=True)
        layer(torch.empty(128, 168, 160))[0].sum().backward()

    found = [num_bytes / MIB for num_bytes in under_rules(call).sizes_of(EMPTY)]
    assert sum(abs(num_mib - 298.158) < 0.01 for num_mib in found) == 1
    assert sum(abs(num_mib - 88.392) < 0.01 for num_mib in found) == 2


def test_evaluation_keeps_no_reserve() -> None:
    made = under_rules(lambda: run(nn.LSTM, False))
    assert 5_243_136 not in made.sizes_of(EMPTY)
    assert made.result[0] == (STEPS, BATCH, HIDDEN)


def test_dropout_takes_the_state_of_its_generator_once_and_for_good() -> None:
    kinds = {"dropout": 0.2, "num_layers": 2}
    twice = under_rules(lambda: [run(nn.LSTM, **kinds), run(nn.GRU, **kinds)])
    assert twice.sizes_of(EMPTY).count(132 * DROPOUT_STATE_PER_MULTIPROCESSOR) == 1
    for options in ({"num_layers": 2}, {"train": False, **kinds}):
        made = under_rules(lambda options=options: run(nn.LSTM, **options))
        assert 132 * DROPOUT_STATE_PER_MULTIPROCESSOR not in made.sizes_of(EMPTY)
    job = job_of(
        lambda: nn.LSTM(WIDTH, HIDDEN, **kinds),
        lambda batch_size: torch.randn(STEPS, batch_size, WIDTH),
        loss=lambda model, x: model(x)[0].sum(),
    )
    trace = traced(job)
    (state,) = [
        at
        for at, each in enumerate(trace.storages)
        if each.num_bytes == 132 * DROPOUT_STATE_PER_MULTIPROCESSOR
    ]
    assert trace.storages[state].component == "workspaces"
    assert ~state not in trace.events


def in_half_precision() -> None:
    layer = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = layer(torch.empty(BATCH, STEPS, WIDTH))
    assert output.dtype is torch.float16  # of cuDNN's layers autocast makes that, whatever it was asked for
    assert output.shape == (BATCH, STEPS, HIDDEN)
    output.float().sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters() if parameter.grad is not None} == {
        torch.float32
    }


def test_autocast_casts_the_weights_into_one_buffer() -> None:
    made = under_rules(in_half_precision)
    num_weights = 4 * HIDDEN * (WIDTH + HIDDEN + 2)
    assert 2 * num_weights in made.sizes_of(EMPTY)


def packed() -> tuple[list[int], list[int], list[int]]:
    layer = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
    x = torch.empty(3, 10, WIDTH, requires_grad=True)
    rows = pack_padded_sequence(x, torch.tensor([10, 4, 2]), batch_first=True)
    output, _ = layer(rows)
    padded, lengths = pad_packed_sequence(output, batch_first=True)
    padded.sum().backward()
    assert x.grad is not None
    return list(rows.data.shape), list(padded.shape), lengths.tolist()


def test_packed_rows_are_as_many_as_their_lengths() -> None:
    assert under_rules(packed).result == ([16, WIDTH], [3, 10, HIDDEN], [10, 4, 2])
