from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.ground.errors import BadInput
from flatout.multiplex.factors import Factors
from flatout.multiplex.noise.draws import FullNoise, draw_factors, draw_full
from flatout.multiplex.rows import Rows
from flatout.multiplex.swap import install, multiplexed

ROWS = Rows((1, None, 0, 2, 1, 2), (1, 1, -1, 1, -1, -1))


class Net(nn.Module):
    """Tokens through a norm, two linear maps and another norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.blocks = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 5, bias=False)])
        self.out_norm = nn.RMSNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out_norm(self.blocks[1](self.blocks[0](self.norm(x)).relu()))
        return y


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def factors_of(model: nn.Module, *names: str, rank: int = 2, sigma: float = 0.3) -> dict[str, Factors]:
    """Noise of the named modules; a stacked name takes the widths of its parts together."""
    found = {}
    for name in names:
        prefix, dot, last = name.rpartition(".")
        parts = [model.get_submodule(f"{prefix}{dot}{part}") for part in last.split("+")]
        shapes = [out_and_in(part) for part in parts]
        found[name] = draw_factors(
            name,
            out_width=sum(out for out, _ in shapes),
            in_width=shapes[0][1],
            seed=1,
            epoch=0,
            pairs=range(3),
            rank=rank,
            sigma=sigma,
        )
    return found


def out_and_in(module: nn.Module) -> tuple[int, ...]:
    shape = tuple(module.get_parameter("weight").shape)
    return shape if isinstance(module, nn.Linear) else shape[::-1]


def vectors_of(model: nn.Module, *names: str, sigma: float = 0.3) -> dict[str, FullNoise]:
    return {
        name: draw_full(
            name, width=model.get_parameter(name).numel(), seed=1, epoch=0, pairs=range(3), sigma=sigma
        )
        for name in names
    }


def materialised(
    model: nn.Module,
    factors: Mapping[str, Factors],
    vectors: Mapping[str, FullNoise],
    *,
    variant: int | None,
    sign: int,
) -> nn.Module:
    """A copy of the model with the weights of one variant."""
    own = copy.deepcopy(model)
    if variant is None:
        return own
    with torch.no_grad():
        for name, factor in factors.items():
            prefix, dot, last = name.rpartition(".")
            delta = factor.delta(variant, sign=sign)
            for part in last.split("+"):
                module = own.get_submodule(f"{prefix}{dot}{part}")
                weight = module.get_parameter("weight")
                width = weight.shape[0] if isinstance(module, nn.Linear) else weight.shape[1]
                piece, delta = delta[:width], delta[width:]
                weight += piece if isinstance(module, nn.Linear) else piece.T
            assert len(delta) == 0
        for name, noise in vectors.items():
            own.get_parameter(name).add_(sign * noise.scale * noise.values[variant].float())
    return own


def check_every_row(
    model: nn.Module,
    x: Tensor,
    factors: Mapping[str, Factors],
    vectors: Mapping[str, FullNoise],
    *,
    rows: Rows = ROWS,
    tolerance: float = 1e-6,
    output: Any = lambda result: result,
) -> None:
    with torch.no_grad():
        plain = output(model(x))
        with multiplexed(model, factors, rows, vectors=vectors):
            result = output(model(x))
        signs = rows.signs or (1,) * len(rows)
        for row, (variant, sign) in enumerate(zip(rows.variants, signs, strict=True)):
            own = materialised(model, factors, vectors, variant=variant, sign=sign)
            torch.testing.assert_close(result[row], output(own(x))[row], rtol=tolerance, atol=tolerance)
            if variant is None:
                assert torch.equal(result[row], plain[row])
        assert (result - plain).abs().max() > 100 * tolerance
        assert torch.equal(output(model(x)), plain)


LINEARS = ("blocks.0", "blocks.1")
VECTORS = ("blocks.0.bias", "norm.weight", "norm.bias", "out_norm.weight")


@pytest.mark.parametrize(
    ("linears", "vectors"),
    [(LINEARS, ()), (LINEARS, VECTORS), ((), VECTORS), ((), VECTORS[:1]), (LINEARS[:1], VECTORS[1:2])],
)
@pytest.mark.parametrize("middle", [(), (4,)])
@pytest.mark.parametrize("rows", [ROWS, Rows.grouped(3, size=2, antithetic=True)])
def test_every_row_runs_its_own_weights(
    linears: tuple[str, ...], vectors: tuple[str, ...], middle: tuple[int, ...], rows: Rows
) -> None:
    model = net()
    x = torch.randn(len(rows), *middle, 6, dtype=torch.float64)
    check_every_row(model, x, factors_of(model, *linears), vectors_of(model, *vectors), rows=rows)


def trace(model: nn.Module) -> dict[str, object]:
    """Everything by which a model could remember that it was multiplexed."""
    return {
        name: (id(module), type(module), sorted(vars(module)), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    } | {name: id(tensor) for name, tensor in model.named_parameters()}


def test_the_model_is_left_as_it_was_also_when_the_body_raises() -> None:
    model = net()
    before, keys = trace(model), list(model.state_dict())

    def body() -> None:
        with multiplexed(model, factors_of(model, *LINEARS), ROWS, vectors=vectors_of(model, *VECTORS)):
            assert trace(model) != before
            assert list(model.state_dict()) == keys
            assert isinstance(model.blocks[0], nn.Linear)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert trace(model) == before
    assert list(model.state_dict()) == keys


def test_an_installation_may_be_removed_twice_and_made_again() -> None:
    model, x = net(), torch.randn(6, 6, dtype=torch.float64)
    factors = factors_of(model, "blocks.0")
    first = install(model, factors, ROWS)
    result = model(x)
    first.remove()
    first.remove()
    second = install(model, factors, ROWS)
    first.remove()
    assert torch.equal(model(x), result)
    second.remove()
    assert not torch.equal(model(x), result)


def test_hooks_go_on_working() -> None:
    model, seen = net(), []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    with multiplexed(model, factors_of(model, "blocks.0"), ROWS):
        model(torch.randn(6, 6, dtype=torch.float64))
    assert seen == [1]


def test_tables_may_be_rewritten_in_use() -> None:
    model, x = net(), torch.randn(6, 6, dtype=torch.float64)
    factors, vectors = factors_of(model, *LINEARS), vectors_of(model, *VECTORS)
    tables = Rows.plain(6).tables()
    with multiplexed(model, factors, tables, vectors=vectors):
        plain = model(x)
        tables.write(range(6), ROWS)
        perturbed = model(x)
    assert torch.equal(plain, model(x))
    with multiplexed(model, factors, ROWS, vectors=vectors):
        assert torch.equal(perturbed, model(x))


def test_gradients_reach_trained_factors_and_the_shared_weight() -> None:
    model, x = net(), torch.randn(6, 4, 6, dtype=torch.float64)
    shrink, expand = torch.randn(3, 2, 6, requires_grad=True), torch.randn(3, 2, 8, requires_grad=True)
    with multiplexed(model, {"blocks.0": Factors(shrink, expand, 0.1)}, ROWS):
        model(x).square().sum().backward()
    assert shrink.grad is not None and expand.grad is not None
    assert shrink.grad.abs().min() > 0 and expand.grad.abs().min(dim=2).values.max() > 0
    assert model.get_parameter("blocks.0.weight").grad is not None


def test_a_compiled_model_runs_its_variants() -> None:
    model, x = net(torch.float32), torch.randn(6, 4, 6)
    factors, vectors = factors_of(model, *LINEARS), vectors_of(model, *VECTORS)
    with multiplexed(model, factors, ROWS, vectors=vectors), torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected)


def test_the_fast_path_of_an_encoder_layer_is_left_aside() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64).eval()
    x = torch.randn(6, 3, 8, dtype=torch.float64)
    check_every_row(model, x, factors_of(model, "linear1", "linear2"), vectors_of(model, "norm1.weight"))


def test_unknown_names_are_answered_with_near_ones() -> None:
    model = net()
    factor = factors_of(model, "blocks.0")["blocks.0"]
    with pytest.raises(BadInput, match=r"no module 'block.0' \(near: blocks.0, blocks.1\)"):
        install(model, {"block.0": factor}, ROWS)
    with pytest.raises(BadInput, match="norm is a LayerNorm"):
        install(model, {"norm": factor}, ROWS)
    with pytest.raises(BadInput, match="2 modules that could take noise"):
        install(model, {"x": factor}, ROWS)
    with pytest.raises(BadInput, match=r"blocks\.1\.bias is not a vector"):
        install(model, {}, ROWS, vectors={"blocks.1.bias": FullNoise(torch.zeros(3, 5), 1.0)})


def test_what_does_not_fit_is_refused_before_anything_is_touched() -> None:
    model = net()
    before = trace(model)
    factors = factors_of(model, "blocks.0")
    with pytest.raises(BadInput, match=r"8 in and 5 out"):
        install(model, {"blocks.1": factors["blocks.0"]}, ROWS)
    with pytest.raises(BadInput, match=r"variant 3; blocks\.0 has 3"):
        install(model, factors, Rows((3,)))
    with pytest.raises(BadInput, match=r"give \[variants, 6\]"):
        install(model, factors, ROWS, vectors={"norm.weight": FullNoise(torch.zeros(3, 5), 1.0)})
    plain = factors["blocks.0"]
    twice = Factors(plain.shrink, torch.cat([plain.expand] * 2, dim=2), plain.scale)
    with pytest.raises(BadInput, match="one name per module"):
        install(model, {"blocks.0+0": twice}, ROWS)
    assert trace(model) == before
    with multiplexed(model, factors, ROWS):
        with pytest.raises(BadInput, match="already multiplexed"):
            install(model, factors, ROWS)
        with pytest.raises(BadInput, match="2 rows, and the table of variants 6"):
            model(torch.randn(2, 6, dtype=torch.float64))
    assert trace(model) == before


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config).double().eval()
    return model


def test_a_llama_with_stacked_names_and_its_own_norms() -> None:
    model = tiny_llama()
    layer = "model.layers.1"
    names = [
        f"{layer}.self_attn.q_proj+k_proj+v_proj",
        f"{layer}.mlp.gate_proj+up_proj",
        f"{layer}.mlp.down_proj",
    ]
    vectors = vectors_of(model, f"{layer}.input_layernorm.weight", f"{layer}.self_attn.q_proj.bias")
    ids = torch.randint(0, 40, (6, 5))
    check_every_row(
        model, ids, factors_of(model, *names), vectors, output=lambda result: result.logits, tolerance=1e-5
    )


def test_stacked_biases_are_split() -> None:
    model = tiny_llama()
    path = "model.layers.0.self_attn"
    parts = vectors_of(model, *(f"{path}.{part}_proj.bias" for part in "qkv"))
    stacked = FullNoise(torch.cat([noise.values for noise in parts.values()], dim=1), 0.3)
    ids = torch.randint(0, 40, (6, 5))
    with torch.no_grad():
        with multiplexed(model, {}, ROWS, vectors={f"{path}.q_proj+k_proj+v_proj.bias": stacked}):
            together = model(ids).logits
        with multiplexed(model, {}, ROWS, vectors=parts):
            assert torch.equal(together, model(ids).logits)


def test_gpt2_with_transposed_weights() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model = GPT2LMHeadModel(config).double().eval()
    factors = factors_of(model, "transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj")
    vectors = vectors_of(model, "transformer.h.0.attn.c_attn.bias", "transformer.ln_f.weight")
    ids = torch.randint(0, 40, (6, 5))
    check_every_row(model, ids, factors, vectors, output=lambda result: result.logits, tolerance=1e-5)


def test_a_norm_that_stores_its_weight_less_one() -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    model = nn.Sequential(Gemma2RMSNorm(8))
    check_every_row(model, torch.randn(6, 3, 8), {}, vectors_of(model, "0.weight"))


def test_small_noise_beside_a_bfloat16_weight_is_not_rounded_away() -> None:
    """1 + 0.001 is 1 in bfloat16; the noise must still reach the product."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = nn.Sequential(LlamaRMSNorm(512)).to(torch.bfloat16)
    x = torch.randn(6, 3, 512, dtype=torch.bfloat16)
    with multiplexed(model, {}, ROWS, vectors=vectors_of(model, "0.weight", sigma=1e-3)):
        result = model(x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result[1], model(x)[1])
    assert (result[0] != model(x)[0]).any()
