from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flatout.measure.arms.knock_out.blocks import Block
from flatout.measure.arms.knock_out.kept_results import KeptResults

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: Any
    hidden: Any = None


def results(book_out: Any = lambda spent_s: None, **fields: Any) -> KeptResults:
    block = {"first_line": 1, "last_line": 1, "start": (1, 0), "num_statements": 1, "is_tail": True}
    made = Block(**{**block, "results": (), "inputs": ("x",), **fields})
    return KeptResults(made, owner=threading.get_ident, book_out=book_out)


def call(kept: KeptResults, x: Any, compute: Any) -> Any:
    """A rewritten function whose whole body is `compute`."""
    if kept.is_free():
        kept.give()
        return kept.give_returned()
    return kept.note_returned(compute(x))


def next_step(kept: KeptResults) -> None:
    kept.reset()
    kept.giving = True


def test_each_call_of_a_step_is_given_its_own_result() -> None:
    kept = results()
    ran: list[int] = []

    def compute(x: Any) -> Any:
        ran.append(1)
        return x + len(ran)

    first = [call(kept, torch.zeros(2), compute) for _ in range(3)]
    next_step(kept)
    given = [call(kept, torch.zeros(2), compute) for _ in range(3)]
    assert len(ran) == 3 and [each.tolist() for each in given] == [each.tolist() for each in first]
    call(kept, torch.zeros(2), compute)  # a fourth one was never seen
    assert len(ran) == 4 and kept.num_unknown == 1


def test_a_block_inside_a_transform_runs_and_is_refused() -> None:
    """`torch.func.grad` gets no gradient through what is given in place of the block."""
    kept = results()
    x = torch.ones(2)
    for _ in range(2):
        gradient = torch.func.grad(lambda x: call(kept, x, lambda x: (x**2).sum()))(x)
        assert gradient.tolist() == [2.0, 2.0]
        next_step(kept)
    assert kept.failure == "it runs inside a transform of torch.func"
    assert not kept.are_known


def test_looking_a_result_up_is_not_counted_and_computing_it_is() -> None:
    booked_s: list[float] = []
    kept = results(booked_s.append)
    call(kept, torch.zeros(2), torch.exp)
    assert booked_s == []
    next_step(kept)
    call(kept, torch.zeros(2), torch.exp)
    assert len(booked_s) == 3 and min(booked_s) >= 0.0  # asked whether it is free, and given twice


def test_inputs_of_another_shape_run_the_block_and_are_known_from_then_on() -> None:
    kept = results()
    call(kept, torch.zeros(2), torch.exp)
    next_step(kept)
    assert call(kept, torch.zeros(3), torch.exp).shape == (3,)
    assert kept.num_unknown == 1
    next_step(kept)
    assert call(kept, torch.zeros(3), lambda x: pytest.fail("known")).shape == (3,)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_an_evaluation_computed_does_not_serve_training(mode: Any) -> None:
    kept, weight = results(), torch.ones(2, requires_grad=True)
    with mode():
        call(kept, torch.ones(2), lambda x: x * weight)
    next_step(kept)
    product = (
        call(kept, torch.ones(2), lambda x: x * weight) * weight
    )  # saves the block's result for backward
    product.sum().backward()
    assert weight.grad is not None and kept.num_unknown == 1
    next_step(kept)
    assert call(kept, torch.ones(2), lambda x: pytest.fail("known")).requires_grad
    next_step(kept)
    with mode():
        assert not call(kept, torch.ones(2), lambda x: pytest.fail("known")).requires_grad


def test_a_tensor_that_the_block_writes_into_has_gradients_from_then_on() -> None:
    """`out = zeros(...); out[mask] = layer(x)`: what follows takes the gradient of `out`."""
    kept, x = results(results=("out",), inputs=("out", "x")), torch.ones(2, requires_grad=True)

    def step() -> Any:
        out = torch.zeros(3)
        if kept.is_free():
            (out,) = kept.give()
        else:
            out[:2] = 3 * x
            kept.note()
        return out

    expected = step().detach()
    next_step(kept)
    given = step()
    assert given.tolist() == expected.tolist()
    given.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0]


@pytest.mark.parametrize("names", [("batch",), ()])
def test_an_input_that_the_block_fills_in_place_is_filled(names: tuple[str, ...]) -> None:
    """`batch = empty(...); batch[i] = row`, or `batch.copy_(rows)`: new memory holds anything."""
    kept = results(results=names, inputs=("batch",))

    def step(batch: Any) -> Any:
        before = batch
        if kept.is_free():
            given = kept.give()
            batch = given[0] if given else batch
        else:
            batch[0] = 3
            kept.note()
        assert batch is before
        return batch

    step(torch.zeros(2, dtype=torch.long))
    next_step(kept)
    assert step(torch.full((2,), 99)).tolist() == [3, 0]


def test_a_buffer_that_the_block_goes_on_with_is_left_as_it_is() -> None:
    kept, average = results(inputs=("average",)), torch.ones(2)

    def step() -> None:
        if kept.is_free():
            kept.give()
        else:
            average.mul_(0.5)
            kept.note()

    step()
    next_step(kept)
    step()
    assert average.tolist() == [0.5, 0.5]


