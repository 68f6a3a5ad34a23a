from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flatout.ground.errors import BadInput
from flatout.multiplex.rows import Rows
from flatout.multiplex.vectors import steered

ROWS = Rows((1, None, 0, 2), (1, 1, -1, 1))
WIDTH, TOKENS = 5, 3


class Named(NamedTuple):
    hidden: Tensor
    cache: str


class Layer(nn.Module):
    """A linear map whose output is wrapped as a family of models would wrap it."""

    def __init__(self, wrap: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x).tanh()
        kinds: dict[str, Any] = {
            "tensor": y,
            "tuple": (y, "cache"),
            "named": Named(y, "cache"),
            "list": [y],
            "empty": (),
        }
        return kinds[self.wrap]


class Net(nn.Module):
    def __init__(self, *wraps: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(wrap) for wrap in wraps)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = y if isinstance(y, Tensor) else y[0]
        return x

    def named(self) -> dict[str, nn.Module]:
        return {f"layers.{number}": layer for number, layer in enumerate(self.layers)}


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, TOKENS, WIDTH)


def by_hand(model: Net, x: Tensor, table: Tensor, *, alpha: float, mask: Tensor | None = None) -> Tensor:
    """Each row alone, with its own vector."""
    assert ROWS.signs is not None
    results = []
    for row, (variant, sign) in enumerate(zip(ROWS.variants, ROWS.signs, strict=True)):
        y = x[row]
        for number, layer in enumerate(model.layers):
            out = layer(y)
            y = out if isinstance(out, Tensor) else out[0]
            if variant is not None:
                step = sign * alpha * table[number, variant].to(y.dtype)
                y = y + (step if mask is None else step * mask[row][:, None])
        results.append(y)
    return torch.stack(results)


@pytest.mark.parametrize("wraps", [("tensor", "tensor"), ("tuple", "named")])
def test_every_row_gets_its_own_vector(wraps: tuple[str, ...], x: Tensor) -> None:
    model, table = Net(*wraps), torch.randn(2, 3, WIDTH)
    with steered(model.named(), table, ROWS, alpha=0.5):
        result = model(x)
    torch.testing.assert_close(result, by_hand(model, x, table, alpha=0.5))
    assert torch.equal(result[1], model(x)[1])


def test_one_table_serves_every_layer(x: Tensor) -> None:
    model, table = Net("tensor", "tuple"), torch.randn(3, WIDTH)
    with steered(model.named(), table, ROWS):
        result = model(x)
    torch.testing.assert_close(result, by_hand(model, x, table.expand(2, -1, -1), alpha=1.0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_positions_outside_the_mask_are_left_alone(dtype: torch.dtype, x: Tensor) -> None:
    model, table = Net("tensor"), torch.randn(1, 3, WIDTH)
    mask = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0], [0, 0, 1]]).to(dtype)
    with steered(model.named(), table, ROWS, positions=mask):
        result = model(x)
    torch.testing.assert_close(result, by_hand(model, x, table, alpha=1.0, mask=mask))
    left_alone = mask.eq(0)
    assert torch.equal(result[left_alone], model(x)[left_alone])


def test_one_row_stands_for_all_and_a_function_says_where(x: Tensor) -> None:
    model, table = Net("tensor"), torch.randn(1, WIDTH)
    masks = [torch.zeros(4, 3, dtype=torch.bool), torch.ones(4, 3, dtype=torch.bool)]
    plain = model(x)
    with steered(model.named(), table, Rows((0,)), positions=lambda: masks[0]):
        assert model(x).equal(plain)
        masks.pop(0)
        every = model(x)
    with steered(model.named(), table, Rows((0,) * 4)):
        assert every.equal(model(x))


