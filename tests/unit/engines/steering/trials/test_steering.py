from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flatout.engines.steering.settings import Turn
from flatout.engines.steering.trials.steering import Steering, SteeringTables, turn
from flatout.ground.errors import BadInput
from flatout.multiplex.models.families import read_decoder
from tests.support.multiplex import shared_model

WIDTH = 48


def direction(seed: int = 0) -> Tensor:
    drawn = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm()


def test_what_each_mode_that_reads_the_state_does() -> None:
    hidden = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    unit = direction()
    table = {"unit": unit.expand(2, 1, -1), "vector": (2.0 * unit).expand(2, 1, -1)}
    amount = torch.full((2, 1, 1), 2.0)

    def along(x: Tensor) -> Tensor:
        return x @ unit

    def across(x: Tensor) -> Tensor:
        return x - along(x)[..., None] * unit

    def done(mode: Turn, amount: Tensor = amount) -> Tensor:
        return turn(hidden, **table, amount=amount, mode=mode)

    torch.testing.assert_close(along(done("clamp")), torch.full((2, 3), 2.0))
    gone = done("project-out", torch.ones(2, 1, 1))
    torch.testing.assert_close(along(gone), torch.zeros(2, 3), atol=1e-5, rtol=0)
    half = done("project-out", torch.full((2, 1, 1), 0.5))
    torch.testing.assert_close(along(half), along(hidden) / 2)
    for mode in ("clamp", "project-out"):
        torch.testing.assert_close(across(done(mode)), across(hidden))
    turned = done("norm-preserving")
    torch.testing.assert_close(turned.norm(dim=-1), hidden.norm(dim=-1))
    assert (along(turned) > along(hidden)).all()


def test_an_entry_adds_at_its_own_layer_until_another_takes_it_over() -> None:
    tables = SteeringTables({0, 1}, num_entries=3, decoder=read_decoder(shared_model()))
    first, second, third = (
        Steering(layer=number % 2, direction=direction(number), amount=number + 1.0) for number in range(3)
    )
    tables.write([first, second])
    assert torch.equal(tables.of_layer[0][0], first.added())
    assert torch.equal(tables.of_layer[1][1], second.added())
    assert not tables.of_layer[1][0].any() and not tables.of_layer[0][1:].any()
    address = tables.of_layer[1].data_ptr()
    tables.replace(1, third)
    assert torch.equal(tables.of_layer[0][1], third.added()) and not tables.of_layer[1].any()
    assert tables.of_layer[1].data_ptr() == address
    tables.write([])
    assert not tables.of_layer[0].any()


def test_what_cannot_steer_is_named() -> None:
    with pytest.raises(BadInput, match="mode 'push'"):
        Steering(layer=0, direction=direction(), amount=1.0, mode="push")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="where 'here'"):
        Steering(layer=0, direction=direction(), amount=1.0, where="here")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="the amount is nan"):
        Steering(layer=0, direction=direction(), amount=float("nan"))
    with pytest.raises(BadInput, match=r"shape \(1, 48\)"):
        Steering(layer=0, direction=direction()[None], amount=1.0)
    with pytest.raises(BadInput, match="layer -1 is below 0"):
        Steering(layer=-1, direction=direction(), amount=1.0)


def test_a_trial_steers_each_layer_once_and_at_the_same_tokens() -> None:
    one = Steering(layer=0, direction=torch.ones(4), amount=1.0)
    other = replace(one, layer=1)
    assert [part.layer for part in replace(one, others=(other,)).parts] == [0, 1]
    assert replace(one, others=(other,)).only_adds
    assert not replace(one, others=(replace(other, mode="clamp"),)).only_adds
    for wrong in (one, replace(other, where="all"), replace(other, others=(replace(other, layer=2),))):
        with pytest.raises(BadInput, match="each layer once"):
            replace(one, others=(wrong,))
