from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flatout.ground.errors import BadInput
from flatout.multiplex.decode.forward import group_of
from flatout.multiplex.decode.generator import Generator, generate
from flatout.multiplex.decode.requests import Request
from flatout.multiplex.decode.sampling import Sampling
from flatout.multiplex.factors import Factors
from flatout.multiplex.models.decoder import Decoder
from flatout.multiplex.models.families import read_decoder
from flatout.multiplex.rows import Rows
from flatout.multiplex.vectors import steered
from tests.support.multiplex import (
    FAMILIES,
    prompts_of,
    random_factors,
    reference_logits,
    reference_tokens,
    shared_model,
    tiny_model,
)

VARIANTS = ((0, 1), (0, -1), (None, 1), (1, 1), (2, -1))


@torch.no_grad()
def materialised(model: Any, decoder: Decoder, factors: dict[str, Factors], variant: int, sign: int) -> Any:
    """A copy of the model with one variant's change added to the weights of every part."""
    changed = copy.deepcopy(model)
    for name, product in decoder.projections().items():
        delta = factors[name].delta(variant, sign=sign)
        start = 0
        for part, rows in product.parts:
            module, own = changed.get_submodule(part), delta[start : start + rows]
            start += rows
            module.weight += own.T if type(module).__name__ == "Conv1D" else own
    return changed


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_is_its_materialised_model(family: str) -> None:
    model = shared_model(family)
    decoder = read_decoder(model)
    factors = random_factors(decoder, num_variants=3)
    prompts = prompts_of([5, 9, 14, 3, 8])
    requests = [
        Request(prompt=prompt, variant=variant, sign=sign, key=key)
        for key, (prompt, (variant, sign)) in enumerate(zip(prompts, VARIANTS, strict=True))
    ]
    completions = Generator(decoder, slots=2, max_tokens=40, factors=factors).generate(
        requests, max_new_tokens=10
    )
    plain = []
    for request, completion in zip(requests, completions, strict=True):
        own = model
        if request.variant is not None:
            own = materialised(model, decoder, factors, request.variant, request.sign)
        assert completion.tokens == reference_tokens(own, request.prompt, max_new_tokens=10)
        plain.append(reference_tokens(model, request.prompt, max_new_tokens=10))
    assert [one.tokens for one in completions] != plain


@torch.no_grad()
def test_the_first_token_follows_the_materialised_logits() -> None:
    model = shared_model()
    decoder = read_decoder(model)
    factors = random_factors(decoder, num_variants=1)
    (prompt,) = prompts_of([12])
    generator = Generator(decoder, slots=1, max_tokens=20, factors=factors)
    (one,) = generator.generate([Request(prompt=prompt, variant=0)], max_new_tokens=1)
    logits = reference_logits(materialised(model, decoder, factors, 0, 1), prompt)[-1]
    assert one.tokens == (int(logits.argmax()),)


def steered_tokens(
    prompt: tuple[int, ...], layer: int, vector: torch.Tensor, *, shared: int
) -> tuple[int, ...]:
    """One row, no cache: a hook on one layer adds the vector after `shared` tokens."""
    model, tokens = shared_model(), list(prompt)
    for _ in range(10):
        where = torch.arange(len(tokens))[None] >= shared
        layers = {"layer": model.model.layers[layer]}
        with steered(layers, vector[None], Rows((0,)), positions=where):
            tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tuple(tokens[len(prompt) :])


@torch.no_grad()
def test_vectors_are_added_at_their_layer() -> None:
    """Trials of different layers, directions and positions in one batch = each alone."""
    model = shared_model()
    variants = [(0, torch.randn(48)), (1, torch.randn(48)), (0, torch.randn(48))]
    vectors = {layer: torch.zeros(3, 48) for layer in (0, 1)}
    for number, (layer, vector) in enumerate(variants):
        vectors[layer][number] = vector
    requests = [
        Request(prompt=prompt, variant=variant, sign=sign, shared=shared)
        for prompt, variant, sign, shared in zip(
            prompts_of([5, 9, 14, 3, 8, 8]),
            (0, 1, 2, None, 0, 1),
            (1, 1, -1, 1, -1, 1),
            (0, 8, 6, 0, 7, 0),
            strict=True,
        )
    ]
    completions = Generator(model, slots=3, max_tokens=40, vectors=vectors).generate(
        requests, max_new_tokens=10
    )
    for request, completion in zip(requests, completions, strict=True):
        layer, vector = (0, torch.zeros(48)) if request.variant is None else variants[request.variant]
        wanted = steered_tokens(request.prompt, layer, request.sign * vector, shared=request.shared)
        assert completion.tokens == wanted
    assert completions[0].tokens != reference_tokens(model, requests[0].prompt, max_new_tokens=10)


