from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from flatout.measure.clock import FORWARD, REST, Clock
from flatout.measure.evidence import Site
from flatout.measure.lines.call_sites import CallSites
from flatout.measure.lines.counted_calls import count_creations
from flatout.measure.lines.function_modes import insert_mode, keep_in_backward, remove_mode
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode
from tests.support.measure import line_of

HERE = Path(__file__)
NUM = 7


def line(marker: str) -> int:
    return line_of(HERE, marker)


@contextmanager
def counting(*, attributing: bool = False) -> Iterator[CallSites]:
    """The mode as the observer puts it on: from a hook, kept on inside backward, taken off by identity."""
    sites = CallSites(UserCode(str(HERE.parent)))
    patches = Patches()
    keep_in_backward(sites, patches)
    count_creations(sites.note_creation, patches)
    sites.attributing = attributing
    insert_mode(sites)
    try:
        yield sites
    finally:
        assert remove_mode(sites)
        patches.undo()
    sites.num_steps = 1


def counted(function: Callable[[], object]) -> dict[tuple[str, str, int], Site]:
    """Sites by kind, op and line."""
    with counting() as sites:
        function()
    found = sites.evidence(None)
    by_key = {(site.kind, site.op, site.place.line): site for site in found}
    assert len(by_key) == len(found)
    assert all(site.place.file == HERE.name for site in found)
    return by_key


def calls(function: Callable[[], object]) -> dict[tuple[str, str, int], float]:
    return {key: site.calls_per_step for key, site in counted(function).items()}


def test_tensors_created_in_a_loop() -> None:
    def work() -> None:
        for i in range(NUM):
            torch.tensor(i)  # at: create
        torch.zeros(2).new_ones(3)  # at: once

    once = line("once")
    assert calls(work) == {
        ("create", "tensor", line("create")): NUM,
        ("create", "zeros", once): 1,
        ("create", "new_ones", once): 1,
    }


@pytest.mark.parametrize(
    "index",
    [int, np.int64, torch.tensor, lambda i: torch.tensor([i])],
    ids=["int", "numpy", "tensor", "tensor of one"],
)
def test_rows_read_one_by_one(index: Callable[[int], Any]) -> None:
    x = torch.zeros(NUM, 3)
    indices = [index(i) for i in range(NUM)]

    def work() -> None:
        for i in indices:
            x[i]  # at: row

    assert calls(work) == {("row", "__getitem__", line("row")): NUM}


def test_elements_read_by_two_numbers_and_rows_written() -> None:
    x = torch.zeros(NUM, 3)

    def work() -> None:
        for b in range(NUM):
            for t in range(3):
                x[b, t]  # at: element
            x[b] = 1.0  # at: written

    assert calls(work) == {
        ("row", "__getitem__", line("element")): NUM * 3,
        ("row", "__setitem__", line("written")): NUM,
    }


def test_gathers_and_slices_are_no_rows() -> None:
    x, index = torch.zeros(NUM, 3), torch.tensor([0, 2])

    def work() -> None:
        x[index], x[1:3], x[:, None], x[...]

    assert calls(work) == {}


def test_a_row_of_a_graph_is_told_from_a_row_of_data() -> None:
    parameter, data = torch.zeros(NUM, 3, requires_grad=True), torch.zeros(NUM, 3)

    def work() -> None:
        data[0]  # at: data
        parameter[0]  # at: parameter
        with torch.no_grad():
            parameter[0]  # at: no grad

    found = counted(work)
    grad = {key[2]: site.requires_grad for key, site in found.items()}
    assert grad == {line("data"): False, line("parameter"): True, line("no grad"): False}


def test_waits_for_a_value() -> None:
    x = torch.tensor([1.0, 2.0])

    def work() -> None:
        x[0:1].item()  # at: item
        float(x.sum())  # at: float
        if x.sum() > 0:  # at: bool
            x.tolist()  # at: list
        x[x > 1]  # at: mask
        x.nonzero()  # at: nonzero

    assert calls(work) == {
        ("sync", "item", line("item")): 1,
        ("sync", "__float__", line("float")): 1,
        ("sync", "__bool__", line("bool")): 1,
        ("sync", "tolist", line("list")): 1,
        ("sync", "__getitem__", line("mask")): 1,
        ("sync", "nonzero", line("nonzero")): 1,
    }


