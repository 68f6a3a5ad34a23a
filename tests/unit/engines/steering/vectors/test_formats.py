"""Exchange with other libraries: plain tensors both ways, pickles never."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flatout.engines.steering.vectors.formats import directions_of, from_directions, read, write
from flatout.engines.steering.vectors.steering_vectors import SteeringVectors
from flatout.ground.errors import BadInput

VECTORS = SteeringVectors(
    values=torch.nn.functional.normalize(torch.arange(1.0, 9.0).view(2, 4), dim=1),
    norms=torch.tensor([3.0, 40.0]),
    layers=(2, 9),
    method="pca",
    recipe={"position": "last"},
)


@pytest.mark.parametrize("name", ["v.gguf", "v.safetensors"])
def test_a_strength_means_the_same_after_the_exchange(tmp_path: Path, name: str) -> None:
    write(VECTORS, tmp_path / name, model="llama")
    again = read(tmp_path / name)
    assert again.layers == VECTORS.layers
    torch.testing.assert_close(again.norms, VECTORS.norms)
    for layer in VECTORS.layers:
        torch.testing.assert_close(
            again.added(layer=layer, strength=0.3), VECTORS.added(layer=layer, strength=0.3)
        )
    assert again.method == ("pca" if name == "v.safetensors" else "imported")


def test_a_dict_of_layers_goes_both_ways() -> None:
    given = directions_of(VECTORS)
    assert {layer: round(vector.norm().item(), 4) for layer, vector in given.items()} == {2: 3.0, 9: 40.0}
    again = from_directions(given)
    torch.testing.assert_close(again.values, VECTORS.values)


@pytest.mark.parametrize("form", ["{}", "layer.{}", "direction.{}"])
def test_plain_tensors_named_by_their_layer_are_read(tmp_path: Path, form: str) -> None:
    save_file(
        {form.format(layer): vector for layer, vector in directions_of(VECTORS).items()}, tmp_path / "v"
    )
    torch.testing.assert_close(read(tmp_path / "v").norms, VECTORS.norms)


@pytest.mark.parametrize("name", ["v.pt", "v.pkl", "v.bin"])
def test_a_pickle_is_neither_read_nor_written(tmp_path: Path, name: str) -> None:
    torch.save({1: torch.ones(2)}, tmp_path / name)
    with pytest.raises(BadInput, match=r"is a pickle, which flatout never loads .*safetensors"):
        read(tmp_path / name)
    with pytest.raises(BadInput, match="would be a pickle"):
        write(VECTORS, tmp_path / name)


def test_other_content_is_refused(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match=r"'lm_head.weight' does not name a layer"):
        read(tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match="cannot be read"):
        read(tmp_path / "absent.safetensors")
    with pytest.raises(BadInput, match="no directions"):
        from_directions({})
    with pytest.raises(BadInput, match="layer 4 is zero"):
        from_directions({3: torch.ones(2), 4: torch.zeros(2)})
    with pytest.raises(BadInput, match=r"shapes \[\(2,\), \(3,\)\]"):
        from_directions({3: torch.ones(2), 4: torch.ones(3)})
