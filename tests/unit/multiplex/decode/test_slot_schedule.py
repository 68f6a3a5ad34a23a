from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.multiplex.decode.cache import bucket_of
from flatout.multiplex.decode.generator import Generator
from flatout.multiplex.decode.requests import Completion, GenerationProgress, Request
from flatout.multiplex.decode.sampling import Sampling
from flatout.multiplex.decode.slot_schedule import Schedule
from flatout.multiplex.decode.steppers import Portable, PromptPart, SlotState, Stepper
from flatout.multiplex.models.families import read_decoder
from tests.support.multiplex import prompts_of, random_factors, reference_tokens, shared_model

generating = importlib.import_module("flatout.multiplex.decode.generator")
DECODER = read_decoder(shared_model())
FACTORS = random_factors(DECODER, num_variants=3)
LENGTHS = (5, 1, 17, 30, 9, 2)
REQUESTS = tuple(
    Request(prompt=prompt, variant=variant, sign=sign, key=key, max_new_tokens=limit)
    for key, (prompt, variant, sign, limit) in enumerate(
        zip(
            prompts_of(LENGTHS),
            (0, None, 2, 0, None, 1),
            (1, 1, -1, -1, 1, 1),
            (4, 20, 33, 1, 9, None),
            strict=True,
        )
    )
)


def make(slots: int, *, temperature: float = 0.0, **options: object) -> Generator:
    sampling = Sampling(temperature=temperature, seed=5)
    return Generator(DECODER, slots=slots, max_tokens=70, factors=FACTORS, sampling=sampling, **options)  # type: ignore[arg-type]


def tokens_of(completions: list[Completion]) -> dict[int, tuple[int, ...]]:
    return {one.request.key: one.tokens for one in completions}


def one_at_a_time(requests: Sequence[Request], **options: object) -> dict[int, tuple[int, ...]]:
    found = {}
    for request in requests:
        found |= tokens_of(make(1, **options).generate([request], max_new_tokens=12))
    return found


ALONE = {temperature: one_at_a_time(REQUESTS, temperature=temperature) for temperature in (0.0, 1.0)}


@settings(max_examples=10)
@given(st.permutations(REQUESTS), st.integers(1, 4), st.sampled_from([0.0, 1.0]))
def test_packed_is_one_at_a_time_in_any_order(order: list[Request], slots: int, temperature: float) -> None:
    completions = make(slots, temperature=temperature).generate(order, max_new_tokens=12)
    assert [one.request for one in completions] == order
    assert tokens_of(completions) == ALONE[temperature]
    assert all(len(one.tokens) == (one.request.max_new_tokens or 12) for one in completions)


@settings(max_examples=10)
@given(st.permutations(REQUESTS), st.integers(1, 4), st.integers(1, 20), st.booleans())
def test_a_host_that_looks_while_steps_run_sees_the_same(
    order: list[Request], slots: int, ahead: int, with_stops: bool
) -> None:
    options = {"stop": [ALONE[0.0][2][10:12]], "eos": [ALONE[0.0][1][7]]} if with_stops else {}
    expected = [(one.tokens, one.finished) for one in make(2, **options).generate(order, max_new_tokens=12)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generating, "Schedule", partial(Schedule, ahead=ahead))
        found = make(slots, **options).generate(order, max_new_tokens=12)
    assert [(one.tokens, one.finished) for one in found] == expected


def test_sampled_tokens_are_not_greedy_ones() -> None:
    assert ALONE[0.0] != ALONE[1.0]


def test_a_text_that_is_cut_and_continued_draws_the_same_tokens() -> None:
    """Noise belongs to the position in the text, not to the number of tokens drawn so far."""
    whole = make(1, temperature=1.0).generate([Request(prompt=(5, 6, 7), key=9)], max_new_tokens=20)[0].tokens
    cut = Request(prompt=(5, 6, 7, *whole[:8]), key=9)
    assert make(1, temperature=1.0).generate([cut], max_new_tokens=12)[0].tokens == whole[8:]


def test_a_generator_is_used_again_and_again() -> None:
    generator = make(2)
    for order in (REQUESTS, REQUESTS[::-1]):
        assert tokens_of(generator.generate(order, max_new_tokens=12)) == ALONE[0.0]


def test_an_interrupted_generation_leaves_nothing_behind() -> None:
    generator = make(2)

    def stop(completion: Completion) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(REQUESTS, max_new_tokens=12, on_finished=stop)
    assert tokens_of(generator.generate(REQUESTS, max_new_tokens=12)) == ALONE[0.0]


