"""Control vectors byte by byte, as the format describes them."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.engines.steering.vectors.gguf import read_control_vector, write_control_vector
from flatout.ground.errors import BadInput

# By version 0.19 of the package.
WRITTEN_BY_GGUF = (
    "c-nJ!4|QW^U|?WkfB<GFEdr&}Q}a@b5_9wti;^=kOHz|dN{doCfa1JR`Q-e(lA`>aGN4R;kpwnDz1;ki)SUQ?%)A"
    "niMpmeroSekmL`kd~auO?3i{g{>OY=%tpibk4Don{N0;<W(&(kwzL~<=Mz*K6Eu2ca<gFO%*U|?u)V899*?4k5NY"
    "_b62oiWz"
)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def file_of(
    *, architecture: str = "controlvector", version: int = 3, kind: int = 0, name: str = "direction.5"
) -> bytes:
    """A file with one tensor of two values, written out by hand."""
    head = b"GGUF" + struct.pack("<IQQ", version, 1, 3)
    head += string("general.architecture") + struct.pack("<I", 8) + string(architecture)
    head += string("list") + struct.pack("<IIQ", 9, 4, 2) + struct.pack("<II", 1, 2)
    head += string("switch") + struct.pack("<I?", 7, True)
    head += string(name) + struct.pack("<IQIQ", 1, 2, kind, 0)
    values = struct.pack("<2f", 0.5, -2.0) if kind == 0 else struct.pack("<2e", 0.5, -2.0)
    return head + bytes(-len(head) % 32) + values + bytes(32 - len(values))


@pytest.mark.parametrize("kind", [0, 1])
def test_a_file_of_the_format_is_read(tmp_path: Path, kind: int) -> None:
    (tmp_path / "v.gguf").write_bytes(file_of(kind=kind))
    directions, model = read_control_vector(tmp_path / "v.gguf")
    assert model is None
    assert list(directions) == [5]
    assert directions[5].tolist() == [0.5, -2.0]


def test_a_file_of_the_gguf_package_is_read(tmp_path: Path) -> None:
    (tmp_path / "v.gguf").write_bytes(zlib.decompress(base64.b85decode(WRITTEN_BY_GGUF)))
    directions, model = read_control_vector(tmp_path / "v.gguf")
    assert model == "llama"
    assert {layer: values.tolist() for layer, values in directions.items()} == {
        3: [0.5, -2.0, 4.0],
        7: [1.0, 0.0, -0.25],
    }


def test_a_count_beyond_the_end_costs_no_time(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("list")
    (tmp_path / "v.gguf").write_bytes(head + struct.pack("<IIQ", 9, 0, 1 << 40) + bytes(2))
    with pytest.raises(BadInput, match="is cut or damaged: 1099511627776 values reach beyond the end"):
        read_control_vector(tmp_path / "v.gguf")


@settings(max_examples=20)
@given(layers=st.sets(st.integers(0, 40), min_size=1, max_size=4), width=st.integers(1, 40))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, layers: set[int], width: int
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "v.gguf"
    directions = {layer: torch.randn(width) for layer in layers}
    write_control_vector(path, directions, model="llama")
    found, model = read_control_vector(path)
    assert model == "llama"
    assert list(found) == sorted(layers)
    assert all(torch.equal(found[layer], directions[layer]) for layer in layers)


def test_tensors_lie_at_multiples_of_the_alignment(tmp_path: Path) -> None:
    write_control_vector(tmp_path / "v.gguf", {1: torch.ones(3), 2: torch.full((3,), 2.0)}, model="m")
    content = (tmp_path / "v.gguf").read_bytes()
    assert len(content) % 32 == 0
    assert content[-32:-20] == struct.pack("<3f", 2.0, 2.0, 2.0)
    assert content[-64:-52] == struct.pack("<3f", 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no such thing", "is not a GGUF file"),
        (file_of(version=1), "GGUF version 1"),
        (file_of(architecture="llama"), "is a llama, not a controlvector"),
        (file_of(name="token_embd.weight"), "'token_embd.weight' .* is not a plain direction"),
        (file_of(kind=2)[:-8], "not a plain direction"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "v.gguf").write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read_control_vector(tmp_path / "v.gguf")


@given(length=st.integers(0, len(file_of()) - 25))
def test_a_cut_file_is_refused_at_any_length(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.mktemp("gguf") / "v.gguf"
    path.write_bytes(file_of()[:length])
    with pytest.raises(BadInput):
        read_control_vector(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_control_vector(tmp_path / "absent.gguf")


def damaged(*, extra: bytes = b"", layer: str = "5", values: int = 2) -> bytes:
    """A file with one more pair, or with another tensor."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2 if extra else 1)
    head += string("general.architecture") + struct.pack("<I", 8) + string("controlvector") + extra
    return head + string(f"direction.{layer}") + struct.pack("<IQIQ", 1, values, 0, 0) + bytes(64)


def aligned_to(kind: int, value: bytes) -> bytes:
    return string("general.alignment") + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (damaged(extra=aligned_to(4, struct.pack("<I", 0))), "aligned to '0'"),
        (damaged(extra=aligned_to(5, struct.pack("<i", -8))), "aligned to '-8'"),
        (damaged(extra=aligned_to(6, struct.pack("<f", float("nan")))), "aligned to 'nan'"),
        (damaged(extra=aligned_to(8, string("much"))), "aligned to 'much'"),
        (damaged(extra=string("deep") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000), "of arrays"),
        (damaged(values=0), "not a plain direction"),
        (damaged(layer="²"), "not a plain direction"),
        (damaged(layer="1" * 5000), "not a plain direction"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "v.gguf").write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read_control_vector(tmp_path / "v.gguf")
