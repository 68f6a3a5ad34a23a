from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure import batches as of_batches
from flatout.measure.batches import KeptBatch, arrays_of, halve, is_array, map_arrays, num_bytes, num_rows


class Pair(NamedTuple):
    inputs: Any
    labels: Any


@dataclasses.dataclass(frozen=True)
class Record:
    tokens: Any
    name: str = "record"


class Encoding(collections.UserDict[str, Any]):
    """A mapping of its own type, as tokenizers return."""


class Graph:
    """A plain object that holds tensors, as graph libraries batch them."""

    def __init__(self, nodes: Any) -> None:
        self.nodes, self.num_graphs = nodes, 1


def arrays(rows: int) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(1, 3), max_size=2)
    tensor = shapes.map(
        lambda shape: torch.arange(rows * int(np.prod(shape, dtype=int))).reshape(rows, *shape)
    )
    return st.one_of(tensor, tensor.map(lambda each: each.numpy().copy()))


def batches(rows: int) -> st.SearchStrategy[Any]:
    """Structures whose every array has `rows` rows, with constants among them."""
    leaf = arrays(rows)
    constant = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.just(torch.tensor(1.0)))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(inner, st.one_of(inner, constant)),
            st.lists(inner, min_size=1, max_size=3),
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
            st.builds(Pair, inner, inner),
            st.builds(Record, inner),
            inner.map(lambda item: Encoding(ids=item)),
            leaf.map(Graph),
        ),
        max_leaves=4,
    )


sized = st.integers(4, 12).flatmap(lambda rows: st.tuples(st.just(rows), batches(rows)))