def test_a_row_that_breaks_down_does_not_harm_the_next_in_its_slot() -> None:
    generator = make(1)
    generator.state.cache.storage.fill_(torch.nan)
    assert tokens_of(generator.generate(REQUESTS, max_new_tokens=12)) == ALONE[0.0]


# Ends


def test_end_tokens_end_a_row() -> None:
    (prompt,) = prompts_of([5])
    free = make(1).generate([Request(prompt=prompt)], max_new_tokens=30)[0]
    assert free.finished == "length"
    end = free.tokens[10]
    first = free.tokens.index(end)
    ended = make(1, eos=[end]).generate([Request(prompt=prompt)], max_new_tokens=30)[0]
    assert ended.finished == "eos"
    assert ended.tokens == free.tokens[: first + 1]


@pytest.mark.parametrize("at", [0, 7, 14, 15, 16, 25])
def test_stop_sequences_end_a_row_wherever_the_host_looks(at: int) -> None:
    request = Request(prompt=prompts_of([9])[0], key=3)
    free = make(1, temperature=1.0).generate([request], max_new_tokens=30)[0].tokens
    stop = free[at : at + 3]
    generator = make(2, temperature=1.0, stop=[stop, (1, 2, 3, 4, 5)])
    ended = generator.generate([request] * 3, max_new_tokens=30)
    assert not generator.state.alive.any()
    assert [(one.tokens, one.finished) for one in ended] == [(free[: at + 3], "stop")] * 3


# Sharing


class Counting:
    """A stepper that counts the prompt tokens that it is given."""

    def __init__(self, inner: Stepper) -> None:
        self.inner = inner
        self.reads_beyond = inner.reads_beyond
        self.num_tokens = 0

    def prefill(self, state: SlotState, parts: Sequence[PromptPart], *, plain: bool = False) -> None:
        self.num_tokens += sum(len(part.tokens) for part in parts)
        self.inner.prefill(state, parts, plain=plain)

    def step(self, state: SlotState, *, bucket: int) -> None:
        assert int(state.position[state.alive].max()) < bucket
        assert bucket == bucket_of(bucket)
        self.inner.step(state, bucket=bucket)


def counted(slots: int) -> tuple[Generator, Counting]:
    generator = make(slots)
    assert isinstance(generator.stepper, Portable)
    generator.stepper = counting = Counting(generator.stepper)
    return generator, counting


def test_equal_plain_prompts_are_computed_once() -> None:
    (prompt,) = prompts_of([20])
    generator, counting = counted(4)
    completions = generator.generate([Request(prompt=prompt, key=key) for key in range(4)], max_new_tokens=12)
    assert counting.num_tokens == 19
    assert {one.tokens for one in completions} == {
        reference_tokens(shared_model(), prompt, max_new_tokens=12)
    }


def test_prefixes_are_shared_by_variants_and_refills() -> None:
    """Six rows of one question, through two slots: the question runs once, each row's own end six times."""
    question, *ends = prompts_of([20, 1, 2, 3, 1, 4, 5])
    requests = [
        Request(prompt=question + end, variant=variant, sign=sign, key=key, shared=20)
        for key, (end, variant, sign) in enumerate(
            zip(ends, (0, 1, None, 0, 2, None), (1, 1, 1, -1, 1, 1), strict=True)
        )
    ]
    private = one_at_a_time(requests)
    generator, counting = counted(2)
    assert tokens_of(generator.generate(requests, max_new_tokens=12)) == private
    assert counting.num_tokens == 20 + sum(len(end) - 1 for end in ends)
    assert tokens_of(generator.generate(requests, max_new_tokens=12)) == private
    assert counting.num_tokens == 20 + 2 * sum(len(end) - 1 for end in ends)
    generator.weights_changed()
    generator.generate(requests[:1], max_new_tokens=1)
    assert counting.num_tokens == 40 + 2 * sum(len(end) - 1 for end in ends)


def test_a_plain_request_is_the_same_shared_or_not() -> None:
    prompts = prompts_of([20, 31])
    requests = [
        Request(prompt=prompt, key=key, shared=shared)
        for key, (prompt, shared) in enumerate(
            (prompt, shared) for prompt in prompts for shared in (0, 1, 7, 19)
        )
    ]
    completions = make(3).generate(requests, max_new_tokens=12)
    for one in completions:
        assert one.tokens == reference_tokens(shared_model(), one.request.prompt, max_new_tokens=12)


