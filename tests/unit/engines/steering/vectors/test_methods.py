"""Each method against a plain reference of one layer, with fewer and with more texts than dimensions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.engines.steering.vectors.methods import (
    METHODS,
    PENALTY,
    ledoit_wolf,
    linear_discriminant,
    logistic_probe,
    mean_difference,
    pca_of_differences,
    principal_axes,
)
from flatout.ground.errors import BadInput

SHAPES = [(3, 6, 20), (2, 40, 8)]  # layers, texts of a side, width


def sides(shape: tuple[int, int, int], *, seed: int = 0, apart: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Two sides that differ along a direction [L, D], in the middle of a larger common spread."""
    generator = torch.Generator().manual_seed(seed)
    layers, texts, width = shape
    direction = torch.nn.functional.normalize(
        torch.randn(layers, width, generator=generator, dtype=torch.float64), dim=1
    )
    scale = torch.linspace(0.3, 2.0, width, dtype=torch.float64)
    common = torch.randn(layers, texts, width, generator=generator, dtype=torch.float64) * scale + 3
    noise = torch.randn(2, layers, texts, width, generator=generator, dtype=torch.float64) * 0.3 * scale
    shift = apart * direction[:, None]
    return common + noise[0] + shift, common + noise[1] - shift, direction


def along(found: Tensor, expected: Tensor) -> Tensor:
    """Cosines, [L]."""
    return torch.nn.functional.cosine_similarity(found, expected, dim=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_pca_is_the_first_singular_vector_of_the_differences(shape: tuple[int, int, int]) -> None:
    positive, negative, _ = sides(shape)
    found = pca_of_differences(positive, negative)
    reference = torch.linalg.svd(positive - negative).Vh[:, 0]
    torch.testing.assert_close(along(found, reference).abs(), torch.ones(shape[0], dtype=torch.float64))


@pytest.mark.parametrize("shape", SHAPES)
def test_lda_is_the_mean_difference_whitened_by_the_shrunk_spread(shape: tuple[int, int, int]) -> None:
    positive, negative, _ = sides(shape)
    found = linear_discriminant(positive, negative)
    for layer in range(shape[0]):
        within = torch.cat([one[layer] - one[layer].mean(0) for one in (positive, negative)])
        spread = within.T @ within / len(within)
        shrinkage = ledoit_wolf(within[None], torch.linalg.eigvalsh(spread)[None])[0]
        assert 0 < shrinkage < 1
        sphere = torch.eye(shape[2], dtype=torch.float64) * spread.trace() / shape[2]
        shrunk = (1 - shrinkage) * spread + shrinkage * sphere
        reference = torch.linalg.solve(shrunk, positive[layer].mean(0) - negative[layer].mean(0))
        torch.testing.assert_close(found[layer], reference, rtol=1e-6, atol=1e-8)


def test_the_shrinkage_is_ledoit_and_wolfs() -> None:
    """By their definition: the squared error of the texts' own products, over the distance to a sphere."""
    (centred,) = sides((1, 12, 5))[0]
    centred = centred - centred.mean(0)
    spread = centred.T @ centred / 12
    error = sum(((torch.outer(row, row) - spread) ** 2).sum() for row in centred) / 12**2
    sphere = torch.eye(5, dtype=torch.float64) * spread.trace() / 5
    expected = error / ((spread - sphere) ** 2).sum()
    found = ledoit_wolf(centred[None], torch.linalg.eigvalsh(spread)[None])
    torch.testing.assert_close(found, expected.clamp(max=1)[None])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("apart", [0.1, 5.0])  # inseparable sides, and sides with a wide gap
def test_logistic_weights_are_the_minimum(shape: tuple[int, int, int], apart: float) -> None:
    """At the minimum of a convex loss the slope is 0; the constant is found by the test itself."""
    positive, negative, _ = sides(shape, apart=apart)
    found = logistic_probe(positive, negative)
    for layer in range(shape[0]):
        texts = torch.cat([positive[layer], negative[layer]])
        texts = texts - texts.mean(0)
        texts = texts / texts.square().sum(1).mean().sqrt()
        sign = torch.tensor([1.0] * shape[1] + [-1.0] * shape[1], dtype=torch.float64)
        weights = found[layer].clone().requires_grad_()
        constant = torch.zeros((), dtype=torch.float64, requires_grad=True)
        fitting = torch.optim.LBFGS(
            [constant], max_iter=100, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            fit = torch.nn.functional.softplus(-sign * (texts @ weights + constant)).mean()  # noqa: B023
            return fit + PENALTY / 2 * (weights**2).sum()  # noqa: B023

        def step() -> Tensor:
            fitting.zero_grad()  # noqa: B023
            value = loss()
            value.backward(inputs=[constant])  # noqa: B023
            return value

        fitting.step(step)
        (slope,) = torch.autograd.grad(loss(), [weights])
        assert slope.abs().max() < 1e-6


@pytest.mark.parametrize("method", sorted(METHODS))
def test_layers_do_not_mix(method: str) -> None:
    positive, negative, _ = sides((3, 10, 16))
    whole = METHODS[method](positive, negative)
    for layer in range(3):
        alone = METHODS[method](positive[layer : layer + 1], negative[layer : layer + 1])
        torch.testing.assert_close(
            along(alone, whole[layer : layer + 1]).abs(), torch.ones(1, dtype=torch.float64)
        )


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_planted_difference_is_told_on_texts_that_were_not_fitted(method: str) -> None:
    positive, negative, planted = sides((2, 60, 16), apart=2.0)
    found = METHODS[method](positive[:, :30], negative[:, :30])
    found = found * torch.sign(along(found, planted))[:, None]
    apart = torch.einsum("lnd,ld->ln", positive[:, 30:] - negative[:, 30:], found)
    assert (apart > 0).double().mean() > 0.95


def test_lda_sees_through_a_spread_that_misleads_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 1, 20, 2, generator=generator, dtype=torch.float64)
    spread = noise * torch.tensor([20.0, 0.1], dtype=torch.float64)
    shift = torch.tensor([0.0, 1.0], dtype=torch.float64)
    positive, negative = spread[0] + shift, spread[1] - shift
    true = shift[None]
    assert along(linear_discriminant(positive, negative), true) > 0.99
    assert along(mean_difference(positive, negative), true) < 0.9


@given(texts=st.integers(1, 12), width=st.integers(1, 12), rank=st.integers(1, 12), seed=st.integers(0, 99))
def test_axes_are_orthonormal_and_span_the_rows(texts: int, width: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(2, texts, rank, generator=generator, dtype=torch.float64)
    right = torch.randn(2, rank, width, generator=generator, dtype=torch.float64)
    rows = left @ right
    axes, lengths = principal_axes(rows)
    real = (lengths > 0).double()
    torch.testing.assert_close(axes @ axes.mT, torch.diag_embed(real), rtol=0, atol=1e-6)
    torch.testing.assert_close(rows @ axes.mT @ axes, rows, rtol=1e-6, atol=1e-6)
    expected = torch.linalg.svdvals(rows)
    torch.testing.assert_close(lengths, expected, rtol=1e-5, atol=1e-5)


def test_pca_needs_pairs() -> None:
    positive, negative, _ = sides((1, 5, 4))
    with pytest.raises(BadInput, match="5 positive and 4 negative texts are not pairs"):
        pca_of_differences(positive, negative[:, :4])
