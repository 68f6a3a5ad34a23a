"""The corrected linear map: four kinds of products against one written plainly with autograd."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatout.engines.adapters.lora.blocks import Span
from flatout.engines.adapters.lora.low_rank import Dropout, Map, adapted_linear
from flatout.engines.adapters.lora.products import Dense, Path, products_of

K, O, R = 12, 20, 16  # noqa: E741
CPU = torch.device("cpu")
PATHS: tuple[Path, ...] = get_args(Path)


def spans_of(sizes: list[int]) -> tuple[Span, ...]:
    stops = torch.tensor(sizes).cumsum(0).tolist()
    return tuple(
        Span(adapter=t, start=stop - size, stop=stop)
        for t, (size, stop) in enumerate(zip(sizes, stops, strict=True))
    )


def case(num: int, *, ranks: tuple[int, ...], seed: int = 0) -> Map:
    generator = torch.Generator().manual_seed(seed)
    shrink, expand = (torch.randn(num, R, width, generator=generator) for width in (K, O))
    for t, rank in enumerate(ranks):
        shrink[t, rank:], expand[t, rank:] = 0, 0
    return Map(
        weight=torch.randn(O, K, generator=generator),
        bias=torch.randn(O, generator=generator),
        shrink=shrink,
        expand=expand,
        shrink_gradient=torch.zeros_like(shrink),
        expand_gradient=torch.zeros_like(expand),
    )


def plainly(x: Tensor, of: Map, spans: tuple[Span, ...], scales: tuple[float, ...]) -> tuple[Tensor, Map]:
    """The same with plain operators; the gradients come from autograd."""
    a, b = of.shrink.clone().requires_grad_(), of.expand.clone().requires_grad_()
    parts = [scales[s.adapter] * (x[s.start : s.stop] @ a[s.adapter].T) @ b[s.adapter] for s in spans]
    y = F.linear(x, of.weight, of.bias) + torch.cat(parts)
    y.pow(2).sum().backward()
    assert a.grad is not None and b.grad is not None
    return y, Map(
        weight=of.weight, bias=None, shrink=a, expand=b, shrink_gradient=a.grad, expand_gradient=b.grad
    )


@settings(max_examples=15, deadline=None)
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
    spans = spans_of([size + (0 if equal or path == "batched" else t) for t in range(len(own))])
    x = torch.randn(spans[-1].stop, K, generator=torch.Generator().manual_seed(size))
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, gradients = plainly(theirs, of, spans, scales)
    products = products_of(path, spans, ranks=own, scales=scales, rank=R, dtype=torch.float32, device=CPU)
    y = adapted_linear(
        ours[None], of=of.bound(products), products=products, anchor=torch.zeros((), requires_grad=True)
    )[0]
    y.pow(2).sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(of.shrink_gradient, gradients.shrink_gradient, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(of.expand_gradient, gradients.expand_gradient, rtol=1e-4, atol=1e-3)
    for t, rank in enumerate(own):
        assert not of.shrink_gradient[t, rank:].any() and not of.expand_gradient[t, rank:].any()


@pytest.mark.parametrize("path", ["loop", "dense", "grouped"])
def test_absent_adapters_are_not_touched(path: Path) -> None:
    """A finished adapter has no tokens: neither first, nor last, nor in the middle."""
    of = case(5, ranks=(R,) * 5)
    spans = (Span(adapter=1, start=0, stop=3), Span(adapter=3, start=3, stop=7))
    products = products_of(
        path, spans, ranks=(R,) * 5, scales=(2.0,) * 5, rank=R, dtype=torch.float32, device=CPU
    )
    x = torch.randn(7, K)
    y = adapted_linear(
        x, of=of.bound(products), products=products, anchor=torch.zeros((), requires_grad=True)
    )
    expected, gradients = plainly(x, of, spans, (2.0,) * 5)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    y.pow(2).sum().backward()
    torch.testing.assert_close(of.shrink_gradient, gradients.shrink_gradient, rtol=1e-4, atol=1e-3)
    assert not of.expand_gradient[[0, 2, 4]].any()


def test_gradients_add_up_over_backwards() -> None:
    of, spans = case(2, ranks=(8, 16)), spans_of([3, 4])
    products = products_of(
        "loop", spans, ranks=(8, 16), scales=(2.0, 3.0), rank=R, dtype=torch.float32, device=CPU
    )
    x, anchor = torch.randn(7, K), torch.zeros((), requires_grad=True)
    adapted_linear(x, of=of.bound(products), products=products, anchor=anchor).sum().backward()
    once = of.shrink_gradient.clone()
    assert once.any()
    adapted_linear(x, of=of.bound(products), products=products, anchor=anchor).sum().backward()
    torch.testing.assert_close(of.shrink_gradient, 2 * once)


def test_a_mixture_has_gradients_to_its_weights() -> None:
    of = case(3, ranks=(8, 16, 16))
    x = torch.randn(5, K).requires_grad_()
    weights = torch.rand(5, 3).requires_grad_()
    gain = weights[:, :, None].expand(-1, -1, R).flatten(1)
    a, b = of.shrink.clone().requires_grad_(), of.expand.clone().requires_grad_()
    each = torch.einsum("nk,trk,tro->nto", x, a, b)
    expected = F.linear(x, of.weight, of.bias) + (each * weights[:, :, None]).sum(1)
    theirs = torch.autograd.grad(expected.pow(2).sum(), (x, weights, a, b))
    products = Dense(first=0, last=3, gain=gain)
    y = adapted_linear(
        x,
        of=of.bound(products),
        products=products,
        anchor=torch.zeros((), requires_grad=True),
        gain=gain,
    )
    y.pow(2).sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    ours = (x.grad, weights.grad, of.shrink_gradient, of.expand_gradient)
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("each_its_own", [False, True])
def test_dropout_zeroes_the_share_it_should_and_its_gradient_is_that_of_the_kept(each_its_own: bool) -> None:
    of, spans = case(2, ranks=(R, R)), spans_of([400, 400])
    tokens = torch.cat((torch.full((400, 1), 0.5), torch.full((400, 1), 0.9)))
    dropout = Dropout(keep=None if each_its_own else 0.5, keep_of_tokens=tokens if each_its_own else None)
    torch.manual_seed(0)
    mask, _ = dropout.apply(torch.ones(800, K))
    shares = [part.ne(0).float().mean().item() for part in mask.split(400)]
    assert shares == pytest.approx([0.5, 0.9 if each_its_own else 0.5], abs=0.03)
    assert mask.mean().item() == pytest.approx(1.0, abs=0.05)
    x = torch.randn(800, K).requires_grad_()
    products = products_of(
        "loop", spans, ranks=(R, R), scales=(1.0, 1.0), rank=R, dtype=torch.float32, device=CPU
    )
    torch.manual_seed(0)
    y = adapted_linear(
        x,
        of=of.bound(products),
        products=products,
        anchor=torch.zeros((), requires_grad=True),
        dropout=dropout,
    )
    y.sum().backward()
    inside = x.detach() * mask
    expected = F.linear(x.detach(), of.weight, of.bias) + torch.cat(
        [inside[s.start : s.stop] @ of.shrink[s.adapter].T @ of.expand[s.adapter] for s in spans]
    )
    torch.testing.assert_close(y.detach(), expected, rtol=1e-4, atol=1e-3)
    through = torch.cat([(of.expand[t].sum(1) @ of.shrink[t]).expand(400, K) for t in range(2)])
    torch.testing.assert_close(x.grad, of.weight.sum(0) + through * mask, rtol=1e-4, atol=1e-3)
