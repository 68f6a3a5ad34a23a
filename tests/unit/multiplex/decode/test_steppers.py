from __future__ import annotations

import functools

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

from flatout.ground.errors import BadInput
from flatout.multiplex.decode import steppers
from flatout.multiplex.decode.generator import Generator
from flatout.multiplex.decode.requests import Request
from flatout.multiplex.decode.sampling import Sampling
from flatout.multiplex.decode.steppers import (
    EOS,
    LENGTH,
    RUNNING,
    Graphed,
    Portable,
    PromptPart,
    SlotState,
    choose_mode,
)
from flatout.multiplex.models.families import read_decoder
from tests.support.multiplex import prompts_of, random_factors, shared_model, tiny_model


def state_of(slots: int, *, eos: tuple[int, ...] = (9,)) -> SlotState:
    return SlotState.empty(read_decoder(shared_model()), slots=slots, max_tokens=20, eos=eos)


def test_living_rows_advance_and_end() -> None:
    state = state_of(4)
    state.alive[:3] = True
    state.limit.copy_(torch.tensor([2, 5, 5, 5]))
    state.position.copy_(torch.tensor([3, 4, 5, 6]))
    state.advance(torch.tensor([1, 2, 9, 7]))
    assert state.alive.tolist() == [True, True, False, False]
    assert state.reason.tolist() == [RUNNING, RUNNING, EOS, RUNNING]
    state.advance(torch.tensor([3, 4, 5, 7]))
    assert state.reason.tolist() == [LENGTH, RUNNING, EOS, RUNNING]
    state.advance(torch.tensor([6, 9, 6, 7]))
    assert state.reason.tolist() == [LENGTH, EOS, EOS, RUNNING]
    assert state.count.tolist() == [2, 3, 1, 0]
    assert state.position.tolist() == [5, 7, 6, 6]
    assert [row[:count] for row, count in zip(state.emitted.tolist(), state.count.tolist(), strict=True)] == [
        [1, 3],
        [2, 4, 9],
        [9],
        [],
    ]
    assert state.token.tolist()[:3] == [3, 9, 9]


def test_the_end_token_counts_before_the_length() -> None:
    state = state_of(1)
    state.alive[:], state.limit[:] = True, 1
    state.advance(torch.tensor([9]))
    assert state.reason.tolist() == [EOS]


def test_without_end_tokens_only_the_length_ends_a_row() -> None:
    state = state_of(1, eos=())
    state.alive[:], state.limit[:] = True, 2
    for token in (9, 9):
        state.advance(torch.tensor([token]))
    assert state.reason.tolist() == [LENGTH]


@torch.no_grad()
def test_prefill_batches_of_any_size_leave_the_same_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = read_decoder(shared_model())
    prompts = prompts_of([9, 1, 30, 4, 17, 9])
    slots = [3, 1, 0, 5, 2, 4]

    def prefilled(num_tokens: int) -> SlotState:
        monkeypatch.setattr(steppers, "PREFILL_TOKENS", num_tokens)
        state = SlotState.empty(decoder, slots=6, max_tokens=40, eos=())
        portable = Portable(decoder, factors={}, vectors={}, sampling=Sampling(), compiled=False)
        portable.prefill(state, [PromptPart(*part) for part in zip(slots, prompts, strict=True)])
        return state

    together, apart = prefilled(10_000), prefilled(1)
    for slot, prompt in zip(slots, prompts, strict=True):
        ours = together.cache.storage[:, :, slot, :, : len(prompt)]
        torch.testing.assert_close(ours, apart.cache.storage[:, :, slot, :, : len(prompt)])
        assert ours.any()


def test_padding_bounds_a_batch() -> None:
    parts = [PromptPart(slot, (1,) * length) for slot, length in enumerate([9000, 1, 2000, 9000, 2])]
    batches = steppers.batches(parts)
    assert [[len(part.tokens) for part in batch] for batch in batches] == [[1, 2, 2000], [9000], [9000]]


SAMPLINGS = (
    Sampling(),
    *(Sampling(temperature=1.0, seed=seed) for seed in (1, 2, 2**63)),
    Sampling(temperature=1.0, top_k=9, top_p=0.9, seed=5),
)


