from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from flatout.measure.arms.arm import Arm
from flatout.measure.arms.batches.trimmed import NotPadded, PaddedBatch, Trimmed, propose, take_turns
from flatout.measure.loading.loaders import LoaderWatch

Keep = Callable[..., Iterator[Any]]
Block = Callable[[Arm], None]
LENGTHS = [9, 30, 12, 28, 10, 29, 14, 25]


def sentence(length: int, width: int) -> dict[str, torch.Tensor]:
    words = torch.arange(1, length + 1)
    return {
        "words": torch.nn.functional.pad(words, (0, width - length)),
        "mask": (torch.arange(width) < length).long(),
        "labels": torch.nn.functional.pad(words, (0, width - length), value=-100),
        "places": torch.arange(width),
        "length": torch.tensor(length),
    }


def serve(batches: Iterator[Any], arm: Trimmed, num: int, begin: Block, end: Block) -> list[Any]:
    begin(arm)
    served = [next(batches) for _ in range(num)]
    arm.step_end()
    end(arm)
    return served


def test_padding_that_all_rows_share_is_cut_off(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep
) -> None:
    data = [sentence(length, 64) for length in LENGTHS * 4]
    batches = keep(DataLoader(data, batch_size=4), 2)
    served = serve(batches, Trimmed(watch, to="longest", ragged=False, suspicion=0.1), 2, begin, end)
    assert [batch["words"].shape[1] for batch in served] == [31, 30]  # the longest row and one position
    for batch in served:
        width = batch["words"].shape[1]
        assert all(batch[name].shape == (4, width) for name in ("mask", "labels", "places"))
        assert batch["mask"].sum(1).tolist() == batch["length"].tolist()
    assert next(batches)["words"].shape[1] == 64


def test_page_locked_batches_stay_so(
    begin: Block, end: Block, keep: Keep, watch: LoaderWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.dim() == 2)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.shape) or tensor)
    batches = keep(DataLoader([sentence(length, 64) for length in LENGTHS * 4], batch_size=4), 1)
    serve(batches, Trimmed(watch, to="longest", ragged=False, suspicion=0.1), 1, begin, end)
    assert pinned == [(4, 31)] * 4


def test_batches_of_similar_length_hold_the_same_samples(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep
) -> None:
    data = [sentence(length, 64) for length in LENGTHS * 4]
    batches = keep(DataLoader(data, batch_size=4), 2)
    served = serve(batches, Trimmed(watch, to="similar", ragged=False, suspicion=0.1), 2, begin, end)
    lengths = [sorted(batch["length"].tolist()) for batch in served]
    assert sorted(lengths) == [sorted(LENGTHS)[:4], sorted(LENGTHS)[4:]]
    for batch in served:
        assert batch["words"].shape[1] == int(batch["length"].max()) + 1
        assert batch["mask"].sum(1).tolist() == batch["length"].tolist()
        assert (batch["words"] > 0).sum(1).tolist() == batch["length"].tolist()


def test_a_kept_row_stands_for_many_of_its_length(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep
) -> None:
    """A sampler that sorts a whole dataset makes batches of rows that are more alike than those kept."""
    data = [sentence(length, 64) for length in LENGTHS * 4]
    batches = keep(DataLoader(data, batch_size=4), 2)
    arm = Trimmed(watch, to="similar", ragged=False, alike=16, suspicion=0.1)
    served = serve(batches, arm, 2, begin, end)
    assert sorted(batch["length"].tolist() for batch in served) == [[10, 10, 12, 12], [28, 28, 29, 29]]


def test_batches_that_differ_in_width_are_sorted_together(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep
) -> None:
    samples = [torch.full((length, 3), float(length)) for length in LENGTHS * 2]
    loader = DataLoader(samples, batch_size=2, collate_fn=lambda rows: pad_sequence(rows, batch_first=True))
    batches = keep(loader, 4)
    arm = Trimmed(watch, to="similar", ragged=True, suspicion=0.1)
    served = serve(batches, arm, 4, begin, end)
    assert arm.refusal is None
    assert sorted(batch.shape[1] for batch in served) == [11, 15, 28, 30]  # 28 and 30 filled theirs
    assert sorted(batch.amax((1, 2)).tolist() for batch in served) == [[9, 10], [12, 14], [25, 28], [29, 30]]


@pytest.mark.parametrize(
    ("batch", "to", "reason"),
    [
        (torch.arange(1, 49).reshape(3, 16), "longest", "nothing can be cut off"),
        (torch.arange(1, 49).reshape(3, 16), "similar", "equally long"),
        (torch.zeros(3, 16, 16), "longest", "no padded sequences"),
        (["a", "b"], "longest", "more than tensors"),
    ],
    ids=["full", "equal", "images", "texts"],
)
def test_batches_without_padding_are_refused(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep, batch: Any, to: Any, reason: str
) -> None:
    keep(DataLoader([batch] * 8, batch_size=None), 2)
    arm = Trimmed(watch, to=to, ragged=False, suspicion=0.1)
    begin(arm)
    assert arm.refusal is not None and reason in arm.refusal
    end(arm)


@pytest.mark.parametrize("beside", [[5, 30], (5.0, 30.0), ["a", "b"], {"deeper": [5, 30]}])
def test_a_list_with_an_entry_for_each_sample_would_not_fit_other_rows(beside: Any) -> None:
    words = torch.stack([sentence(length, 40)["words"] for length in (5, 30)])
    assert PaddedBatch({"words": words}, ragged=False).width == 40
    with pytest.raises(NotPadded, match="an entry for each sample"):
        PaddedBatch({"words": words, "lengths": beside}, ragged=False)


def test_a_few_batches_in_a_row_are_as_wide_as_all() -> None:
    widths = [5, 6, 8, 11, 15, 22, 33, 60]
    turns = take_turns(widths)
    assert sorted(turns) == list(range(8))
    for num in (1, 2, 4, 7):
        timed = [widths[turn] for turn in turns[1 : 1 + num]]
        assert sum(timed) / num == pytest.approx(20, rel=0.15)


def test_padding_is_proposed_by_the_positions_it_takes(context: Any, keep: Keep) -> None:
    keep(DataLoader([sentence(length, 62) for length in LENGTHS * 2], batch_size=4), 2)
    arms = {arm.label: arm.suspicion for arm in propose(context(phases_s={"forward": 0.3, "backward": 0.5}))}
    assert arms["trimmed"] == pytest.approx(0.8 * (1 - (31 + 30) / 2 / 62))
    of_all_four = (11 + 15 + 29 + 31) / 4  # were all 16 rows sorted, of which 8 are kept
    assert arms["trimmed, similar lengths"] == pytest.approx(0.8 * (1 - of_all_four / 62))


def test_short_rows_become_batches_too_narrow_to_count_as_sequences(context: Any, keep: Keep) -> None:
    data = [sentence(length, 62) for length in [2, 3, 30, 31] * 4]
    keep(DataLoader(data, batch_size=4), 2)
    assert [arm.label for arm in propose(context(phases_s={"forward": 0.8}))] == [
        "trimmed",
        "trimmed, similar lengths",
    ]


def test_full_batches_are_not_proposed(context: Any, keep: Keep) -> None:
    assert not list(propose(context()))
    keep(DataLoader(torch.arange(1, 641).reshape(40, 16), batch_size=4), 2)
    assert not list(propose(context(phases_s={"forward": 0.8})))
