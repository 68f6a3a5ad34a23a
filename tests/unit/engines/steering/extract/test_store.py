"""A store under real processes: two at once, one killed in the middle of a shard, budgets and tiers."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from flatout.engines.steering.extract.store import ActivationStore, Origin, storing_pays
from flatout.engines.steering.extract.store_index import Shard
from flatout.engines.steering.extract.tiers import Tier
from flatout.ground.errors import BadInput
from tests.support.warm_python import warm

SPACE = Origin(weights="w", tokenizer="t", position="last", dtype="float32")
LAYERS = (0, 2)

# Writes shards of one text each, says so, and with "die" is killed while it writes the one after the last.
WRITER = """
import os, signal, sys
import torch
from tests.unit.engines.steering.extract.test_store import LAYERS, SPACE, key, rows
from flatout.engines.steering.extract.store import ActivationStore
folder, first, last, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = ActivationStore(folder)
for number in range(first, last):
    store.put(SPACE, keys=[key(number)], layers=LAYERS, values=rows([number]))
    print(number, flush=True)
if end == "die":
    written = os.write
    def half(handle, content):
        written(handle, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    os.write = half
    store.put(SPACE, keys=[key(last)], layers=LAYERS, values=rows([last]))
"""


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def rows(numbers: list[int]) -> Tensor:
    """[texts, layers, 3], different everywhere."""
    return torch.tensor(
        [[[number + layer / 10 + at for at in range(3)] for layer in LAYERS] for number in numbers]
    )


def shards(store: ActivationStore) -> list[Shard]:
    store.index.refresh()
    return store.index.shards()


def unreadable(store: ActivationStore) -> list[str]:
    store.index.refresh()
    read = {shard.path.name for shard in store.index.shards()}
    return sorted(path.name for path in store.folder.glob("*.safetensors") if path.name not in read)


def put(store: ActivationStore, *numbers: int, space: Origin = SPACE) -> Path:
    return store.put(space, keys=[key(one) for one in numbers], layers=LAYERS, values=rows(list(numbers)))


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [warm().bin / "python", "-c", WRITER, str(folder), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_rows_are_found_by_their_content_across_shards(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path)
    put(store, 1, 2, 3)
    put(store, 4)
    found = store.read(SPACE, keys=[key(4), key(9), key(2), key(2)], layers=(2, 0))
    assert found.places == (0, 2, 3)
    assert torch.equal(found.values, rows([4, 2, 2]).flip(1))
    assert len(shards(store)) == 2


@pytest.mark.parametrize("part", ["weights", "tokenizer", "position", "dtype"])
def test_every_part_of_the_space_is_part_of_the_key(tmp_path: Path, part: str) -> None:
    store = ActivationStore(tmp_path)
    put(store, 1)
    other = dataclasses.replace(SPACE, **{part: "other"})
    assert store.read(other, keys=[key(1)], layers=LAYERS).places == ()
    assert store.read(SPACE, keys=[key(1)], layers=LAYERS).places == (0,)


def test_layers_may_lie_in_different_shards_but_must_all_be_there(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path)
    store.put(SPACE, keys=[key(1)], layers=[0], values=rows([1])[:, :1])
    assert store.read(SPACE, keys=[key(1)], layers=LAYERS).places == ()
    store.put(SPACE, keys=[key(1)], layers=[2], values=rows([1])[:, 1:])
    assert torch.equal(store.read(SPACE, keys=[key(1)], layers=LAYERS).values, rows([1]))


def test_half_precision_keeps_its_bits(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path)
    values = torch.randn(1, 2, 8).bfloat16()
    store.put(SPACE, keys=[key(1)], layers=LAYERS, values=values)
    found = store.read(SPACE, keys=[key(1)], layers=LAYERS).values
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, values)


def test_two_processes_write_at_once_while_a_third_reads_and_one_is_killed(tmp_path: Path) -> None:
    reader = ActivationStore(tmp_path)
    writers = [start(tmp_path, 0, 20, "end"), start(tmp_path, 20, 40, "end"), start(tmp_path, 40, 45, "die")]
    finished: list[int] = []
    for line in writers[0].stdout or ():  # what a writer has finished is there at once, and whole
        finished.append(int(line))
        found = reader.read(SPACE, keys=[key(one) for one in finished], layers=LAYERS)
        assert torch.equal(found.values, rows(finished))
    for writer in writers:
        writer.communicate()
    assert [writer.returncode for writer in writers] == [0, 0, -signal.SIGKILL]
    store = ActivationStore(tmp_path)  # opening removes what the dead writer left, and waits for nobody
    assert not list(tmp_path.glob(".*"))
    found = store.read(SPACE, keys=[key(one) for one in range(46)], layers=LAYERS)
    assert found.places == tuple(range(45))
    assert torch.equal(found.values, rows(list(range(45))))
    assert unreadable(store) == []


def test_a_damaged_or_foreign_file_is_a_miss_and_is_named(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path)
    cut = put(store, 1)
    put(store, 2)
    cut.write_bytes(cut.read_bytes()[:-4])
    (tmp_path / "notes.safetensors").write_text("not tensors")
    fresh = ActivationStore(tmp_path)
    assert fresh.read(SPACE, keys=[key(1), key(2)], layers=LAYERS).places == (1,)
    assert unreadable(fresh) == sorted([cut.name, "notes.safetensors"])


def test_a_shard_that_another_process_removes_is_a_miss(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path)
    path = put(store, 1)
    put(store, 2)
    wanted = [key(1), key(2)]
    load = store._load

    def remove_then_load(*arguments: object) -> Tensor:  # between listing the folder and opening the file
        path.unlink(missing_ok=True)
        return load(*arguments)  # type: ignore[arg-type]

    store._load = remove_then_load  # type: ignore[method-assign]
    assert store.read(SPACE, keys=wanted, layers=LAYERS).places == (1,)


def test_the_budget_of_the_folder_removes_what_was_unused_for_longest(tmp_path: Path) -> None:
    size = put(ActivationStore(tmp_path), 1).stat().st_size
    store = ActivationStore(tmp_path, budget_bytes=2 * size + size // 2)
    second = put(store, 2)
    for path in shards(store):
        os.utime(path.path, (1, 1))
    assert store.read(SPACE, keys=[key(1)], layers=LAYERS).places == (0,)
    put(store, 3)
    assert not second.exists()
    assert store.read(SPACE, keys=[key(1), key(2), key(3)], layers=LAYERS).places == (0, 2)


def test_blocks_that_were_read_stay_in_a_tier_within_its_budget(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path, tiers=[Tier(device="cpu", budget_bytes=30)])
    put(store, 1)
    put(store, 2)
    for _ in range(2):
        found = store.read(SPACE, keys=[key(1), key(2)], layers=LAYERS)
        assert torch.equal(found.values, rows([1, 2]))
        assert store.tiers.held_bytes() == (24,)


def test_the_break_even_uses_what_was_measured(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path)
    assert store.storing_pays(num_bytes=1000, recompute_s=10.0, uses=1).source == "assumed"
    put(store, 1)
    store.read(SPACE, keys=[key(1)], layers=LAYERS)
    decision = store.storing_pays(num_bytes=1000, recompute_s=1e6, uses=1)
    assert decision.source == "measured"
    assert decision.value


def test_values_and_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path)
    with pytest.raises(BadInput, match=r"values are \(1, 2, 3\) for 2 keys"):
        store.put(SPACE, keys=[key(1), key(2)], layers=LAYERS, values=rows([1]))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be a store"):
        ActivationStore(tmp_path / "file")


# Storing pays exactly when it takes less time

RATES = st.floats(1e3, 1e9)


@given(
    num_bytes=st.integers(1, 10**9),
    recompute_s=st.floats(1e-6, 1e4),
    uses=st.integers(0, 20),
    write=RATES,
    read=RATES,
)
def test_the_rule_is_the_shorter_time(
    num_bytes: int, recompute_s: float, uses: int, write: float, read: float
) -> None:
    storing = num_bytes / write + uses * num_bytes / read
    recomputing = uses * recompute_s
    assume(abs(storing - recomputing) > 1e-6 * recomputing)
    decision = storing_pays(
        num_bytes=num_bytes,
        recompute_s=recompute_s,
        uses=uses,
        write_bytes_per_s=write,
        read_bytes_per_s=read,
    )
    assert decision.value == (storing < recomputing)
    assert decision.source == "measured"


def test_the_reason_names_both_costs() -> None:
    decision = storing_pays(num_bytes=500_000_000, recompute_s=12.0, uses=1)
    assert decision.value
    assert decision.source == "assumed"
    assert "477 MiB take 1.00 s to write and 1.00 s to read, computing them takes 12.0 s" in decision.reason
    assert "from use 1 on, and 1 are expected" in decision.reason
    never = storing_pays(num_bytes=500_000_000, recompute_s=0.5, uses=100)
    assert not never.value
    assert "never beats" in never.reason


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(BadInput, match="uses=-1"):
        storing_pays(num_bytes=1, recompute_s=1.0, uses=-1)