@torch.no_grad()
def test_compiled_steps_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and functionalised for real, each step's parts as whole graphs; only the C++ that would come of
    it is left out: it takes long.  One decoder for all samplings, so that its block is compiled once."""
    whole = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)
    torch._dynamo.reset()
    decoder = read_decoder(tiny_model(num_hidden_layers=1))
    factors = random_factors(decoder, num_variants=2)
    requests = [
        Request(prompt=prompt, variant=variant, sign=sign, key=key)
        for key, (prompt, variant, sign) in enumerate(
            zip(prompts_of([5, 3, 11]), (0, None, 1), (1, 1, -1), strict=True)
        )
    ]
    for sampling in SAMPLINGS:
        tokens = {}
        for mode in ("eager", "compiled"):
            generator = Generator(
                decoder, slots=2, max_tokens=40, factors=factors, mode=mode, sampling=sampling
            )
            tokens[mode] = [one.tokens for one in generator.generate(requests, max_new_tokens=8)]
        assert tokens["compiled"] == tokens["eager"], sampling


@pytest.mark.parametrize("rank", [0, 4])
@torch.no_grad()
def test_a_block_is_compiled_once_for_all_depths_and_buckets_of_a_model(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bfloat16 models of different sizes in one process, each over three of the four buckets it has."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter, fullgraph=True))
    torch._dynamo.reset()
    requests = [
        Request(prompt=prompt, variant=key if rank else None, key=key)
        for key, prompt in enumerate(prompts_of([5, 3]))
    ]
    for number, changes in enumerate(({}, {"hidden_size": 32, "intermediate_size": 56}), start=1):
        decoder = read_decoder(tiny_model("qwen2", **changes).to(torch.bfloat16))
        factors = random_factors(decoder, num_variants=2, rank=rank) if rank else {}
        caches = []
        for mode in ("eager", "compiled"):
            generator = Generator(decoder, slots=2, max_tokens=200, factors=factors, mode=mode)
            generator.generate(requests, max_new_tokens=1)
            caches.append(generator.state.cache.storage.float().clone())
        assert (caches[1] - caches[0]).norm() < 0.02 * caches[0].norm()
        generator.generate(requests, max_new_tokens=140)
        assert len(decoder.blocks) == 2
        # a block, the end of a step, and for prompts of any length the terms of each of the four products
        assert counter.frame_count == (6 if rank else 2) * number


def test_the_choice_of_a_mode_says_why() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_mode("auto", device=cpu).value == "eager"
    assert "compil" in choose_mode("auto", device=cpu).reason
    assert choose_mode("auto", device=cuda).value == "fused"
    kept = choose_mode("auto", device=cuda, obstacle="layer norms")
    assert (kept.value, kept.source) == ("graph", "assumed") and "layer norms" in kept.reason
    for mode in ("eager", "compiled", "graph"):
        chosen = choose_mode(mode, device=cuda, obstacle="layer norms")
        assert (chosen.value, chosen.reason) == (mode, "asked for")
    assert choose_mode("fused", device=cuda).value == "fused"


def test_a_mode_that_cannot_run_is_refused() -> None:
    for mode in ("graph", "fused"):
        with pytest.raises(BadInput, match=f"'{mode}' needs a CUDA device; the model is on cpu"):
            choose_mode(mode, device=torch.device("cpu"))
    with pytest.raises(BadInput, match=r"'fused' cannot run this model: layer norms .*mode='auto'"):
        choose_mode("fused", device=torch.device("cuda"), obstacle="layer norms")


@pytest.mark.gpu
@torch.no_grad()
def test_captured_steps_give_the_same_tokens() -> None:
    decoder = read_decoder(tiny_model().cuda())
    requests = [Request(prompt=prompt, key=key) for key, prompt in enumerate(prompts_of([5, 3, 70, 11]))]
    tokens = {}
    for mode in ("eager", "graph"):
        generator = Generator(decoder, slots=2, max_tokens=120, mode=mode)
        assert isinstance(generator.stepper, Graphed) == (mode == "graph")
        tokens[mode] = [one.tokens for one in generator.generate(requests, max_new_tokens=40)]
    assert tokens["graph"] == tokens["eager"]