def test_a_recurrent_cell_called_per_step_of_time() -> None:
    cell = nn.LSTMCell(3, 4)
    x = torch.zeros(NUM, 2, 3)

    def work() -> None:
        state = None
        for x_t in x.unbind(0):
            state = cell(x_t, state)  # at: cell

    found = counted(work)
    site = found["cell", "lstm_cell", line("cell")]
    assert site.calls_per_step == NUM
    assert site.via is not None and site.via.startswith("torch/nn/modules/rnn.py:")


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_layer_that_gets_one_position_is_a_cell(kind: Any, batch_first: bool) -> None:
    layer = kind(3, 4, batch_first=batch_first)
    both_ways = kind(3, 4, bidirectional=True)
    x = torch.zeros(2, NUM, 3) if batch_first else torch.zeros(NUM, 2, 3)
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 3), torch.zeros(1, 3)])

    def work() -> None:
        state = None
        for x_t in x.split(1, int(batch_first)):
            _, state = layer(x_t, state)  # at: layer
            both_ways(x_t)
        layer(x), layer(packed)

    with counting() as sites:
        work()
    (site,) = [site for site in sites.evidence(None) if site.kind == "cell"]
    assert (site.place.line, site.calls_per_step) == (line("layer"), NUM)


def test_a_copy_within_the_host_is_no_copy() -> None:
    x = torch.zeros(3)

    def work() -> None:
        x.to("cpu"), x.to(torch.float64), x.cpu()

    assert not any(kind == "copy" for kind, _op, _line in calls(work))


def test_a_copy_off_the_host_has_its_bytes() -> None:
    x = torch.zeros(8, dtype=torch.float64)

    def work() -> None:
        for _ in range(NUM):
            x.to("meta")  # at: copy
            x.float().to("meta", non_blocking=True)  # at: narrow copy
            x.float().to("meta", torch.float16, True)  # at: third copy

    sites = counted(work)
    site = sites["copy", "to", line("copy")]
    assert (site.calls_per_step, site.bytes_per_step, site.device) == (NUM, NUM * 64, "meta")
    assert (site.pinned, site.blocking, site.wide_bytes_per_step) == (False, True, NUM * 64)
    for name in ("narrow copy", "third copy"):
        site = sites["copy", "to", line(name)]
        assert (site.blocking, site.wide_bytes_per_step) == (False, 0)


def test_bytes_are_those_of_counted_steps() -> None:
    x = torch.zeros(8)
    with counting() as sites:
        x.to("meta")
        sites.attributing = True
        x.to("meta")
    (site,) = sites.evidence(None)
    assert (site.calls_per_step, site.bytes_per_step) == (1, 32)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.tensor(2.0)  # at: custom backward


def test_a_custom_backward_is_counted() -> None:
    x = torch.ones(3, requires_grad=True)

    def work() -> None:
        for _ in range(NUM):
            Doubling.apply(x).sum().backward()

    assert calls(work) == {("create", "tensor", line("custom backward")): NUM}


def test_autograd_grad_is_counted_too() -> None:
    x = torch.ones(3, requires_grad=True)

    def work() -> None:
        torch.autograd.grad(Doubling.apply(x).sum(), x)

    assert calls(work) == {("create", "tensor", line("custom backward")): 1}


def block(x: torch.Tensor) -> torch.Tensor:
    return x * torch.full((3,), 2.0)  # at: recomputed


def test_recomputation_inside_backward_is_counted() -> None:
    x = torch.ones(3, requires_grad=True)

    with counting() as sites:
        checkpoint(block, x, use_reentrant=False).sum().backward()  # type: ignore[union-attr]
    # once forward, once recomputed; torch 2.11 makes tensors of its own beside them
    made = [site for site in sites.evidence(None) if site.place.line == line("recomputed")]
    assert [(site.op, site.calls_per_step) for site in made] == [("full", 2)]


class Own(TorchFunctionMode):
    """A mode of the script's own, entered in one step and left in another."""

    num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_a_device_context_of_the_script_hides_no_line() -> None:
    def work() -> None:
        with torch.device("cpu"):
            torch.tensor(1)  # at: on device

    site = counted(work)["create", "tensor", line("on device")]
    assert site.via is None


def test_the_mode_goes_from_under_a_mode_and_a_device_context_of_the_script() -> None:
    own = Own()
    sites = CallSites(UserCode(str(HERE.parent)))
    with torch.device("cpu"), own:
        insert_mode(sites)
        torch.tensor(1)
        seen = own.num
        assert remove_mode(sites)
        torch.tensor(1)
        assert own.num == seen + 1
    assert _get_current_function_mode_stack() == []
    assert sum(site.calls_per_step for site in sites.evidence(None)) == 1


def test_calls_are_means_over_the_counted_steps() -> None:
    with counting() as sites:
        for _ in range(6):
            torch.tensor(1)
    sites.num_steps = 3
    assert [site.calls_per_step for site in sites.evidence(None)] == [2]