def skeleton(value: Any) -> Any:
    """The structure with arrays reduced to their kind and shape past the rows."""
    if is_array(value):
        return (type(value).__name__, str(value.dtype), tuple(value.shape[1:]), len(value.shape))
    if isinstance(value, (dict, Encoding)):
        return (type(value).__name__, [(key, skeleton(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [skeleton(item) for item in value])
    if isinstance(value, (Record, Graph)):
        return (type(value).__name__, [(key, skeleton(item)) for key, item in vars(value).items()])
    return value


def same(one: Any, other: Any) -> bool:
    return torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def equal(one: Any, other: Any) -> bool:
    pairs = list(zip(arrays_of(one), arrays_of(other), strict=True))
    return skeleton(one) == skeleton(other) and all(same(a, b) for a, b in pairs)


@given(sized)
def test_half_of_a_batch_has_its_structure_and_the_first_half_of_its_rows(made: tuple[int, Any]) -> None:
    rows, batch = made
    before = [copy.deepcopy(array) for array in arrays_of(batch)]
    half = halve(batch, rows)
    assert skeleton(half) == skeleton(batch)
    for whole, cut in zip(arrays_of(batch), arrays_of(half), strict=True):
        if len(whole.shape) == 0:
            assert whole is cut
        else:
            assert cut.shape[0] == rows // 2
            assert same(whole[: rows // 2], cut)
    assert all(same(a, b) for a, b in zip(before, arrays_of(batch), strict=True))


@given(made=sized, copies=st.booleans())
def test_the_served_batch_equals_the_kept_one(made: tuple[int, Any], copies: bool) -> None:
    _rows, batch = made
    kept = KeptBatch(batch, copies=copies)
    assert equal(kept.serve(), batch)
    assert equal(kept.serve(), batch)
    assert not kept.changed


def test_keeping_copies_no_bytes_of_tensors() -> None:
    x = torch.ones(4, requires_grad=True)
    served = KeptBatch({"x": x}).serve()
    assert served is not None
    assert served["x"].data_ptr() == x.data_ptr()
    assert served["x"] is not x
    assert served["x"].requires_grad


@given(sized)
def test_rows_and_bytes_of_any_structure(made: tuple[int, Any]) -> None:
    rows, batch = made
    assert num_rows(batch) == num_rows(batch, rows) == rows
    assert num_bytes(batch) == sum(array.nbytes for array in arrays_of(batch))


CHANGES = {
    "add_": lambda batch: batch["x"].add_(1),
    "setitem": lambda batch: batch["x"].__setitem__(0, 5.0),
    "view": lambda batch: batch["x"][1:].zero_(),
    "detached": lambda batch: batch["x"].detach().mul_(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tensor_changed_in_place_is_not_served_again(change: Any) -> None:
    given_out = {"x": torch.ones(4, 2), "y": torch.ones(4)}
    kept = KeptBatch(given_out)
    change(given_out)
    assert kept.changed
    assert kept.serve() is None


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_batch_kept_as_a_copy_is_served_as_it_was(change: Any) -> None:
    given_out = {"x": torch.ones(4, 2), "y": torch.ones(4)}
    kept = KeptBatch(given_out, copies=True)
    change(given_out)
    change(kept.serve())
    served = kept.serve()
    assert served is not None
    assert torch.equal(served["x"], torch.ones(4, 2))


def test_arrays_without_a_version_are_kept_apart_from_the_script() -> None:
    given_out = {"x": np.ones(4)}
    kept = KeptBatch(given_out)
    given_out["x"][0] = 5.0
    first = kept.serve()
    assert first is not None
    first["x"][1] = 5.0
    second = kept.serve()
    assert second is not None
    assert second["x"].tolist() == [1.0] * 4


def test_what_the_script_does_to_a_handle_stays_with_it() -> None:
    x = torch.ones(4)
    kept = KeptBatch([x])
    x.requires_grad_().unsqueeze(0)
    served = kept.serve()
    assert served is not None
    assert not served[0].requires_grad
    assert served[0].shape == (4,)


def test_inference_tensors_can_be_kept() -> None:
    with torch.inference_mode():
        x = torch.ones(4)
    served = KeptBatch([x]).serve()
    assert served is not None
    assert torch.equal(served[0], x)


def test_a_script_may_do_anything_to_the_structure() -> None:
    given_out: dict[str, Any] = {"x": torch.ones(4), "labels": [torch.ones(4)], "name": "a"}
    kept = KeptBatch(given_out)
    del given_out["x"]
    given_out["labels"].clear()
    given_out["extra"] = 1
    first = kept.serve()
    assert first is not None
    first.clear()
    second = kept.serve()
    assert second is not None
    assert sorted(second) == ["labels", "name", "x"]
    assert len(second["labels"]) == 1


def test_a_frozen_dataclass_is_copied_and_its_constants_stay() -> None:
    half = halve(Record(tokens=torch.arange(8)), 8)
    assert isinstance(half, Record)
    assert half.tokens.tolist() == [0, 1, 2, 3]
    assert half.name == "record"


def test_one_entry_per_sample_is_cut_with_the_rows() -> None:
    batch = {"x": torch.zeros(6, 3), "texts": list("abcdef"), "lengths": (1, 2, 3, 4, 5, 6)}
    half = halve(batch, 6)
    assert half is not None
    assert half["texts"] == ["a", "b", "c"]
    assert half["lengths"] == (1, 2, 3)


def test_as_many_columns_as_rows_are_not_taken_for_samples() -> None:
    columns = [torch.zeros(4), torch.ones(4), torch.zeros(4, 2), torch.ones(4, 3)]
    half = halve(columns, 4)
    assert half is not None
    assert [len(column) for column in half] == [2, 2, 2, 2]


def test_samples_that_were_never_stacked_are_counted_by_the_list_that_holds_them() -> None:
    """Detection models take lists of images: the channels are not the rows."""
    images = [torch.zeros(5, 8, 8) for _ in range(6)]
    targets = [{"boxes": torch.zeros(i + 1, 4)} for i in (1, 2, 6, 7, 8, 9)]
    assert num_rows((images, targets), 6) == 6
    half = halve((images, targets), 6)
    assert half is not None
    assert [len(part) for part in half] == [3, 3]
    assert half[0][0].shape == (5, 8, 8)


def test_the_last_batch_of_an_epoch_is_smaller_than_the_loader_says() -> None:
    assert num_rows({"x": torch.zeros(5, 2), "y": torch.zeros(5)}, 32) == 5


@pytest.mark.parametrize("batch", [torch.zeros(3, 2), torch.tensor(1.0), "text", None, {"n": 3}, []])
def test_a_batch_without_rows_to_spare_cannot_be_halved(batch: Any) -> None:
    assert halve(batch) is None


def test_lists_of_tokens_are_copied_whole_and_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {"ids": [[1, 2, 3], [4, 5, 6]], "words": ["a", "b"], "mask": (True, False)}
    looked_at: list[Any] = []
    monkeypatch.setattr(of_batches, "is_array", looked_at.append)
    kept = KeptBatch(tokens)
    served = kept.serve()
    assert served == tokens
    served["ids"][0].append(7)
    assert kept.serve() == tokens
    assert not any(isinstance(value, (int, str)) for value in looked_at)


def test_structures_deeper_than_any_batch_are_left_alone() -> None:
    deep: Any = torch.zeros(4)
    for _ in range(20):
        deep = [deep]
    assert arrays_of(deep) == []
    assert map_arrays(deep, lambda array: None) is not None


def test_a_sparse_tensor_takes_the_bytes_of_its_values() -> None:
    assert of_batches.bytes_of(torch.eye(3).to_sparse()) == 3 * 4
    assert of_batches.bytes_of(torch.eye(3)) == 9 * 4
