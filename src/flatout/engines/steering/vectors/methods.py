"""Directions that tell two sets of activations apart, at all layers at once.

mean-difference   from the mean of one side to the mean of the other: contrastive activation addition
pca               the axis along which the differences of pairs are largest, taken with both signs
logistic          the weights of a logistic regression with an L2 penalty
lda               the mean difference, whitened by the spread within each side
random            no direction at all: what any vector of that size does, the control of an experiment

There are fewer texts than dimensions as a rule.  So everything that needs a covariance is computed in the
span of the texts, from products of texts with texts, and all layers go through one batched decomposition.

Shapes: L layers, N texts of one side, S texts of both, D width, R dimensions of the span.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flatout.ground.errors import BadInput

PENALTY = 0.01  # of the logistic weights, for features whose mean square length is 1
NEWTON_STEPS = 50
TOLERANCE = 1e-8


def mean_difference(positive_LND: Tensor, negative_LND: Tensor) -> Tensor:
    """Return the vector from the negative mean to the positive one, [L, D]."""
    return positive_LND.mean(1) - negative_LND.mean(1)


def pca_of_differences(positive_LND: Tensor, negative_LND: Tensor) -> Tensor:
    """Return the first principal axis of the differences and their opposites.

    Centring the differences themselves would remove what they have in common, which is what the method looks
    for; with both signs their mean is 0 already.
    """
    if positive_LND.shape != negative_LND.shape:
        raise BadInput(
            f"{positive_LND.shape[1]} positive and {negative_LND.shape[1]} negative texts are not pairs",
            hint="pca compares the two texts of a pair; use mean-difference, lda or logistic",
        )
    axes_LRD, _ = principal_axes(positive_LND - negative_LND)
    return axes_LRD[:, 0]


def linear_discriminant(positive_LND: Tensor, negative_LND: Tensor) -> Tensor:
    """Return the inverse of the spread within the sides, times the mean difference.

    With fewer texts than dimensions the spread has no inverse; it is shrunk towards a sphere by as much as
    Ledoit and Wolf's estimate of its own error says.
    """
    within_LSD = torch.cat(
        [side - side.mean(1, keepdim=True) for side in (positive_LND, negative_LND)], dim=1
    )
    num_texts, width = within_LSD.shape[1:]
    axes_LRD, lengths_LR = principal_axes(within_LSD)
    spread_LR = lengths_LR**2 / num_texts
    shrinkage_L = ledoit_wolf(within_LSD, spread_LR)
    sphere_L1 = (shrinkage_L * spread_LR.sum(1) / width)[:, None].clamp(min=torch.finfo(spread_LR.dtype).tiny)
    difference_LD = mean_difference(positive_LND, negative_LND)
    inside_LR = torch.einsum("lrd,ld->lr", axes_LRD, difference_LD)
    # Outside the span of the texts the shrunk spread is the sphere alone.
    outside_LD = difference_LD - torch.einsum("lrd,lr->ld", axes_LRD, inside_LR)
    scaled_LR = inside_LR / ((1 - shrinkage_L)[:, None] * spread_LR + sphere_L1)
    return torch.einsum("lrd,lr->ld", axes_LRD, scaled_LR) + outside_LD / sphere_L1


def ledoit_wolf(centred_LSD: Tensor, spread_LR: Tensor) -> Tensor:
    """Return how far to shrink a covariance towards a multiple of the identity, from 0 to 1, [L].

    `spread_LR` are the eigenvalues of the covariance of the centred texts.
    """
    num_texts, width = centred_LSD.shape[1:]
    squares_L = (spread_LR**2).sum(1)
    fourth_L = (centred_LSD**2).sum(2).square().mean(1)
    error_L = (fourth_L - squares_L) / num_texts
    distance_L = squares_L - spread_LR.sum(1) ** 2 / width
    return torch.where(distance_L > 0, error_L / distance_L, 1.0).nan_to_num(1.0).clamp(0, 1)


def logistic_probe(positive_LND: Tensor, negative_LND: Tensor) -> Tensor:
    """Fit the direction of a logistic regression that separates the sides, by Newton's method."""
    texts_LSD = torch.cat([positive_LND, negative_LND], dim=1)
    centred_LSD = texts_LSD - texts_LSD.mean(1, keepdim=True)
    length_L11 = centred_LSD.square().sum(2).mean(1).sqrt()[:, None, None]
    scaled_LSD = centred_LSD / length_L11.clamp(min=torch.finfo(centred_LSD.dtype).tiny)
    axes_LRD, _ = principal_axes(scaled_LSD)
    features_LSR = scaled_LSD @ axes_LRD.mT
    ones_LS1 = torch.ones_like(features_LSR[..., :1])
    sign_S = torch.ones(texts_LSD.shape[1], dtype=texts_LSD.dtype, device=texts_LSD.device)
    sign_S[positive_LND.shape[1] :] = -1
    weights_LR = _newton(torch.cat([features_LSR, ones_LS1], dim=2), sign_S)[:, :-1]
    return torch.einsum("lr,lrd->ld", weights_LR, axes_LRD)