def test_a_strength_for_each_row(x: Tensor) -> None:
    model, table = Net("tensor"), torch.randn(1, 3, WIDTH)
    with steered(model.named(), table, ROWS, alpha=torch.tensor([2.0, 2.0, 0.0, 0.5])):
        result = model(x)
    with steered(model.named(), table, ROWS, alpha=2.0):
        assert torch.equal(result[0], model(x)[0])
    assert torch.equal(result[1:3], model(x)[1:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strength_zero_is_the_plain_model(dtype: torch.dtype, x: Tensor) -> None:
    model = Net("tensor", "tuple").to(dtype)
    table = torch.full((2, 3, WIDTH), torch.inf)
    x = -x.to(dtype).relu() * 0
    with steered(model.named(), table, ROWS, alpha=0.0):
        result = model(x)
    assert torch.equal(result.view(torch.uint8), model(x).view(torch.uint8))


def test_the_output_keeps_its_kind_and_type(x: Tensor) -> None:
    layer = Layer("named").to(torch.bfloat16)
    with steered({"layer": layer}, torch.randn(3, WIDTH), ROWS):
        result = layer(x.to(torch.bfloat16))
    assert isinstance(result, Named) and result.cache == "cache"
    assert result.hidden.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(4, WIDTH), (4, 2, 3, WIDTH)])
def test_rows_may_be_followed_by_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    layer, table, x = nn.Identity(), torch.randn(3, WIDTH), torch.zeros(shape)
    with steered({"layer": layer}, table, ROWS):
        result = layer(x)
    assert torch.equal(result[0], table[1].expand(shape[1:]))
    assert torch.equal(result[2], -table[0].expand(shape[1:]))


def test_rows_may_be_rewritten_in_use(x: Tensor) -> None:
    model, table = Net("tensor"), torch.randn(1, 3, WIDTH)
    plain = model(x)
    tables = Rows.plain(4).tables()
    with steered(model.named(), table, tables):
        assert torch.equal(model(x), plain)
        tables.write(range(4), ROWS)
        rewritten = model(x)
    torch.testing.assert_close(rewritten, by_hand(model, x, table, alpha=1.0))


def test_nothing_is_left_when_the_block_raises(x: Tensor) -> None:
    model = Net("tensor", "tuple")
    plain = model(x)

    def body() -> None:
        with steered(model.named(), torch.randn(3, WIDTH), ROWS):
            assert all(layer._forward_hooks for layer in model.layers)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert not any(layer._forward_hooks for layer in model.layers)
    assert torch.equal(model(x), plain)


def test_no_graph_is_kept(x: Tensor) -> None:
    """Neither the one that made the vectors nor that of a forward that is over."""
    layer = nn.Identity()
    made = [torch.randn(3, WIDTH, requires_grad=True) * 2]
    with steered({"layer": layer}, made[0], ROWS):
        table = weakref.ref(made.pop())
        assert not layer(x).requires_grad
        result = layer(x.clone().requires_grad_())
        assert result.requires_grad
        output = weakref.ref(result)
        del result
        gc.collect()
        assert table() is None and output() is None


def test_a_compiled_model_is_steered(x: Tensor) -> None:
    model, table = Net("tensor", "tuple"), torch.randn(2, 3, WIDTH)
    with steered(model.named(), table, ROWS), torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected)


def test_what_does_not_fit_is_refused(x: Tensor) -> None:
    model, table = Net("tensor"), torch.randn(3, WIDTH)

    def run(
        *,
        layers: dict[str, nn.Module] | None = None,
        vectors: Tensor = table,
        rows: Rows = ROWS,
        alpha: float | Tensor = 1.0,
        positions: Tensor | None = None,
    ) -> None:
        layers = layers or model.named()
        with steered(layers, vectors, rows, alpha=alpha, positions=positions):
            next(iter(layers.values()))(x)

    with pytest.raises(BadInput, match=r"the table is \(2, 3, 5\) for 1 layers"):
        run(vectors=torch.zeros(2, 3, WIDTH))
    with pytest.raises(BadInput, match="variant 3; the table has 3"):
        run(rows=Rows((3, 0, 0, 0)))
    with pytest.raises(BadInput, match=r"alpha is \(2,\) for 4 rows"):
        run(alpha=torch.ones(2))
    with pytest.raises(BadInput, match=r"layers.0 gives \(4, 3, 5\).*6 wide"):
        run(vectors=torch.zeros(3, WIDTH + 1))
    with pytest.raises(BadInput, match=r"5 rows of vectors"):
        run(rows=Rows((0,) * 5))
    with pytest.raises(BadInput, match=r"positions are \(4, 2\)"):
        run(positions=torch.ones(4, 2))
    with pytest.raises(BadInput, match="gives a list"):
        run(layers={"layer": Layer("list")})
    with pytest.raises(BadInput, match="gives a tuple"):
        run(layers={"layer": Layer("empty")})
