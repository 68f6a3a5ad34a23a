from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.planner.config.lengths import SequenceLengths, read_lengths, with_lengths
from tests.support import planner as plans


def read(folder: Path, text: str) -> dict[int, int]:
    path = folder / "lengths"
    path.write_text(text)
    return dict(read_lengths(path).counts)


@pytest.mark.parametrize(
    "text",
    [
        "12\n40\n12\n",
        "12\r\n40\r\n\r\n12",
        "length,count\n12,2\n40,1\n",
        "12 2\n40\t1  # the rest\n",
        "[12, 40, 12]",
        '{"12": 2, "40": 1}',
        "\ufeff12;2\n40;1",
    ],
)
def test_every_way_to_write_lengths(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text) == {12: 2, 40: 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no sequence"),
        ("length\n", "holds no sequence"),
        ("5,0\n", "holds no sequence"),
        ("12\nlong\n", "line 2: 'long' is not a length"),
        ("12,3,4\n", "line 1: '12,3,4' is not a length"),
        ("0\n", "length 0 occurs 1 times"),
        ("[1.5]", "1.5: 1 is not a length"),
        ('{"12": "2"}', "'12': '2' is not a length"),
        ("[12", "not valid JSON: line 1"),
    ],
)
def test_what_is_no_file_of_lengths_is_said_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as error:
        read(tmp_path, text)
    assert words in error.value.message


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_lengths(tmp_path / "absent")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="is not text"):
        read_lengths(tmp_path / "bytes")


@given(
    counts=st.dictionaries(st.integers(1, 2000), st.integers(0, 50), min_size=1).filter(
        lambda counts: any(counts.values())
    ),
    batch_size=st.integers(1, 256),
)
def test_larger_batches_are_longer_and_never_above_the_longest(
    counts: dict[int, int], batch_size: int
) -> None:
    lengths = SequenceLengths(source="a test", counts=counts)
    one, many = lengths.of_batches(1), lengths.of_batches(batch_size)
    assert list(one.within.values()) == sorted(one.within.values())
    assert all(many.within[share] >= length for share, length in one.within.items())
    assert max(many.within.values()) <= lengths.longest
    assert one.longest_share <= many.longest_share + 1e-12 <= 1 + 1e-9


def test_the_share_of_batches_is_that_of_drawing_rows() -> None:
    found = SequenceLengths(source="a test", counts={10: 90, 100: 10}).of_batches(8)
    assert found.within == {"50 %": 100, "90 %": 100, "99 %": 100}
    assert found.longest_share == pytest.approx(1 - 0.9**8)
    assert SequenceLengths(source="a test", counts={10: 90, 100: 10}).of_batches(1).within["90 %"] == 10


def test_the_longest_is_the_length_of_every_stage_unless_it_is_cut() -> None:
    lengths = SequenceLengths(source="lengths.txt", counts={10: 3, 700: 1})
    cut, free = plans.stage(name="01", sizes={"length": 512}), plans.stage(name="02")
    found = with_lengths(plans.settings(cut, free), lengths, job_sizes={"batch_size": 8, "length": 128})
    one, two = (stage.sizes["length"] for stage in found.stages)
    assert (one.value, one.place) == (512, None)
    assert one.source == "the longest of 4 in lengths.txt, cut at length"
    assert (two.value, two.source) == (700, "the longest of 4 in lengths.txt")


def test_a_job_without_a_length_is_told() -> None:
    lengths = SequenceLengths(source="lengths.txt", counts={10: 3})
    with pytest.raises(BadInput, match=r"no size 'length' .*batch_size, width"):
        with_lengths(plans.settings(), lengths, job_sizes={"batch_size": 8, "width": 4})


def test_the_document() -> None:
    document = SequenceLengths(source="lengths.txt", counts={10: 1, 20: 1}).to_json([4, 4, 8])
    assert (document["num_sequences"], document["longest"]) == (2, 20)
    assert [batches["batch_size"] for batches in document["batches"]] == [4, 8]
