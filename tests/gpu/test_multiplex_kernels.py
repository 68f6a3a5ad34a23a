"""Noise and multiplexed products on a GPU: the numbers of a CPU, and nothing that a graph cannot hold."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.multiplex.factors import Factors
from flatout.multiplex.noise import draws
from flatout.multiplex.noise.draws import draw_factors, normals, uniforms
from flatout.multiplex.products import linear as linear_module
from flatout.multiplex.products.linear import linear
from flatout.multiplex.rows import Rows, RowTables
from tests.support.gpu import no_synchronisation

pytestmark = pytest.mark.gpu

DTYPES = [torch.int8, torch.bfloat16, torch.float32]
LAYOUTS = [
    (Rows((2, None, 1, 1, 0, 2), (1, 1, -1, 1, -1, 1)), 0),
    (Rows.grouped(3, size=2, antithetic=True), 2),
]


def draw(device: str, dtype: torch.dtype, *, count: int = 5003, first: int = 3) -> Tensor:
    return normals(
        seed=9,
        epoch=4,
        parameter="w",
        side="expand",
        pairs=range(5, 12),
        count=count,
        first=first,
        device=device,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [True, False])
def test_a_gpu_draws_the_numbers_of_a_cpu(
    dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "HAS_TRITON", kernel and draws.HAS_TRITON)
    assert torch.equal(draw("cuda", dtype).cpu(), draw("cpu", dtype))


def test_uniforms_are_those_of_a_cpu_and_wait_for_nothing() -> None:
    keys, positions = torch.arange(50)[:, None] + 2**40, torch.arange(70)[None, :]
    here, there = keys.cuda(), positions.cuda()
    with no_synchronisation():
        drawn = uniforms(seed=5, keys=here, positions=there)
    assert torch.equal(drawn.cpu(), uniforms(seed=5, keys=keys, positions=positions))


def factors(dtype: torch.dtype, *, device: str, rank: int = 3, sigma: float = 0.1) -> Factors:
    return draw_factors(
        "w",
        out_width=200,
        in_width=96,
        seed=1,
        epoch=0,
        pairs=range(4),
        rank=rank,
        sigma=sigma,
        device=device,
        dtype=dtype,
    )


def run(x: Tensor, weight: Tensor, drawn: Factors, tables: RowTables, *, group_size: int) -> Tensor:
    return linear(
        x,
        weight=weight,
        bias=None,
        shrink=drawn.shrink,
        expand=drawn.expand,
        index=tables.index,
        gain=tables.sign * drawn.scale,
        group_size=group_size,
    )


@pytest.mark.parametrize(("rows", "group_size"), LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor_dtype", DTYPES)
@pytest.mark.parametrize("kernel", [True, False])
def test_a_gpu_computes_what_a_cpu_computes(
    rows: Rows,
    group_size: int,
    tokens: int,
    dtype: torch.dtype,
    factor_dtype: torch.dtype,
    kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_module, "HAS_TRITON", kernel and linear_module.HAS_TRITON)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, tokens, 96, generator=generator).to(dtype)
    weight = (torch.randn(200, 96, generator=generator) / 10).to(dtype)
    drawn = factors(factor_dtype, device="cpu")
    wide = Factors(drawn.shrink.double(), drawn.expand.double(), drawn.scale)
    expected = run(x.double(), weight.double(), wide, rows.tables(), group_size=0)
    on_gpu = factors(factor_dtype, device="cuda")
    result = run(x.cuda(), weight.cuda(), on_gpu, rows.tables("cuda"), group_size=group_size)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 8e-3}[dtype]
    torch.testing.assert_close(result.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    plain = F.linear(x.cuda(), weight.cuda())
    for row, variant in enumerate(rows.variants):
        if variant is None:
            assert torch.equal(result[row], plain[row])


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_captured_graph_sees_rewritten_rows(tokens: int) -> None:
    x, weight = torch.randn(6, tokens, 96, device="cuda"), torch.randn(200, 96, device="cuda")
    drawn = factors(torch.int8, device="cuda")
    tables = Rows.plain(6).tables("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(x, weight, drawn, tables, group_size=0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(x, weight, drawn, tables, group_size=0)
    graph.replay()
    assert torch.equal(result, F.linear(x, weight))
    tables.write(range(6), LAYOUTS[0][0])
    graph.replay()
    assert torch.equal(result, run(x, weight, drawn, tables, group_size=0))
    assert not torch.equal(result, F.linear(x, weight))


@pytest.mark.parametrize(("rows", "group_size"), LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_gradients_are_those_of_a_cpu(rows: Rows, group_size: int, tokens: int) -> None:
    x, weight = torch.randn(6, tokens, 96), torch.randn(200, 96) / 10
    drawn = factors(torch.float32, device="cpu")
    found = []
    for device in ("cpu", "cuda"):
        leaves = [
            leaf.detach().clone().to(device).requires_grad_()
            for leaf in (x, weight, drawn.shrink, drawn.expand)
        ]
        own = Factors(leaves[2], leaves[3], drawn.scale)
        result = run(leaves[0], leaves[1], own, rows.tables(device), group_size=group_size)
        gradients = torch.autograd.grad(result.tanh().sum(), leaves)
        found.append([gradient.cpu() for gradient in gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("tokens", [1, 40])
def test_it_compiles_into_one_graph(tokens: int) -> None:
    x, weight = torch.randn(6, tokens, 96, device="cuda"), torch.randn(200, 96, device="cuda")
    drawn, tables = factors(torch.int8, device="cuda"), LAYOUTS[1][0].tables("cuda")

    def step(x: Tensor) -> Tensor:
        return run(x, weight, drawn, tables, group_size=2).relu()

    torch.testing.assert_close(torch.compile(step, fullgraph=True)(x), step(x))
