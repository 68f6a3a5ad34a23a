"""Steered text: what steering costs a full batch, and how many trials an hour fit when they share it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from racing import Arm, race, rows_of
from subjects import Subject, prompts_of

from flatout.engines.steering.trials.hooked_trials import HookedTrials
from flatout.engines.steering.trials.packed_trials import PackedTrials
from flatout.engines.steering.trials.steered_model import steered_model
from flatout.engines.steering.trials.steering import Steering
from flatout.engines.steering.trials.trial_engine import AnswerPair, ChoiceRow, TextRow
from flatout.multiplex.decode.sampling import Sampling
from flatout.multiplex.decode.steppers import SlotState, Stepper
from flatout.multiplex.models.decoder import Decoder

ENDING_SHARE = 1 / 48  # of the vocabulary ends a text where texts are to differ in length


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How much is generated: rows of a batch, tokens of a prompt and of a text, trials and questions."""

    rows: int
    prompt: int
    new: int
    trials: int
    questions: int
    trial_slots: int


class Counting:
    """A stepper that counts its steps."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper, self.num_steps = stepper, 0
        self.reads_beyond = stepper.reads_beyond

    def prefill(self, *args: Any, **options: Any) -> None:
        self._stepper.prefill(*args, **options)

    def step(self, state: SlotState, *, bucket: int) -> None:
        self.num_steps += 1
        self._stepper.step(state, bucket=bucket)


def steered(subject: Subject, decoder: Decoder, load: Load, *, seconds: float) -> list[dict[str, Any]]:
    """Tokens per second of a full batch: unsteered, one configuration, one for every row."""
    prompts = prompts_of(subject, load.rows, tokens=load.prompt, seed=5)
    every = some_steerings(subject, load.rows)
    one = every[min(subject.num_layers // 2, load.rows - 1)]
    arms: dict[str, Arm] = {}
    engines: dict[str, PackedTrials] = {}

    def arm(name: str, steerings: Sequence[Steering | None]) -> None:
        rows = [TextRow(prompt=prompt, steering=s) for prompt, s in zip(prompts, steerings, strict=True)]
        engine = engines[name] = _engine(decoder, slots=load.rows, load=load)
        arms[name] = lambda: _tokens(engine.texts(rows, max_new_tokens=load.new))

    arm("unsteered", [None] * load.rows)
    arm("steered, one configuration", [one] * load.rows)
    arm(f"steered, {load.rows} configurations", every)
    found = race(arms, seconds=seconds, cuda=subject.device.type == "cuda")
    against = {name: {"of unsteered": "unsteered"} for name in arms if name.startswith("steered")}
    rows = rows_of(found, unit="tokens", against=against)
    for row in rows:
        generator = engines[row["arm"]]._generator
        if generator is not None:
            row["mode"] = generator.decision.value
    return rows


def trials(subject: Subject, decoder: Decoder, load: Load, *, seconds: float) -> list[dict[str, Any]]:
    """Trials per second when each is judged by a text for every question."""
    prompts = prompts_of(subject, load.questions, tokens=load.prompt, seed=6)
    steerings = some_steerings(subject, load.trials)
    packed = _engine(decoder, slots=load.trial_slots, load=load)
    alone = _engine(decoder, slots=load.questions, load=load)
    random_ends = _engine(
        decoder, slots=load.trial_slots, load=load, sampling=Sampling(temperature=1.0), eos=_ends(decoder)
    )
    efficiency: dict[str, list[float]] = {"packed": [], "packed, texts of differing length": []}

    def together(name: str, engine: PackedTrials) -> float:
        rows = [
            TextRow(prompt=prompt, steering=s, key=i * load.questions + j)
            for i, s in enumerate(steerings)
            for j, prompt in enumerate(prompts)
        ]
        counting = _counting(engine)
        tokens = _tokens(engine.texts(rows, max_new_tokens=load.new))
        if counting is not None:
            efficiency[name].append(tokens / (counting.num_steps * load.trial_slots))
        return load.trials

    def one_at_a_time() -> float:
        for s in steerings[:2]:
            alone.texts([TextRow(prompt=prompt, steering=s) for prompt in prompts], max_new_tokens=load.new)
        return 2

    def transformers_batch() -> float:
        _generate(subject, prompts, steerings[0], load.new)
        return 1

    def transformers_single() -> float:
        """The seed's way; one question is timed, and a trial is as many as there are."""
        _generate(subject, prompts[:1], steerings[0], load.new)
        return 1 / load.questions

    arms: dict[str, Arm] = {
        "packed": lambda: together("packed", packed),
        "packed, texts of differing length": lambda: together(
            "packed, texts of differing length", random_ends
        ),
        "one trial at a time, this engine": one_at_a_time,
        "one trial at a time, transformers' generate": transformers_batch,
        "one question at a time, transformers' generate": transformers_single,
    }
    found = race(arms, seconds=seconds, cuda=subject.device.type == "cuda")
    rows = rows_of(found, unit="trials", against=_against(arms, ours=2))
    for row in rows:
        if row["per_s"] is not None:
            row["trials per hour"] = round(3600 * row["per_s"])
        if efficiency.get(row["arm"]):
            row["packing efficiency"] = efficiency[row["arm"]][-1]
    return rows


