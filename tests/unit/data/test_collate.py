from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate

from flatout.data import Pad, PadCollate, Padded
from flatout.ground.errors import BadInput


class Pair(NamedTuple):
    inputs: Any
    label: Any


def sample(length: int, number: int = 0) -> dict[str, Any]:
    return {
        "tokens": np.arange(length) + number,
        "context": {"states": np.full((length + 1, 2), number, np.float32), "done": bool(number % 2)},
        "pair": (torch.full((length,), float(number)), [number] * length),
        "label": number,
        "weight": 0.5 * number,
        "name": f"sample {number}",
    }


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_a_nested_sample_field_by_field(lengths: list[int]) -> None:
    samples = [sample(length, number) for number, length in enumerate(lengths)]
    batch = PadCollate({"tokens": Pad(value=-1, side="left")})(samples)
    longest = max(lengths)
    assert list(batch) == list(samples[0])
    for number, length in enumerate(lengths):
        one = samples[number]
        assert batch["tokens"][number].tolist() == [-1] * (longest - length) + one["tokens"].tolist()
        states = batch["context"]["states"][number]
        assert states[: length + 1].tolist() == one["context"]["states"].tolist()
        assert not states[length + 1 :].any()
        for part in (0, 1):
            values = batch["pair"][part][number].tolist()
            assert values == [number] * length + [0] * (longest - length)
    assert batch["label"].tolist() == list(range(len(lengths))) and batch["label"].dtype == torch.int64
    assert batch["weight"].dtype == torch.float64
    assert batch["context"]["done"].dtype == torch.bool
    assert batch["name"] == [one["name"] for one in samples]


@given(
    rows=st.integers(1, 5),
    length=st.integers(1, 5),
    kind=st.sampled_from([np.int64, np.float32, np.float64, np.uint8]),
    as_tensors=st.booleans(),
)
def test_samples_of_equal_length_give_what_default_collate_gives(
    rows: int, length: int, kind: Any, as_tensors: bool
) -> None:
    arrays = [np.full((length, 3), i, kind) for i in range(rows)]
    values: list[Any] = [torch.from_numpy(array) for array in arrays] if as_tensors else list(arrays)
    samples = [Pair(value, {"y": i, "z": float(i), "s": "a", "n": kind(i)}) for i, value in enumerate(values)]
    ours, theirs = PadCollate()(samples), default_collate(samples)
    assert type(ours) is Pair
    assert torch.equal(ours.inputs, theirs.inputs) and ours.inputs.dtype == theirs.inputs.dtype
    assert ours.label.keys() == theirs.label.keys()
    for name in ("y", "z", "n"):
        assert torch.equal(ours.label[name], theirs.label[name])
        assert ours.label[name].dtype == theirs.label[name].dtype
    assert ours.label["s"] == theirs.label["s"]


def test_lengths_and_masks_get_names_in_a_dict() -> None:
    collate = PadCollate({"x": Pad(lengths="num_x", mask="mask", multiple=4, side="left")})
    batch = collate([{"x": np.ones(2)}, {"x": np.ones(3)}])
    assert batch["num_x"].tolist() == [2, 3]
    assert batch["mask"].tolist() == [[False, False, True, True], [False, True, True, True]]
    assert torch.equal(batch["mask"], batch["x"] == 1)