def test_vectors_must_fit_their_layer() -> None:
    with pytest.raises(BadInput, match=r"vectors for layer 2 .*layers 0 to 1"):
        Generator(shared_model(), slots=1, max_tokens=20, vectors={2: torch.zeros(1, 48)})
    with pytest.raises(BadInput, match=r"layer 1 are \(1, 47\) on cpu .*\[variants, 48\]"):
        Generator(shared_model(), slots=1, max_tokens=20, vectors={1: torch.zeros(1, 47)})


def test_the_model_says_what_ends_a_text() -> None:
    model = tiny_model()
    prompts = prompts_of([4, 9, 2])
    free = [reference_tokens(model, prompt, max_new_tokens=12) for prompt in prompts]
    model.generation_config.eos_token_id = [free[0][3], free[1][6]]
    ended = [reference_tokens(model, prompt, max_new_tokens=12) for prompt in prompts]
    assert ended != free
    assert [tuple(one) for one in generate(model, prompts, max_new_tokens=12)] == ended
    assert [tuple(one) for one in generate(model, prompts, max_new_tokens=12, eos=())] == free


@pytest.mark.parametrize("rank", [1, 3])
def test_rows_in_the_order_of_their_variants_need_no_gather(rank: int) -> None:
    """The grouped form of the products gives the tokens of the gathered one."""
    decoder = read_decoder(shared_model())
    factors = random_factors(decoder, num_variants=3, rank=rank)
    requests = [
        Request(prompt=prompt, variant=row // 2, sign=1 - row % 2 * 2, key=row)
        for row, prompt in enumerate(prompts_of([5, 9, 14, 3, 8, 8]))
    ]

    def tokens(order: list[Request]) -> dict[int, tuple[int, ...]]:
        generator = Generator(decoder, slots=6, max_tokens=40, factors=factors)
        completions = generator.generate(order, max_new_tokens=10)
        assert (group_of(generator.state.tables.index) == 2) == (order is requests)
        return {one.request.key: one.tokens for one in completions}

    assert tokens(requests) == tokens(requests[::-1])


def test_factors_are_redrawn_in_place() -> None:
    decoder = read_decoder(shared_model())
    factors, others = (random_factors(decoder, num_variants=1, seed=seed) for seed in (2, 3))
    request = Request(prompt=prompts_of([12])[0], variant=0)

    def first(generator: Generator) -> tuple[int, ...]:
        return generator.generate([request], max_new_tokens=10)[0].tokens

    generator = Generator(decoder, slots=1, max_tokens=30, factors=factors)
    before = first(generator)
    for name, one in factors.items():
        one.shrink.copy_(others[name].shrink)
        one.expand.copy_(others[name].expand)
    after = first(generator)
    assert after != before
    assert after == first(Generator(decoder, slots=1, max_tokens=30, factors=others))


def test_some_products_may_stay_plain() -> None:
    decoder = read_decoder(shared_model())
    name = next(iter(decoder.projections()))
    factors = {name: random_factors(decoder, num_variants=1)[name]}
    zeros = {
        other: Factors(torch.zeros(1, 1, one.weight.shape[1]), torch.zeros(1, 1, one.weight.shape[0]), 1.0)
        for other, one in decoder.projections().items()
    }
    request = Request(prompt=prompts_of([12])[0], variant=0)
    tokens = [
        Generator(decoder, slots=1, max_tokens=30, factors=given)
        .generate([request], max_new_tokens=10)[0]
        .tokens
        for given in (factors, {**zeros, **factors})
    ]
    assert tokens[0] == tokens[1]


def test_half_precision_generates() -> None:
    model = tiny_model().to(torch.bfloat16)
    decoder = read_decoder(model)
    factors = random_factors(decoder, num_variants=1)
    requests = [Request(prompt=prompt, variant=0) for prompt in prompts_of([4, 9])]
    completions = Generator(decoder, slots=2, max_tokens=30, factors=factors).generate(
        requests, max_new_tokens=5
    )
    assert [len(one.tokens) for one in completions] == [5, 5]


def test_the_short_form_gives_lists_of_tokens() -> None:
    prompts = [list(prompt) for prompt in prompts_of([4, 9, 2])]
    greedy = generate(shared_model(), prompts, max_new_tokens=6, slots=2)
    assert greedy == [list(reference_tokens(shared_model(), prompt, max_new_tokens=6)) for prompt in prompts]
    sampled = [
        generate(shared_model(), prompts, max_new_tokens=6, slots=slots, sampling=Sampling(temperature=1.0))
        for slots in (1, 3)
    ]
    assert sampled[0] == sampled[1] != greedy
    assert generate(shared_model(), [], max_new_tokens=6) == []


def test_the_model_is_asked_for_no_more_positions_than_it_has() -> None:
    with pytest.raises(BadInput, match="max_tokens=257 is out of range: the model has 256 positions"):
        Generator(shared_model(), slots=1, max_tokens=257)
    with pytest.raises(BadInput, match="slots=0"):
        Generator(shared_model(), slots=0, max_tokens=20)
    full = Generator(shared_model("gpt2"), slots=1, max_tokens=256)
    (prompt,) = prompts_of([250])
    (one,) = full.generate([Request(prompt=prompt)], max_new_tokens=6)
    assert one.tokens == reference_tokens(shared_model("gpt2"), prompt, max_new_tokens=6)


def test_a_shared_prefix_may_end_near_the_last_position() -> None:
    """Padding behind the shorter rest has no position left of its own."""
    model = shared_model("gpt2")
    (base,) = prompts_of([250])
    requests = [
        Request(prompt=base, shared=100),
        Request(prompt=base[:248], key=1, shared=245),
        Request(prompt=base[:20], key=2, shared=2),
    ]
    completions = Generator(model, slots=3, max_tokens=256).generate(requests, max_new_tokens=6)
    for one in completions:
        assert one.tokens == reference_tokens(model, one.request.prompt, max_new_tokens=6)


def test_neighbours_of_a_tile_run_one_variant() -> None:
    decoder = read_decoder(shared_model())
    factors = random_factors(decoder, num_variants=3)
    requests = [
        Request(prompt=prompt, variant=row // 2, sign=1 - row % 2 * 2, key=row)
        for row, prompt in enumerate(prompts_of([5, 9, 14, 3, 8, 8]))
    ]

    def tokens(tile: int) -> list[tuple[int, ...]]:
        generator = Generator(decoder, slots=4, max_tokens=40, factors=factors, tile=tile)
        return [one.tokens for one in generator.generate(requests, max_new_tokens=10)]

    assert tokens(2) == tokens(1)
    with pytest.raises(BadInput, match=r"4 slots cannot be cut into tiles of 3.*multiple"):
        tokens(3)
    with pytest.raises(BadInput, match=r"4 slots cannot be cut into tiles of 0"):
        tokens(0)


def test_the_decision_says_why_no_kernel_of_ours_runs() -> None:
    generator = Generator(shared_model(), slots=1, max_tokens=20)
    assert generator.decision.value == "eager"
    with pytest.raises(BadInput, match="mode 'fused' needs a CUDA device; the model is on cpu"):
        Generator(shared_model(), slots=1, max_tokens=20, mode="fused")


def test_factors_must_fit_their_product() -> None:
    decoder = read_decoder(shared_model())
    name = "model.layers.0.mlp.down_proj"
    good = random_factors(decoder, num_variants=1)[name]
    with pytest.raises(BadInput, match="'lm_head' is not a product of the model"):
        Generator(decoder, slots=1, max_tokens=20, factors={"lm_head": good})
    swapped = Factors(good.expand, good.shrink, 1.0)
    with pytest.raises(BadInput, match=r"down_proj are for \(80, 48\).*\(48, 80\)"):
        Generator(decoder, slots=1, max_tokens=20, factors={name: swapped})