def _newton(features_LSR: Tensor, sign_S: Tensor) -> Tensor:
    """Return the weights [L, R] of the least penalised loss; the last feature is a free constant."""
    num_texts, num_features = features_LSR.shape[1:]
    penalty_R = features_LSR.new_full((num_features,), PENALTY)
    penalty_R[-1] = 1e-9
    steps_K = 0.5 ** torch.arange(12, dtype=features_LSR.dtype, device=features_LSR.device)

    def loss(weights_KLR: Tensor) -> Tensor:
        margin_KLS = sign_S * torch.einsum("lsr,klr->kls", features_LSR, weights_KLR)
        fit_KL = torch.nn.functional.softplus(-margin_KLS).mean(2)
        return fit_KL + 0.5 * (penalty_R * weights_KLR**2).sum(2)

    weights_LR = features_LSR.new_zeros(len(features_LSR), num_features)
    for _ in range(NEWTON_STEPS):
        margin_LS = sign_S * torch.einsum("lsr,lr->ls", features_LSR, weights_LR)
        wrong_LS = torch.sigmoid(-margin_LS)
        slope_LR = torch.einsum("lsr,ls->lr", features_LSR, -sign_S * wrong_LS) / num_texts
        slope_LR = slope_LR + penalty_R * weights_LR
        if slope_LR.abs().max() < TOLERANCE:
            break
        bend_LSR = features_LSR * (wrong_LS * (1 - wrong_LS) / num_texts)[..., None]
        curvature_LRR = features_LSR.mT @ bend_LSR + torch.diag(penalty_R)
        step_LR = torch.linalg.solve(curvature_LRR, slope_LR)
        # A whole step may overshoot: each layer takes the best of a few shorter ones.
        tried_KLR = weights_LR - steps_K[:, None, None] * step_LR
        best_L = loss(tried_KLR).argmin(0)
        weights_LR = tried_KLR[best_L, torch.arange(len(best_L), device=best_L.device)]
    return weights_LR


def principal_axes(rows_LSD: Tensor) -> tuple[Tensor, Tensor]:
    """Return orthonormal axes [L, R, D] of the rows' span and the rows' lengths along them, largest first.

    From the products of rows with rows, or of dimensions with dimensions, whichever are fewer.  Axes along
    which no row extends are 0.
    """
    fewer_rows = rows_LSD.shape[1] <= rows_LSD.shape[2]
    product = rows_LSD @ rows_LSD.mT if fewer_rows else rows_LSD.mT @ rows_LSD
    squares_LR, vectors = torch.linalg.eigh(product)
    squares_LR, vectors = squares_LR.flip(1), vectors.flip(2)
    floor_L1 = squares_LR[:, :1] * product.shape[1] * torch.finfo(product.dtype).eps
    real_LR = squares_LR > floor_L1
    lengths_LR = squares_LR.clamp(min=0).sqrt() * real_LR
    if not fewer_rows:
        return vectors.mT * real_LR[..., None], lengths_LR
    inverse_LR = torch.where(real_LR, 1 / lengths_LR, torch.zeros_like(lengths_LR))
    return (vectors.mT @ rows_LSD) * inverse_LR[..., None], lengths_LR


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean-difference": mean_difference,
    "pca": pca_of_differences,
    "logistic": logistic_probe,
    "lda": linear_discriminant,
}
