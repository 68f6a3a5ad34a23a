"""Maps of one input together against each alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.blocks import Span
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.low_rank import Dropout, Map, adapted_linear
from flatout.engines.adapters.lora.products import Path, Products, products_of
from flatout.engines.adapters.lora.siblings import adapted_siblings, stack, stackable
from tests.support.adapters_packed import WIDTH, bert, blocks, filled, specs

NAMES = [f"encoder.layer.0.attention.self.{name}" for name in ("query", "key", "value")]
RANKS = (16, 24, 32)


def made(path: Path, spans: tuple[Span, ...], bank: AdapterBank) -> Products:
    return products_of(
        path,
        spans,
        ranks=RANKS,
        scales=bank.scales,
        rank=bank.rank,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("dropout", [None, Dropout(keep=0.5, keep_of_tokens=None)])
@pytest.mark.parametrize(
    ("path", "mixed"),
    [("dense", False), ("dense", True), ("loop", False), ("batched", False), ("grouped", False)],
)
@pytest.mark.parametrize("adapters", [(0, 1, 2), (1, 2), (2,)])
def test_together_is_each_alone(
    adapters: tuple[int, ...], path: Path, mixed: bool, dropout: Dropout | None
) -> None:
    model = bert(num_layers=1)
    bank = filled(AdapterBank(model, specs()))
    spans = tuple(Span(adapter=t, start=4 * place, stop=4 * place + 4) for place, t in enumerate(adapters))
    products = made(path, spans, bank)
    x = torch.randn(1, 4 * len(adapters), WIDTH)
    weights = torch.rand(4 * len(adapters), len(adapters) * bank.rank)
    found: list[tuple[Tensor, ...]] = []
    for together in (False, True):
        bank.zero_gradients()
        own, gain = x.clone().requires_grad_(), weights.clone().requires_grad_() if mixed else None
        common = {"products": products, "anchor": torch.zeros((), requires_grad=True), "gain": gain}
        linears = [model.get_submodule(name) for name in NAMES]
        sites = [bank.sites[name] for name in NAMES]
        if together:
            stacked = stack(
                bank,
                sites,
                weights=[linear.weight for linear in linears],
                biases=[linear.bias for linear in linears],
            )
            torch.manual_seed(0)
            results = adapted_siblings(own, of=stacked.bound(products), dropout=dropout, **common)
        else:
            results = ()
            for linear, site in zip(linears, sites, strict=True):
                of = Map(
                    weight=linear.weight.detach(),
                    bias=linear.bias.detach(),
                    shrink=bank.working[:, :, site.shrink],
                    expand=bank.working[:, :, site.expand],
                    shrink_gradient=bank.gradients[:, :, site.shrink],
                    expand_gradient=bank.gradients[:, :, site.expand],
                )
                torch.manual_seed(0)  # siblings share the dropout of their input
                results += (adapted_linear(own, of=of.bound(products), dropout=dropout, **common),)
        sum((place + 1) * y.pow(2).sum() for place, y in enumerate(results)).backward()
        assert own.grad is not None
        gradient = gain.grad if gain is not None else torch.zeros(())
        assert gradient is not None
        found.append((*(y.detach() for y in results), own.grad, gradient, bank.gradients.clone()))
    for alone, together_ in zip(*found, strict=True):
        torch.testing.assert_close(together_, alone, rtol=1e-4, atol=1e-4)
    assert found[0][-1].any()


def test_only_equal_maps_at_equal_distances_are_stacked() -> None:
    bank = AdapterBank(bert(num_layers=1), specs())
    sites = [bank.sites[name] for name in NAMES]
    assert stackable(sites) and stackable(sites[:2]) and stackable(sites[::2])
    assert not stackable(sites[:1])
    assert not stackable([sites[0], bank.sites["encoder.layer.0.intermediate.dense"]])
    assert not stackable([sites[0], sites[1], bank.sites["encoder.layer.0.output.dense"]])


def test_the_encoder_finds_query_key_and_value_by_itself() -> None:
    model = bert()
    with PackedEncoder(model, AdapterBank(model, specs()), path="dense") as encoder:
        assert [group.names for group in encoder._groups] == [
            NAMES,
            [name.replace("layer.0", "layer.1") for name in NAMES],
        ]
        encoder(blocks())
        assert all(group.stacked is not None and group.x is None for group in encoder._groups)