def test_what_no_line_of_the_user_asked_for_is_no_site() -> None:
    """A pool's thread calls torch from library code alone, unless the task is the user's."""
    sites = CallSites(UserCode(str(HERE.parent)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(insert_mode, sites).result()
        pool.submit(torch.tensor, 1).result()
        assert sites.evidence(None) == ()
        pool.submit(lambda: torch.tensor(1)).result()  # at: task
        assert pool.submit(remove_mode, sites).result()
    assert [site.place.line for site in sites.evidence(None)] == [line("task")]


def test_attribution_notes_the_time_and_the_backward_nodes_of_each_call() -> None:
    x = torch.zeros(NUM, 3, requires_grad=True)

    def work() -> torch.Tensor:
        return sum(x[i].sum() for i in range(NUM))  # type: ignore[return-value]  # at: attributed

    with counting() as sites:
        work()
        sites.attributing = True
        work()
        sites.attributing = False
    asked: list[tuple[int, int]] = []

    def backward_seconds(intervals: list[tuple[int, int]]) -> float:
        asked.extend(intervals)
        return 0.25

    (site,) = [site for site in sites.evidence(backward_seconds) if site.kind == "row"]
    assert site.calls_per_step == NUM
    assert site.host_s is not None and site.host_s > 0
    assert site.backward_s == 0.25
    assert len(asked) >= NUM
    assert all(before < after for before, after in asked)


def test_attributed_steps_are_told_apart_and_averaged() -> None:
    x, clock = torch.zeros(NUM, 3), Clock()
    sites = CallSites(UserCode(str(HERE.parent)), clock)
    sites.attributing = True
    sites.num_steps = 1
    with sites:
        for region in (FORWARD, REST):
            clock.enter(region)
            for i in range(NUM):
                x[i]
            torch.add(x, x)
            clock.leave()
            sites.attributed_step_end()
    counts = next(iter(sites.sites.values()))
    counts.calls = NUM
    counts.host_s.update({(0, FORWARD): 0.3, (1, REST): 0.1})
    counts.sequences += [(0, (1, 2)), (1, (7, 9))]
    (site,) = sites.evidence(lambda intervals: 0.25 * len(intervals))
    assert (site.host_s, site.backward_s) == (pytest.approx(0.2), pytest.approx(0.25))
    assert site.phases_s == {"forward": pytest.approx(0.15), "rest": pytest.approx(0.05)}
    assert site.steps_s == (pytest.approx(0.55), pytest.approx(0.35))
    assert set(sites.called_s) == {(0, FORWARD), (1, REST)}
    sites.usual_steps = [1]  # the other one holds an evaluation
    (site,) = sites.evidence(lambda intervals: 0.25 * len(intervals))
    assert (site.host_s, site.backward_s) == (pytest.approx(0.1), pytest.approx(0.25))
    assert (site.phases_s, site.steps_s) == ({"rest": pytest.approx(0.1)}, (pytest.approx(0.35),))


def test_without_attribution_seconds_are_unknown() -> None:
    def work() -> None:
        torch.tensor(1)

    (site,) = counted(work).values()
    assert site.host_s is None
    assert site.backward_s is None


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # at: gate
        return torch.sigmoid(x) * x.view(-1)  # a view runs nothing


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Gate(), Gate(), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x))) + 1


def test_operators_are_counted_for_the_module_that_calls_them() -> None:
    x = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([x], lr=0.1, foreach=False)
    sites = CallSites(UserCode(str(HERE.parent)))
    model, alone = Gates(), nn.Tanh()
    with sites:
        for _ in range(2):
            loss = alone(model(x)).sum()
            loss.backward()
            optimizer.step()
    sites.num_steps = 2
    calls = {each.caller: each for each in sites.operator_calls()}
    assert calls["Gate"].calls_per_step == 4
    assert calls["Gates"].calls_per_step == 2  # its own sum, and the norm's, which is a library's
    assert calls["Tanh"].calls_per_step == 1
    assert calls["SGD.step"].calls_per_step >= 1
    assert calls["Gate"].place is not None and calls["Tanh"].place is None
    assert calls["Gate"].place.line == line("gate")


def test_constructors_from_before_torch_tensor_are_creations() -> None:
    rows = [np.ones(2), np.ones(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.tensor(rows)  # torch warns once, that this is slow

    def job() -> None:
        for number in range(NUM):
            torch.LongTensor([number])  # at: long
            torch.Tensor(rows)  # at: rows

    assert calls(job) == {
        ("create", "LongTensor", line("long")): NUM,
        ("create", "Tensor of arrays", line("rows")): NUM,
    }
    with counting(attributing=True) as sites:
        job()
    assert all(counts.host_s[0, REST] > 0 for counts in sites.sites.values())
    with counting() as sites, ThreadPoolExecutor(1) as pool:
        sites._clock = Clock()
        pool.submit(job).result()
    assert not sites.sites