def choices(subject: Subject, decoder: Decoder, load: Load, *, seconds: float) -> list[dict[str, Any]]:
    """Trials per second when each is judged by the probabilities of two answers to every question."""
    prompts = prompts_of(subject, load.questions, tokens=load.prompt, seed=7)
    answers = prompts_of(subject, 2 * load.questions, tokens=4, seed=8)
    asked = [
        AnswerPair(prompt=prompt, positive=(1, *answers[2 * i]), negative=(2, *answers[2 * i + 1]))
        for i, prompt in enumerate(prompts)
    ]
    steerings = some_steerings(subject, load.trials)
    engine = PackedTrials(decoder, batch_tokens=16384)
    hooked = HookedTrials(subject.model, batch_tokens=16384)

    def run(where: PackedTrials, some: Sequence[Steering]) -> float:
        rows = [ChoiceRow(choice=choice, steering=s) for s in some for choice in asked]
        return sum(1 for _ in where.choices(rows)) / load.questions

    def forgetful() -> float:
        """Nothing is kept from one trial to the next."""
        engine.weights_changed()
        return run(engine, steerings[:1])

    arms: dict[str, Arm] = {
        "packed, two answers": lambda: run(engine, steerings),
        "one trial at a time, this engine": forgetful,
        "one trial at a time, the model's own forward": lambda: run(hooked, steerings[:1]),
    }
    found = race(arms, seconds=seconds, cuda=subject.device.type == "cuda")
    rows = rows_of(found, unit="trials", against=_against(arms, ours=1))
    for row in rows:
        if row["per_s"] is not None:
            row["trials per hour"] = round(3600 * row["per_s"])
    return rows


def some_steerings(subject: Subject, count: int) -> list[Steering]:
    """Configurations that all differ, over all layers."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        direction = torch.randn(subject.width, generator=generator)
        layer = number % subject.num_layers
        made.append(Steering(layer=layer, direction=direction / direction.norm(), amount=0.1 + 0.01 * number))
    return made


def _against(arms: Mapping[str, Arm], *, ours: int) -> dict[str, dict[str, str]]:
    """The first arms against all others."""
    names = list(arms)
    rivals = {f"times {name}": name for name in names[ours:]}
    return dict.fromkeys(names[:ours], rivals)


def _engine(decoder: Decoder, *, slots: int, load: Load, **options: Any) -> PackedTrials:
    options.setdefault("eos", ())
    return PackedTrials(decoder, slots=slots, max_tokens=load.prompt + load.new, **options)


def _tokens(texts: Sequence[tuple[int, ...]]) -> float:
    return float(sum(map(len, texts)))


def _ends(decoder: Decoder) -> list[int]:
    count = max(1, round(decoder.vocabulary * ENDING_SHARE))
    return random.Random(0).sample(range(decoder.vocabulary), count)


def _counting(engine: PackedTrials) -> Counting | None:
    """Counts the steps of an engine's generator from here on; None before its first call made one."""
    generator = engine._generator
    if generator is None:
        return None
    inner = generator.stepper
    generator.stepper = Counting(inner._stepper if isinstance(inner, Counting) else inner)
    return generator.stepper


def _generate(subject: Subject, prompts: Sequence[tuple[int, ...]], steering: Steering, new: int) -> None:
    ids = torch.tensor(prompts, device=subject.device)
    with torch.no_grad(), steered_model(subject.model, steering):
        subject.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
