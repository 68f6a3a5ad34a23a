from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.ground.errors import BadInput
from flatout.multiplex.factors import Factors
from flatout.multiplex.products.linear import linear, multiplex_linear
from flatout.multiplex.rows import Rows

EPSILON = {torch.float64: 1e-7, torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@dataclass(frozen=True, kw_only=True)
class Case:
    """An input, its weights and its factors, with what each row should give by materialised weights."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    factors: Factors
    rows: Rows

    @property
    def gain(self) -> Tensor:
        return self.rows.tables().sign * self.factors.scale

    @property
    def group_size(self) -> int:
        groups = self.rows.groups
        return groups.size if groups else 0

    def run(self, *, group_size: int) -> Tensor:
        return linear(
            self.x,
            weight=self.weight,
            bias=self.bias,
            shrink=self.factors.shrink,
            expand=self.factors.expand,
            index=self.rows.tables().index,
            gain=self.gain,
            group_size=group_size,
        )

    def materialised(self) -> tuple[Tensor, Tensor]:
        """The result of each row's own weights in float64, and the sum of its terms' sizes."""
        shrink, expand = self.factors.shrink.double(), self.factors.expand.double()
        bias = None if self.bias is None else self.bias.double()
        results, sizes = [], []
        for row, variant in enumerate(self.rows.variants):
            weight = self.weight.double()
            size = weight.abs()
            if variant is not None:
                gain = self.gain[row].double()
                weight = weight + gain * expand[variant].T @ shrink[variant]
                size = size + gain.abs() * expand[variant].abs().T @ shrink[variant].abs()
            results.append(F.linear(self.x[row].double(), weight, bias))
            sizes.append(F.linear(self.x[row].double().abs(), size, None if bias is None else bias.abs()))
        return torch.stack(results), torch.stack(sizes)


def make_case(
    rows: Rows,
    *,
    middle: tuple[int, ...] = (),
    widths: tuple[int, int] = (7, 5),
    rank: int = 2,
    spare: int = 1,
    biased: bool = True,
    dtype: torch.dtype = torch.float32,
    factor_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    factor_dtype = factor_dtype or dtype
    in_width, out_width = widths

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def factor(*shape: int) -> Tensor:
        values = normal(*shape)
        is_integer = factor_dtype == torch.int8
        return (
            (values * 32).round().clamp(-127, 127).to(factor_dtype) if is_integer else values.to(factor_dtype)
        )

    variants = rows.num_variants + spare
    return Case(
        x=normal(len(rows), *middle, in_width).to(dtype),
        weight=normal(out_width, in_width).to(dtype),
        bias=normal(out_width).to(dtype) if biased else None,
        factors=Factors(
            factor(variants, rank, in_width),
            factor(variants, rank, out_width),
            0.3 / 1024 if factor_dtype == torch.int8 else 0.3,
        ),
        rows=rows,
    )


@st.composite
def row_tables(draw: st.DrawFn) -> Rows:
    if draw(st.booleans()):
        antithetic = draw(st.booleans())
        size = draw(st.integers(1, 3)) * (2 if antithetic else 1)
        return Rows.grouped(draw(st.integers(1, 4)), size=size, antithetic=antithetic)
    variants = draw(st.lists(st.none() | st.integers(0, 4), min_size=1, max_size=8))
    signs = draw(st.lists(st.sampled_from([1, -1]), min_size=len(variants), max_size=len(variants)))
    return Rows(tuple(variants), tuple(signs))


@given(
    rows=row_tables(),
    middle=st.sampled_from([(), (1,), (3,), (2, 3), (0,)]),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    rank=st.integers(1, 5),
    spare=st.integers(0, 2),
    biased=st.booleans(),
    dtypes=st.sampled_from(
        [(dtype, factor) for dtype in EPSILON for factor in (dtype, torch.float32, torch.int8)]
    ),
    seed=st.integers(0, 1000),
)
def test_every_row_runs_its_own_weights(
    rows: Rows,
    middle: tuple[int, ...],
    widths: tuple[int, int],
    rank: int,
    spare: int,
    biased: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    dtype, factor_dtype = dtypes
    # A table of unperturbed rows alone names variant 0 too: some factors must exist.
    case = make_case(
        rows,
        middle=middle,
        widths=widths,
        rank=rank,
        spare=max(spare, 1 - rows.num_variants),
        biased=biased,
        dtype=dtype,
        factor_dtype=factor_dtype,
        seed=seed,
    )
    expected, sizes = case.materialised()
    plain = F.linear(case.x, case.weight, case.bias)
    for group_size in {0, case.group_size}:
        result = case.run(group_size=group_size)
        assert result.dtype == dtype and result.shape == expected.shape
        assert ((result.double() - expected).abs() <= 4 * EPSILON[dtype] * sizes + 1e-30).all()
        for row, variant in enumerate(rows.variants):
            if variant is None:
                assert torch.equal(result[row], plain[row])


def test_float16_survives_long_integer_dot_products() -> None:
    """Dot products with int8 noise pass the largest float16 unless their unit is divided out."""
    case = make_case(
        Rows((0, 1, None)), widths=(4096, 8), rank=1, dtype=torch.float16, factor_dtype=torch.int8
    )
    loud = Case(
        x=case.x * 40,
        weight=case.weight / 64,
        bias=None,
        factors=Factors(case.factors.shrink, case.factors.expand, 1e-3 / 1024),
        rows=case.rows,
    )
    assert (loud.x.float() @ loud.factors.shrink[:, 0].float().T).abs().max() > 65504
    expected, sizes = loud.materialised()
    assert ((loud.run(group_size=0).double() - expected).abs() <= 2**-9 * sizes).all()


def test_a_broken_variant_does_not_reach_other_rows() -> None:
    case = make_case(Rows((None, 1, 0)))
    case.factors.shrink[0], case.factors.expand[0] = torch.nan, torch.inf
    result = case.run(group_size=0)
    assert torch.equal(result[0], F.linear(case.x, case.weight, case.bias)[0])
    assert result[1].isfinite().all() and not result[2].isfinite().any()


def test_scale_zero_is_the_plain_model() -> None:
    case = make_case(Rows.grouped(3, size=2), middle=(4,))
    plain = F.linear(case.x, case.weight, case.bias)
    for group_size in (0, 2):
        silent = multiplex_linear(
            case.x,
            case.weight,
            case.bias,
            case.factors.shrink,
            case.factors.expand,
            case.rows.tables().index,
            torch.zeros(6),
            group_size,
        )
        assert torch.equal(silent, plain)


def double_arguments(rows: Rows, *, group_size: int, rank: int = 2) -> tuple[object, ...]:
    case = make_case(rows, middle=(3,), rank=rank, dtype=torch.float64)
    assert case.bias is not None
    leaves = [case.x, case.weight, case.bias, case.factors.shrink, case.factors.expand]
    return (*(leaf.requires_grad_() for leaf in leaves), rows.tables().index, case.gain, group_size)


LAYOUTS = [
    (Rows((2, None, 1, 1, 0), (1, 1, -1, 1, -1)), 0),
    (Rows.grouped(3, size=2, antithetic=True), 0),
    (Rows.grouped(3, size=2, antithetic=True), 2),
]


@pytest.mark.parametrize(("rows", "group_size"), LAYOUTS)
@pytest.mark.parametrize("rank", [1, 3])
def test_derivatives_are_right(rows: Rows, group_size: int, rank: int) -> None:
    arguments = double_arguments(rows, group_size=group_size, rank=rank)
    assert torch.autograd.gradcheck(multiplex_linear, arguments)


@pytest.mark.parametrize(("rows", "group_size"), LAYOUTS)
def test_derivatives_equal_those_of_materialised_weights(rows: Rows, group_size: int) -> None:
    case = make_case(rows, middle=(3,), dtype=torch.float64)
    leaves = [case.x, case.weight, case.factors.shrink, case.factors.expand]
    for leaf in leaves:
        leaf.requires_grad_()
    weights = torch.linspace(-1, 1, case.weight.shape[0], dtype=torch.float64)
    ours = torch.autograd.grad((case.run(group_size=group_size).sin() * weights).sum(), leaves)
    theirs = torch.autograd.grad((case.materialised()[0].sin() * weights).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)


def test_gradients_of_float32_factors_beside_bfloat16_activations() -> None:
    case = make_case(Rows((0, 1, 0)), dtype=torch.bfloat16, factor_dtype=torch.float32)
    for factor in (case.factors.shrink, case.factors.expand):
        factor.requires_grad_()
    case.run(group_size=0).float().square().sum().backward()
    for factor in (case.factors.shrink, case.factors.expand):
        assert factor.grad is not None and factor.grad.dtype == torch.float32
        assert factor.grad[:2].abs().min() > 0 and factor.grad[2].eq(0).all()


def test_a_backward_to_the_input_alone_keeps_no_activation() -> None:
    case = make_case(Rows.grouped(2, size=2), factor_dtype=torch.int8)
    x = case.x.clone().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: kept.append(saved) or saved, lambda saved: saved
    ):
        Case(x=x, weight=case.weight, bias=None, factors=case.factors, rows=case.rows).run(group_size=2)
    assert kept and all(saved.data_ptr() != x.data_ptr() for saved in kept)


@pytest.mark.parametrize(("rows", "group_size"), LAYOUTS)
def test_the_operator_is_registered_as_torch_wants_it(rows: Rows, group_size: int) -> None:
    checks = torch.library.opcheck(
        torch.ops.flatout.multiplex_linear.default, double_arguments(rows, group_size=group_size)
    )
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("training", [False, True])
def test_it_compiles_into_one_graph(training: bool) -> None:
    case = make_case(Rows.grouped(3, size=2, antithetic=True), middle=(4,))
    x = case.x.requires_grad_(training)

    tables, gain = case.rows.tables(), case.gain

    def step(x: Tensor) -> Tensor:
        return linear(
            x,
            weight=case.weight,
            bias=case.bias,
            shrink=case.factors.shrink,
            expand=case.factors.expand,
            index=tables.index,
            gain=gain,
            group_size=2,
        ).relu()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    plain, fused = step(x), compiled(x)
    assert torch.equal(plain, fused)
    if training:
        ours, theirs = (torch.autograd.grad(result.sum(), x)[0] for result in (fused, plain))
        assert torch.equal(ours, theirs)


def test_autocast_is_heeded_as_a_linear_heeds_it() -> None:
    case = make_case(Rows((0, None, 1)), middle=(2,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = case.run(group_size=0)
        plain = F.linear(case.x, case.weight, case.bias)
    assert result.dtype == plain.dtype == torch.bfloat16
    assert torch.equal(result[1], plain[1])
    assert torch.allclose(result.float(), case.run(group_size=0), atol=0.2)


def test_sizes_that_do_not_match_are_refused() -> None:
    case = make_case(Rows((0, 1, 2)), spare=0)
    other = Case(x=case.x[:2], weight=case.weight, bias=None, factors=case.factors, rows=case.rows)
    with pytest.raises(BadInput, match="2 rows, and the table of variants 3"):
        other.run(group_size=0)
    with pytest.raises(BadInput, match="group_size=0"):
        case.run(group_size=2)
    double = make_case(Rows.grouped(2, size=2), spare=0)
    with pytest.raises(BadInput, match="groups of 1 for 2 variants"):
        double.run(group_size=1)