# Tiles

PAIRS = tuple(
    Request(prompt=prompt, variant=variant, sign=sign, key=key, max_new_tokens=limit)
    for key, (prompt, variant, sign, limit) in enumerate(
        zip(
            prompts_of([5, 1, 17, 30, 9, 2, 4]),
            (0, 0, None, None, 2, 2, 1),
            (1, -1, 1, 1, -1, 1, 1),
            (4, 20, 33, 1, 9, 40, 3),
            strict=True,
        )
    )
)


@settings(max_examples=5)
@given(st.permutations(range(3)), st.sampled_from([2, 4, 6]))
def test_tiles_change_nothing_but_the_order(order: list[int], slots: int) -> None:
    """Whole pairs in any order, the odd one last."""
    requests = [PAIRS[2 * pair + half] for pair in order for half in (0, 1)] + [PAIRS[6]]
    completions = make(slots, tile=2).generate(requests, max_new_tokens=12)
    assert [one.request for one in completions] == requests
    assert tokens_of(completions) == one_at_a_time(requests)


def test_a_tile_is_refilled_when_all_of_it_is_free() -> None:
    """Two tiles; the slot that ends first waits for its neighbour, not for the other tile."""
    drawn: list[list[int]] = []
    finished: list[int] = []

    def source() -> Iterator[Request]:
        limits = (1, 30, 20, 20, 1, 1, 1, 1)
        for key, (prompt, limit) in enumerate(zip(prompts_of([3] * 8), limits, strict=True)):
            drawn.append(sorted(finished))
            yield Request(prompt=prompt, key=key, max_new_tokens=limit)

    generator = make(4, tile=2)
    completions = generator.generate(
        source(), max_new_tokens=50, on_finished=lambda one: finished.append(one.request.key)
    )
    assert [len(one.tokens) for one in completions] == [1, 30, 20, 20, 1, 1, 1, 1]
    assert drawn[:4] == [[]] * 4
    assert drawn[4] == drawn[5] == [0, 2, 3]  # request 0 has ended long before, and its slot has waited
    assert drawn[6] == drawn[7] == [0, 1, 2, 3, 4, 5]


def test_a_tile_of_different_variants_is_refused() -> None:
    requests = [PAIRS[0], PAIRS[1], PAIRS[0], PAIRS[2]]
    with pytest.raises(BadInput, match=r"requests 2 to 3 share a tile and run different variants .*tile=1"):
        make(4, tile=2).generate(requests, max_new_tokens=12)
    assert len(make(4).generate(requests, max_new_tokens=12)) == 4


# Requests drawn one by one


def test_an_iterator_is_drawn_as_slots_become_free() -> None:
    drawn: list[int] = []
    finished: list[int] = []

    def source() -> Iterator[Request]:
        for number, prompt in enumerate(prompts_of([3, 4, 5, 6, 7])):
            drawn.append(len(finished))
            yield Request(prompt=prompt, key=number)

    seen: list[GenerationProgress] = []
    completions = make(2).generate(
        source(),
        max_new_tokens=3,
        on_finished=lambda one: finished.append(one.request.key),
        on_progress=seen.append,
    )
    assert [one.request.key for one in completions] == [0, 1, 2, 3, 4]
    assert drawn == [0, 0, 2, 2, 4]
    assert [(one.num_finished, one.num_requests, one.num_tokens) for one in seen] == [
        (2, None, 6),
        (4, None, 12),
        (5, None, 15),
    ]


def test_a_list_is_checked_before_anything_runs() -> None:
    finished: list[Completion] = []
    with pytest.raises(BadInput, match="request 6 has an empty prompt"):
        make(2).generate([*REQUESTS, Request(prompt=())], max_new_tokens=12, on_finished=finished.append)
    assert not finished


def test_progress_of_a_list_knows_its_length() -> None:
    seen: list[GenerationProgress] = []
    make(2).generate(REQUESTS, max_new_tokens=12, on_progress=seen.append)
    assert {one.num_requests for one in seen} == {len(REQUESTS)}
    assert seen[-1].num_finished == len(REQUESTS)
    assert [one.num_tokens for one in seen] == sorted(one.num_tokens for one in seen)


def test_no_request_is_no_work() -> None:
    assert make(2).generate([], max_new_tokens=3) == []
