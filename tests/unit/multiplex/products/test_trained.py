"""Corrected linear maps: every kind of products against plain autograd, maps together against each alone."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatout.multiplex.products.ranges import Dense, Path, products_of
from flatout.multiplex.products.trained import Dropout, Maps, corrected_maps
from flatout.multiplex.rows import VariantRange
from tests.support.multiplex import ranges_of

K, O, R = 12, 20, 16  # noqa: E741
CPU = torch.device("cpu")
PATHS: tuple[Path, ...] = get_args(Path)


def case(num: int, *, ranks: tuple[int, ...], num_maps: int = 1, seed: int = 0) -> Maps:
    generator = torch.Generator().manual_seed(seed)
    shrink, expand = (torch.randn(num_maps, num, R, width, generator=generator) for width in (K, O))
    for t, rank in enumerate(ranks):
        shrink[:, t, rank:], expand[:, t, rank:] = 0, 0
    return Maps(
        weight=torch.randn(num_maps * O, K, generator=generator),
        bias=torch.randn(num_maps * O, generator=generator),
        shrink=shrink,
        expand=expand,
        shrink_gradient=torch.zeros_like(shrink),
        expand_gradient=torch.zeros_like(expand),
    )


def corrected(x: Tensor, of: Maps, products: Any, **options: Any) -> tuple[Tensor, ...]:
    anchor = torch.zeros((), requires_grad=True)
    return corrected_maps(x, maps=of.bound(products), products=products, anchor=anchor, **options)


def plainly(
    x: Tensor, of: Maps, ranges: tuple[VariantRange, ...], scales: tuple[float, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """One map with plain operators; the gradients of its factors come from autograd."""
    a, b = of.shrink[0].clone().requires_grad_(), of.expand[0].clone().requires_grad_()
    parts = [scales[s.variant] * (x[s.start : s.stop] @ a[s.variant].T) @ b[s.variant] for s in ranges]
    y = F.linear(x, of.weight, of.bias) + torch.cat(parts)
    y.pow(2).sum().backward()
    assert a.grad is not None and b.grad is not None
    return y, a.grad, b.grad


@settings(max_examples=15)
@given(
    path=st.sampled_from(PATHS),
    size=st.integers(1, 6),
    ranks=st.lists(st.sampled_from((4, 8, 16)), min_size=1, max_size=4),
    uniform=st.booleans(),
    equal=st.booleans(),
)
def test_every_kind_of_products_is_the_plain_one(
    path: Path, size: int, ranks: list[int], uniform: bool, equal: bool
) -> None:
    own = tuple(ranks)
    of = case(len(own), ranks=own)
    scales = tuple(2.0 if uniform else 1.0 + t for t in range(len(own)))
    ranges = ranges_of([size + (0 if equal or path == "batched" else t) for t in range(len(own))])
    x = torch.randn(ranges[-1].stop, K, generator=torch.Generator().manual_seed(size))
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, to_shrink, to_expand = plainly(theirs, of, ranges, scales)
    products = products_of(path, ranges, ranks=own, scales=scales, rank=R, dtype=torch.float32, device=CPU)
    (y,) = corrected(ours[None], of, products)
    y = y[0]
    y.pow(2).sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(of.shrink_gradient[0], to_shrink, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(of.expand_gradient[0], to_expand, rtol=1e-4, atol=1e-3)
    for t, rank in enumerate(own):
        assert not of.shrink_gradient[0, t, rank:].any() and not of.expand_gradient[0, t, rank:].any()


@pytest.mark.parametrize("path", ["loop", "dense", "grouped"])
def test_absent_variants_are_not_touched(path: Path) -> None:
    """A finished variant has no tokens: neither first, nor last, nor in the middle."""
    of = case(5, ranks=(R,) * 5)
    ranges = (VariantRange(variant=1, start=0, stop=3), VariantRange(variant=3, start=3, stop=7))
    products = products_of(
        path, ranges, ranks=(R,) * 5, scales=(2.0,) * 5, rank=R, dtype=torch.float32, device=CPU
    )
    x = torch.randn(7, K)
    (y,) = corrected(x, of, products)
    expected, to_shrink, _ = plainly(x, of, ranges, (2.0,) * 5)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    y.pow(2).sum().backward()
    torch.testing.assert_close(of.shrink_gradient[0], to_shrink, rtol=1e-4, atol=1e-3)
    assert not of.expand_gradient[0, [0, 2, 4]].any()


def test_gradients_add_up_over_backwards() -> None:
    of, ranges = case(2, ranks=(8, 16)), ranges_of([3, 4])
    products = products_of(
        "loop", ranges, ranks=(8, 16), scales=(2.0, 3.0), rank=R, dtype=torch.float32, device=CPU
    )
    x = torch.randn(7, K)
    corrected(x, of, products)[0].sum().backward()
    once = of.shrink_gradient.clone()
    assert once.any()
    corrected(x, of, products)[0].sum().backward()
    torch.testing.assert_close(of.shrink_gradient, 2 * once)


def test_a_mixture_has_gradients_to_its_weights() -> None:
    of = case(3, ranks=(8, 16, 16))
    x = torch.randn(5, K).requires_grad_()
    weights = torch.rand(5, 3).requires_grad_()
    gain = weights[:, :, None].expand(-1, -1, R).flatten(1)
    a, b = of.shrink[0].clone().requires_grad_(), of.expand[0].clone().requires_grad_()
    each = torch.einsum("nk,trk,tro->nto", x, a, b)
    expected = F.linear(x, of.weight, of.bias) + (each * weights[:, :, None]).sum(1)
    theirs = torch.autograd.grad(expected.pow(2).sum(), (x, weights, a, b))
    products = Dense(first=0, last=3, gain=gain)
    (y,) = corrected(x, of, products, gain=gain)
    y.pow(2).sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    ours = (x.grad, weights.grad, of.shrink_gradient[0], of.expand_gradient[0])
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("each_its_own", [False, True])
def test_dropout_zeroes_the_share_it_should_and_its_gradient_is_that_of_the_kept(each_its_own: bool) -> None:
    of, ranges = case(2, ranks=(R, R)), ranges_of([400, 400])
    tokens = torch.cat((torch.full((400, 1), 0.5), torch.full((400, 1), 0.9)))
    dropout = Dropout(keep=None if each_its_own else 0.5, keep_of_tokens=tokens if each_its_own else None)
    torch.manual_seed(0)
    mask, _ = dropout.apply(torch.ones(800, K))
    shares = [part.ne(0).float().mean().item() for part in mask.split(400)]
    assert shares == pytest.approx([0.5, 0.9 if each_its_own else 0.5], abs=0.03)
    assert mask.mean().item() == pytest.approx(1.0, abs=0.05)
    x = torch.randn(800, K).requires_grad_()
    products = products_of(
        "loop", ranges, ranks=(R, R), scales=(1.0, 1.0), rank=R, dtype=torch.float32, device=CPU
    )
    torch.manual_seed(0)
    (y,) = corrected(x, of, products, dropout=dropout)
    y.sum().backward()
    inside = x.detach() * mask
    expected = F.linear(x.detach(), of.weight, of.bias) + torch.cat(
        [inside[s.start : s.stop] @ of.shrink[0, s.variant].T @ of.expand[0, s.variant] for s in ranges]
    )
    torch.testing.assert_close(y.detach(), expected, rtol=1e-4, atol=1e-3)
    through = torch.cat([(of.expand[0, t].sum(1) @ of.shrink[0, t]).expand(400, K) for t in range(2)])
    torch.testing.assert_close(x.grad, of.weight.sum(0) + through * mask, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dropout", [None, Dropout(keep=0.5, keep_of_tokens=None)])
@pytest.mark.parametrize(
    ("path", "mixed"),
    [("dense", False), ("dense", True), ("loop", False), ("batched", False), ("grouped", False)],
)
@pytest.mark.parametrize("variants", [(0, 1, 2), (1, 2), (2,)])
def test_maps_of_one_input_together_are_each_alone(
    variants: tuple[int, ...], path: Path, mixed: bool, dropout: Dropout | None
) -> None:
    ranges = tuple(
        VariantRange(variant=v, start=4 * place, stop=4 * place + 4) for place, v in enumerate(variants)
    )
    products = products_of(
        path, ranges, ranks=(4, 8, R), scales=(1.0, 2.0, 3.0), rank=R, dtype=torch.float32, device=CPU
    )
    x = torch.randn(1, 4 * len(variants), K)
    weights = torch.rand(4 * len(variants), len(variants) * R)
    found: list[tuple[Tensor, ...]] = []
    for together in (False, True):
        of = case(3, ranks=(4, 8, R), num_maps=3)
        own, gain = x.clone().requires_grad_(), weights.clone().requires_grad_() if mixed else None
        each = [
            Maps(
                weight=of.weight[place * O : (place + 1) * O],
                bias=None if of.bias is None else of.bias[place * O : (place + 1) * O],
                shrink=of.shrink[place : place + 1],
                expand=of.expand[place : place + 1],
                shrink_gradient=of.shrink_gradient[place : place + 1],
                expand_gradient=of.expand_gradient[place : place + 1],
            )
            for place in range(3)
        ]
        results: tuple[Tensor, ...] = ()
        for maps in [of] if together else each:
            torch.manual_seed(0)  # maps of one input share its dropout
            results += corrected(own, maps, products, dropout=dropout, gain=gain)
        sum((place + 1) * y.pow(2).sum() for place, y in enumerate(results)).backward()
        assert own.grad is not None
        gradient = gain.grad if gain is not None else torch.zeros(())
        assert gradient is not None
        found.append(
            (*(y.detach() for y in results), own.grad, gradient, of.shrink_gradient, of.expand_gradient)
        )
    for alone, all_at_once in zip(*found, strict=True):
        torch.testing.assert_close(all_at_once, alone, rtol=1e-4, atol=1e-3)
    assert found[0][-1].any()
