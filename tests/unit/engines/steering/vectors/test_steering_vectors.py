"""Fitting, units of strength, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.run.tensor_files import save_tensors
from flatout.engines.steering.extract.activations import Activations
from flatout.engines.steering.settings import METHODS
from flatout.engines.steering.vectors import steering_vectors as module
from flatout.engines.steering.vectors.steering_vectors import SteeringVectors, fit, load, load_methods
from flatout.ground.errors import BadInput


def activations(*, seed: int, shift: float, texts: int = 12, layers: tuple[int, ...] = (3, 7)) -> Activations:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(texts, len(layers), 10, generator=generator)
    values[..., 4] += shift
    values[:, -1] *= 100  # a late layer is longer
    return Activations(values=values, layers=layers, keys=("k",) * texts, recipe={"position": "last"})


POSITIVE, NEGATIVE = activations(seed=1, shift=4.0), activations(seed=2, shift=-4.0)


@pytest.mark.parametrize("method", METHODS)
def test_directions_have_length_one_and_point_to_the_positive_side(method: Any) -> None:
    vectors = fit(POSITIVE, NEGATIVE, method=method)
    torch.testing.assert_close(vectors.values.norm(dim=1), torch.ones(2))
    assert (vectors.layers, vectors.method) == ((3, 7), method)
    assert vectors.recipe["position"] == "last"
    assert (vectors.recipe["positive_texts"], vectors.recipe["negative_texts"]) == ("12", "12")
    if method != "random":
        assert (vectors.values[:, 4] > 0.7).all()
        opposite = fit(NEGATIVE, POSITIVE, method=method)
        torch.testing.assert_close(opposite.values, -vectors.values, rtol=1e-4, atol=1e-5)


def test_a_strength_is_counted_in_norms_of_the_layer() -> None:
    vectors = fit(POSITIVE, NEGATIVE, method="mean-difference")
    both = torch.cat([POSITIVE.values, NEGATIVE.values])
    for place, layer in enumerate((3, 7)):
        mean_norm = both[:, place].norm(dim=1).mean()
        added = vectors.added(layer=layer, strength=-0.5)
        torch.testing.assert_close(added.norm(), 0.5 * mean_norm)
        torch.testing.assert_close(added, -0.5 * mean_norm * vectors.direction(layer))
    with pytest.raises(BadInput, match=r"no vector for layer 4 \(there are \[3, 7\]\)"):
        vectors.direction(4)


def test_random_directions_are_those_of_their_seed() -> None:
    first, again, other = (fit(POSITIVE, NEGATIVE, method="random", seed=seed).values for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_layers_in_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit(POSITIVE, NEGATIVE, method="lda")
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    torch.testing.assert_close(fit(POSITIVE, NEGATIVE, method="lda").values, whole.values)


def test_sides_may_differ_in_number_except_for_pairs() -> None:
    fewer = activations(seed=2, shift=-4.0, texts=5)
    assert fit(POSITIVE, fewer, method="lda").recipe["negative_texts"] == "5"
    with pytest.raises(BadInput, match="not pairs"):
        fit(POSITIVE, fewer, method="pca")


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(BadInput, match="method 'ica' is unknown"):
        fit(POSITIVE, NEGATIVE, method="ica")
    with pytest.raises(BadInput, match=r"different layers: \(3, 7\) and \(1, 2\)"):
        fit(POSITIVE, activations(seed=1, shift=0, layers=(1, 2)), method="pca")
    with pytest.raises(BadInput, match="do not differ at layer 3"):
        fit(POSITIVE, POSITIVE, method="mean-difference")
    with pytest.raises(BadInput, match="no texts"):
        fit(POSITIVE.rows(0, 0), NEGATIVE, method="lda")
    broken = activations(seed=1, shift=0)
    broken.values[2, 1, 0] = torch.inf
    with pytest.raises(BadInput, match="activations of layer 7 are not finite"):
        fit(broken, NEGATIVE, method="pca")


def test_vectors_come_back_from_a_file_with_their_recipe(tmp_path: Path) -> None:
    vectors = fit(POSITIVE, NEGATIVE, method="logistic")
    vectors.save(tmp_path / "v.safetensors")
    again = load(tmp_path / "v.safetensors")
    assert torch.equal(again.values, vectors.values)
    assert torch.equal(again.norms, vectors.norms)
    assert (again.layers, again.method, again.recipe) == (vectors.layers, vectors.method, vectors.recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["v.safetensors"]


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    vectors = fit(POSITIVE, NEGATIVE, method="pca")
    vectors.save(tmp_path / "v.safetensors")
    (tmp_path / "cut").write_bytes((tmp_path / "v.safetensors").read_bytes()[:-3])
    save_tensors(
        tmp_path / "activations", {"values": torch.ones(3)}, extra="steering", metadata={"format": "another"}
    )
    for name, said in (
        ("cut", "cannot be read"),
        ("absent", "cannot be read"),
        ("activations", "does not hold vectors"),
        ("", r"is a folder \(name one file in it: v\.safetensors\)"),
    ):
        with pytest.raises(BadInput, match=said):
            load(tmp_path / name)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(BadInput, match=r"vectors are \(2, 3\) for 1 layers"):
        SteeringVectors(values=torch.zeros(2, 3), norms=torch.ones(1), layers=(0,), method="pca")
    with pytest.raises(BadInput, match=r"norms are \(2,\) for 1 layers"):
        SteeringVectors(values=torch.zeros(1, 3), norms=torch.ones(2), layers=(0,), method="pca")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_few_digits_are_fitted_in_many(dtype: torch.dtype) -> None:
    values = (300 * torch.randn(12, 2, 40, generator=torch.Generator().manual_seed(1))).to(dtype)
    keys = tuple(map(str, range(12)))
    few = Activations(values=values, layers=(0, 1), keys=keys)
    many = Activations(values=values.float(), layers=(0, 1), keys=keys)
    found, expected = (
        fit(*few.halves(), method="mean-difference"),
        fit(*many.halves(), method="mean-difference"),
    )
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.norms, expected.norms)


def test_vectors_of_a_folder_are_read_by_method_and_absent_ones_named(tmp_path: Path) -> None:
    fit(POSITIVE, NEGATIVE, method="pca").save(tmp_path / "pca.safetensors")
    assert load_methods(tmp_path, methods=["pca"])["pca"].method == "pca"
    with pytest.raises(BadInput, match=r"no vectors of lda.*it has pca"):
        load_methods(tmp_path, methods=["pca", "lda"])
    with pytest.raises(BadInput, match="flatout steer fit"):
        load_methods(tmp_path / "absent", methods=["pca"])