def test_lengths_and_masks_come_with_the_field_elsewhere() -> None:
    values, labels = PadCollate({"0": Pad(lengths=True)})([(np.ones(2), 1), (np.ones(3), 2)])
    assert isinstance(values, Padded)
    assert values.lengths is not None and values.lengths.tolist() == [2, 3]
    assert values.mask is None and labels.tolist() == [1, 2]
    bare = PadCollate(default=Pad(mask=True))([torch.ones(1), torch.ones(2)])
    assert bare.mask.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": 1}, {"y": 1}], "sample 1 lacks field 'x', which sample 0 has"),
        ([{"x": 1}, {"x": 1, "y": 2}], "sample 1 has field 'y', which sample 0 lacks"),
        ([{"a": {"x": 1}}, {"a": {}}], "sample 1 lacks field 'x' in 'a', which sample 0 has"),
        ([{"x": 1}, 5], "the value of sample 1 is a int, of sample 0 a dict"),
        ([(1, 2), (1,)], "the value of sample 1 is a tuple of 1, of sample 0 a tuple of 2"),
        ([{"x": np.ones(2)}, {"x": torch.ones(2)}], "field 'x' of sample 1 is a tensor of shape"),
        ([{"x": np.ones(2)}, {"x": None}], "field 'x' of sample 1 is a NoneType"),
        ([{"x": 1}, {"x": "one"}], "field 'x' of sample 1 is a str, of sample 0 a int"),
        ([{"x": [1]}, {"x": np.ones(1)}], "field 'x' of sample 1 is an array of shape"),
        ([{"x": object()}], "field 'x' of sample 0 is a object, which cannot be batched"),
        ([], "there are no samples"),
    ],
)
def test_an_error_names_the_sample_and_the_field(samples: list[Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        PadCollate()(samples)


def test_a_named_field_that_no_sample_has() -> None:
    with pytest.raises(BadInput, match="no field 'tokns' in the samples"):
        PadCollate({"tokns": Pad()})([{"tokens": np.ones(2)}])


def test_names_need_a_dict_and_a_free_place() -> None:
    with pytest.raises(BadInput, match="names in dicts only"):
        PadCollate({"0": Pad(lengths="n")})([(np.ones(2),)])
    with pytest.raises(BadInput, match="there is a field 'y' already"):
        PadCollate({"x": Pad(mask="y")})([{"x": np.ones(2), "y": 1}])
    with pytest.raises(BadInput, match="reuse=-1"):
        PadCollate(reuse=-1)


def test_scalars_may_be_arrays_or_tensors_and_take_a_dtype() -> None:
    collate = PadCollate({"a": Pad(dtype=torch.float32), "b": Pad(dtype=torch.int32)}, reuse=1)
    batch = collate(
        [{"a": np.float64(1.5), "b": torch.tensor(3)}, {"a": np.float64(2), "b": torch.tensor(4)}]
    )
    assert batch["a"].dtype == torch.float32 and batch["a"].tolist() == [1.5, 2]
    assert batch["b"].dtype == torch.int32 and batch["b"].tolist() == [3, 4]


def test_tensors_of_one_number_keep_their_value_beside_other_kinds() -> None:
    batch = PadCollate()([(torch.tensor(1), torch.tensor(2.5)), (torch.tensor(1.5), 3), (2, np.float64(0.1))])
    assert batch[0].tolist() == [1, 1.5, 2]
    assert batch[1].dtype == torch.float64 and batch[1].tolist() == [2.5, 3, 0.1]


def test_a_kept_batch_is_never_overwritten() -> None:
    collate = PadCollate(reuse=2)
    kept = [collate([{"x": np.full(4, number)}, {"x": np.full(2, number)}]) for number in range(6)]
    for number, batch in enumerate(kept):
        assert batch["x"].tolist() == [[number] * 4, [number, number, 0, 0]]
    first = kept[0]["x"]
    kept.clear()
    collate([{"x": np.full(4, 9)}])
    assert first.tolist() == [[0] * 4, [0] * 4]


def test_it_travels_to_another_process() -> None:
    collate = PadCollate({"x": Pad(value=7)}, reuse=2)
    collate([{"x": np.ones(2)}, {"x": np.ones(1)}])
    twin = pickle.loads(pickle.dumps(collate))  # noqa: S301
    assert twin([{"x": np.ones(2)}, {"x": np.ones(1)}])["x"].tolist() == [[1, 1], [1, 7]]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_inside_a_loader_with_workers(context: str) -> None:
    samples: Any = [{"x": np.full(1 + i % 3, i), "y": i, "l": [i] * (i % 2)} for i in range(9)]
    collate = PadCollate({"x": Pad(value=-1, lengths="n")}, pinned=True, reuse=2)
    loader: Any = DataLoader(
        samples, batch_size=4, num_workers=1, collate_fn=collate, multiprocessing_context=context
    )
    here: Any = DataLoader(samples, batch_size=4, collate_fn=collate)
    for ours, theirs in zip(loader, here, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert all(values.is_shared() for values in ours.values() if values.numel())


def test_an_error_in_a_worker_names_the_sample() -> None:
    samples: Any = [{"x": np.ones(2)}, {"z": np.ones(2)}]
    loader: Any = DataLoader(samples, batch_size=2, num_workers=1, collate_fn=PadCollate())
    with pytest.raises(BadInput, match="sample 1 lacks field 'x'"):
        list(loader)