def test_results_of_inputs_without_a_shape_are_kept_in_two_steps() -> None:
    """A list of graphs, each with its own number of nodes."""

    def step(kept: KeptResults, *sizes: int) -> None:
        call(kept, [Output(torch.ones(size)) for size in sizes], lambda x: torch.cat([g.logits for g in x]))
        kept.reset()
        kept.num_steps += 1

    same, other, plain = results(), results(), results()
    for kept, sizes in ((same, (2, 3)), (other, (3, 3))):
        step(kept, 2, 3)
        assert not kept.are_known
        step(kept, *sizes)
    assert same.are_known and same.failure is None
    assert other.failure == "its results change their shapes from step to step"
    call(plain, [torch.ones(2), 3], lambda x: x[0])
    plain.num_steps += 1
    assert plain.are_known
    on_one_batch = results()
    on_one_batch.on_one_batch = True
    step(on_one_batch, 2, 3)
    assert on_one_batch.are_known


def test_a_result_that_only_parameters_give_gradients_may_be_changed_in_place() -> None:
    kept, weight = results(), torch.ones(2, requires_grad=True)
    call(kept, torch.zeros(2), lambda x: x + weight)
    next_step(kept)
    given = call(kept, torch.zeros(2), torch.exp)
    given.add_(1).sum().backward()
    assert given.tolist() == [2, 2] and weight.grad is None


def test_gradients_of_zero_flow_on_to_the_inputs_and_none_inside() -> None:
    kept, weight = results(), torch.ones(2, requires_grad=True)
    source = torch.ones(2, requires_grad=True)
    call(kept, source * 2, lambda x: x * weight).sum().backward()
    assert source.grad is not None and weight.grad is not None
    next_step(kept)
    source.grad = weight.grad = None
    given = call(kept, source * 2, lambda x: pytest.fail("known"))
    torch.relu_(given).sum().backward()  # what stands in may be changed in place
    assert source.grad.tolist() == [0.0, 0.0] and weight.grad is None


def test_a_result_without_differentiable_inputs_still_has_a_backward_pass() -> None:
    kept, weight = results(), torch.ones(2, requires_grad=True)
    call(kept, torch.ones(2), lambda x: x * weight)
    next_step(kept)
    given = call(kept, torch.ones(2), lambda x: pytest.fail("known"))
    given.sum().backward()


@pytest.mark.parametrize(
    "value",
    [
        7,
        None,
        "text",
        [torch.ones(2), 3],
        {"loss": torch.ones(1)},
        OrderedDict(loss=torch.ones(1)),
        Pair(torch.ones(1), 2),
        Output(torch.ones(2), (torch.ones(1),)),
        torch.float32,
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_and_collections_of_tensors_are_kept(value: Any) -> None:
    kept = results()
    call(kept, torch.ones(2), lambda x: value)
    next_step(kept)
    given = call(kept, torch.ones(2), lambda x: pytest.fail("known"))
    assert type(given) is type(value) and repr(given) == repr(value)
    assert kept.failure is None


def test_other_objects_are_named_and_the_block_runs_on() -> None:
    kept = results()
    call(kept, torch.ones(2), lambda x: torch.distributions.Normal(x, x))
    assert kept.failure == "its result what it returns is a Normal, not a tensor or a plain value"
    next_step(kept)
    assert call(kept, torch.ones(2), lambda x: "ran") == "ran"


def test_a_result_that_is_an_input_is_the_input_of_this_step() -> None:
    kept = results()
    call(kept, torch.zeros(2), lambda x: (x, x + 1))
    next_step(kept)
    x = torch.full((2,), 5.0)
    same, other = call(kept, x, lambda x: pytest.fail("known"))
    assert same is x and other.tolist() == [1.0, 1.0]


def test_bound_names_and_attributes_are_read_from_the_frame() -> None:
    kept = KeptResults(
        Block(
            first_line=1, last_line=1, start=(1, 0), num_statements=1, is_tail=False,
            results=("self.__state", "y", "never"), inputs=("x",),
        ),
        owner=threading.get_ident,
        function="_Model.forward",
    )  # fmt: skip

    class Holder:
        _Model__state = 3

    def function(self: Any, x: Any) -> Any:
        if kept.is_free():
            return kept.give()
        y = x + 1
        kept.note()
        return y

    function(Holder(), torch.zeros(1))
    next_step(kept)
    state, y, never = function(Holder(), torch.zeros(1))
    assert (state, y.tolist(), never) == (3, [1.0], None)


def test_a_function_that_calls_itself_is_one_call() -> None:
    kept = results(inputs=())

    def countdown(number: int) -> int:
        if kept.is_free():
            kept.give()
            return int(kept.give_returned())
        return int(kept.note_returned(0 if number == 0 else 1 + countdown(number - 1)))

    assert [countdown(3), countdown(2)] == [3, 2]
    next_step(kept)
    assert [countdown(9), countdown(9)] == [3, 2]


def test_other_threads_run_the_block() -> None:
    kept = results()
    call(kept, torch.zeros(1), torch.exp)
    next_step(kept)
    ran: list[Any] = []
    thread = threading.Thread(target=lambda: ran.append(call(kept, torch.zeros(1), lambda x: "ran")))
    owner = threading.get_ident()
    kept._owner = lambda: owner
    thread.start()
    thread.join()
    assert ran == ["ran"] and kept.num_calls == 0


def test_inputs_and_results_are_weighed() -> None:
    kept = results()
    call(kept, torch.zeros(2, requires_grad=True), lambda x: x.repeat(3))
    assert (kept.num_bytes, kept.requires_grad) == (4 * (2 + 6), True)


def test_sparse_tensors_go_in_and_come_out() -> None:
    kept = results()
    graph = torch.eye(3).to_sparse()
    call(kept, graph, lambda x: x @ torch.ones(3, 1))
    next_step(kept)
    assert call(kept, graph, torch.neg).tolist() == [[1.0], [1.0], [1.0]]
    assert kept.num_bytes == 2 * 3 * 4
