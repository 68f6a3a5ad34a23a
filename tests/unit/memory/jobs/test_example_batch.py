"""Batches of any size from one example, whatever it is made of."""

from __future__ import annotations

from collections import UserDict, deque
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.ground.errors import BadInput
from flatout.memory.jobs.example_batch import leading_size, maker_of, resize_batch, tensors_of


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    note: str = "kept"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor


def shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


@given(example_size=st.integers(1, 9), batch_size=st.integers(1, 40), width=st.integers(0, 5))
def test_rows_are_the_examples_own_over_and_over(example_size: int, batch_size: int, width: int) -> None:
    example = torch.arange(example_size * width).reshape(example_size, width)
    larger = resize_batch(example, batch_size=batch_size, example_size=example_size)
    assert tuple(larger.shape) == (batch_size, width)
    for row in range(batch_size):
        assert torch.equal(larger[row], example[row % example_size])


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(4, 3),
        {"x": torch.ones(4, 3), "y": torch.ones(4)},
        [torch.ones(4, 3), {"deep": (torch.ones(4),)}],
        Pair(torch.ones(4, 3), torch.ones(4)),
        Sample(torch.ones(4, 3)),
        UserDict({"x": torch.ones(4, 3)}),
        MappingProxyType({"x": torch.ones(4, 3)}),
        SimpleNamespace(x=torch.ones(4, 3), note="kept"),
        Frozen(torch.ones(4, 3)),
        deque([torch.ones(4, 3)]),
    ],
    ids=[
        *("tensor", "dict", "nested", "namedtuple", "dataclass", "mapping"),
        *("read-only mapping", "object", "frozen dataclass", "deque"),
    ],
)
def test_every_container_is_resized(batch: Any) -> None:
    make_batch, sizes = maker_of(batch)
    assert sizes == {"batch_size": 4}
    made = make_batch(batch_size=7)
    assert shapes(made) == [(7, *shape[1:]) for shape in shapes(batch)]
    assert type(made) is (dict if isinstance(batch, MappingProxyType) else type(batch))
    assert shapes(batch)[0][0] == 4  # the example stays as it is


def test_containers_keep_their_type_and_what_is_no_tensor() -> None:
    assert isinstance(resize_batch(Pair(torch.ones(2), torch.ones(2)), batch_size=3, example_size=2), Pair)
    sample = resize_batch(Sample(torch.ones(2)), batch_size=3, example_size=2)
    assert isinstance(sample, Sample) and sample.note == "kept"
    assert resize_batch({"name": "a", "n": 2}, batch_size=3, example_size=2) == {"name": "a", "n": 2}


def test_tensors_of_another_leading_size_stay() -> None:
    batch = {"x": torch.ones(4, 3), "y": torch.ones(4), "weights": torch.ones(10), "scale": torch.tensor(2.0)}
    make_batch, _ = maker_of(batch)
    assert shapes(make_batch(batch_size=6)) == [(6, 3), (6,), (10,), ()]


def test_the_batch_size_is_what_most_tensors_share_or_what_is_said() -> None:
    batch = [torch.ones(10), torch.ones(4, 3), torch.ones(4)]
    assert leading_size(batch) == 4
    make_batch, sizes = maker_of(batch, batch_size=10)
    assert sizes == {"batch_size": 10}
    assert shapes(make_batch(batch_size=2)) == [(2,), (4, 3), (4,)]
    with pytest.raises(BadInput, match="no tensor of the example batch has the leading size batch_size=5"):
        maker_of(batch, batch_size=5)


@pytest.mark.parametrize("batch", [None, {}, "text", torch.tensor(1.0)])
def test_an_example_without_rows_is_refused(batch: Any) -> None:
    with pytest.raises(BadInput, match="holds no tensor with a batch dimension"):
        maker_of(batch)


def test_a_batch_maker_declares_its_sizes_by_its_parameters() -> None:
    def make_batch(*, batch_size: int, length: int = 128, negatives: int = 4, shuffle: bool = True) -> Tensor:
        return torch.ones(batch_size * negatives, length)

    maker, sizes = maker_of(make_batch)
    assert sizes == {"batch_size": 8, "length": 128, "negatives": 4}
    assert tuple(maker(**sizes).shape) == (32, 128)


def test_a_batch_maker_of_one_parameter_gets_the_batch_size_there() -> None:
    maker, sizes = maker_of(lambda n: torch.ones(n, 2))
    assert sizes == {"batch_size": 8}
    assert len(maker(batch_size=3)) == 3


def test_a_batch_maker_of_any_sizes_starts_with_the_batch_size() -> None:
    maker, sizes = maker_of(lambda **sizes: torch.ones(sizes["batch_size"]))
    assert len(maker(**sizes)) == 8


def test_a_batch_maker_without_a_batch_size_or_with_an_unknown_size_is_refused() -> None:
    with pytest.raises(BadInput, match=r"takes \(rows, columns\), but no batch_size"):
        maker_of(lambda rows, columns: torch.ones(rows, columns, 2))
    with pytest.raises(BadInput, match="length have no default"):
        maker_of(lambda batch_size, length: torch.ones(batch_size, length, 2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_example_is_refused_with_a_way_on(layout: torch.layout) -> None:
    example = torch.nested.as_nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    with pytest.raises(BadInput, match=r"nested \(ragged\) tensors.* padded to the longest"):
        maker_of({"x": example})


def test_the_rows_of_a_sparse_example_are_not_repeated() -> None:
    with pytest.raises(BadInput, match="holds a sparse_coo tensor, whose rows cannot be repeated"):
        resize_batch(torch.eye(3).to_sparse(), batch_size=2, example_size=3)
