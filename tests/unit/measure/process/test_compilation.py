"""Dynamo's records of jobs that compile again and of graphs that break, as it keeps them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from flatout.measure.evidence import CompiledFunction
from flatout.measure.process.compilation import CompilationWatch
from flatout.measure.user_code import UserCode
from tests.support.measure import line_of

HERE = Path(__file__)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    import torch._dynamo

    logging.disable(logging.WARNING)
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()
    logging.disable(logging.NOTSET)


@pytest.fixture
def watch() -> CompilationWatch:
    watch = CompilationWatch(UserCode(str(HERE.parent)))
    watch.step_end("warmup")
    return watch


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num += 1  # at: counts
        return x * self.num


def steps(watch: CompilationWatch, function: Callable[[int], object], labels: list[str]) -> None:
    for number, label in enumerate(labels):
        function(number)
        watch.step_end(label)


def only(watch: CompilationWatch, *, steps_s: float = 100.0) -> CompiledFunction:
    found = watch.evidence(steps_s=steps_s)
    assert found is not None
    (function,) = found.functions
    return function


def test_a_number_that_changes_compiles_again_at_its_line(watch: CompilationWatch) -> None:
    model = torch.compile(Counting(), backend="eager")
    steps(watch, lambda _: model(torch.ones(3)), ["warmup"] * 2 + ["real"] * 3)
    found = only(watch)
    assert (found.function, found.num_compiled, found.num_recompiled) == ("forward", 5, 4)
    assert (found.num_late_steps, found.gave_up) == (3, False)
    assert 0 < found.late_s < found.compile_s
    assert found.place is not None and (found.place.file, found.place.line) == (
        HERE.name,
        line_of(HERE, "counts"),
    )
    assert found.reasons[0] == "self.num == 0"


def test_dynamo_gives_up_after_eight_versions(watch: CompilationWatch) -> None:
    model = torch.compile(Counting(), backend="eager")
    steps(watch, lambda _: model(torch.ones(3)), ["warmup"] * 12)
    found = only(watch)
    assert found.gave_up
    assert (found.num_compiled, found.num_late_steps, found.late_s) == (8, 0, 0.0)


def test_what_our_own_steps_compile_is_not_the_jobs(watch: CompilationWatch) -> None:
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    labels = ["warmup", "half", "trimmed", "real", "real"]
    lengths = {0: 4, 1: 2, 2: 3, 3: 4, 4: 5}
    steps(watch, lambda number: double(torch.ones(lengths[number])), labels)
    found = only(watch)
    assert (found.num_compiled, found.num_recompiled, found.num_late_steps) == (2, 1, 1)
    assert found.reasons == ("tensor 'x' size mismatch at index 0. expected 4, actual 5",)
    compilation = watch.evidence(steps_s=1.5)
    assert compilation is not None and (compilation.num_steps, compilation.steps_s) == (2, 1.5)


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    print(end="")  # at: prints
    if y.sum() > 100:  # at: branches
        y = y + 1
    return y


def test_breaks_are_named_with_line_and_reason(watch: CompilationWatch) -> None:
    compiled = torch.compile(breaks, backend="eager")
    steps(watch, lambda _: compiled(torch.ones(3)), ["warmup", "real"])
    found = watch.evidence(steps_s=1.0)
    assert found is not None
    reasons = {each.place.line: each.reason for each in found.breaks}
    assert set(reasons) == {line_of(HERE, "prints"), line_of(HERE, "branches")}
    assert "print" in reasons[line_of(HERE, "prints")]
    assert reasons[line_of(HERE, "branches")] == "a branch depends on a tensor's value"


def test_breaks_of_torch_itself_are_not_the_jobs(watch: CompilationWatch) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step() -> None:
        parameter.sin().sum().backward()
        optimizer.step()

    compiled = torch.compile(step, backend="eager")
    steps(watch, lambda _: compiled(), ["warmup", "real"])
    found = watch.evidence(steps_s=1.0)
    assert found is not None and found.functions
    assert found.breaks == ()


def test_a_job_that_compiles_nothing_has_no_record(watch: CompilationWatch) -> None:
    watch.step_end("real")
    assert watch.evidence(steps_s=1.0) is None
