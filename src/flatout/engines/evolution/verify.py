"""Compare every optimisation of a run with its plain form, on the run's own model, task and device.

What makes a run fast must not change what it computes: members in one batch instead of weights that are
written and restored, a cache and slots instead of whole forwards, compiled or hand-written steps instead of
operators, one product per stack instead of a sum over members.

A generation is judged token by token: after the same words, how far is the chosen token from the best one of
transformers' own forward with the member's weights formed?  The distance is in standard deviations of that
position's logits.  A choice between two tokens that differ by a rounding is not an error; a wrong mask,
position, factor or sign is whole deviations away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from flatout.engines.evolution import fitness
from flatout.engines.evolution.eggroll import Eggroll
from flatout.engines.evolution.rewards.pool import RewardPool
from flatout.engines.evolution.rewards.worker import score_row
from flatout.engines.evolution.settings import (
    EvolveSettings,
    choose_step_sizes,
    eggroll_options,
    make_settings,
    read_settings,
)
from flatout.engines.evolution.tasks.find_task import find_task
from flatout.engines.evolution.tasks.task import EvolutionTask, Prompt, ask_prompts
from flatout.engines.evolution.training import models
from flatout.engines.evolution.training.answers import facts_of
from flatout.engines.run.models import capability_of, choose_dtype
from flatout.engines.run.ranks import Ranks
from flatout.engines.run.settings import given_settings
from flatout.ground import OnProgress, ignore
from flatout.multiplex.decode.generator import end_tokens
from flatout.multiplex.decode.steppers import Mode
from flatout.multiplex.models.families import read_decoder

CheckUnit = Literal["deviations", "relative", "differing"]
MEMBERS, PROMPTS = 4, 4  # enough that variants, signs and lengths mix in a batch
MOST_TOKENS = 32
# The largest distance of a chosen token from the best one: what rounding of a dtype makes of deep sums.
DEVIATIONS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
UPDATE_ERROR = 2e-3  # the products of an update are in half precision on a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One optimisation and its plain form: the figure by which they differ, and its limit."""

    name: str
    against: str
    figure: float
    unit: CheckUnit
    limit: float

    @property
    def holds(self) -> bool:
        return self.figure <= self.limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """All checks of one model on one device."""

    model: str
    device: str
    dtype: str
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


def verify_evolution(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    on_progress: OnProgress = ignore,
) -> Verification:
    """Compare every optimisation of `evolve` with its plain form, on the settings' model and task.

    Nothing is trained and nothing is written.
    """
    chosen = make_settings(given_settings(settings, changes, read=read_settings))
    with Ranks.join(chosen.device) as ranks:
        device = ranks.device
        dtype = choose_dtype(chosen.dtype, capability=capability_of(device)).value
        model = models.open_model(Path(chosen.model), device=device, dtype=dtype)
        checks = []
        for check in _Subject(chosen, model, limit=DEVIATIONS[dtype]).checks():
            checks.append(check)
            on_progress(f"{check.name}: {check.figure:.2g} {check.unit}")
    return Verification(model=chosen.model, device=str(device), dtype=dtype, checks=tuple(checks))


class _Subject:
    """A small population of the run's kind, and prompts of its task."""

    def __init__(self, settings: EvolveSettings, model: Any, *, limit: float) -> None:
        self.model, self.limit = model, limit
        steps = choose_step_sizes(settings, read_decoder(model))
        self.settings = dataclasses.replace(
            settings, sigma=steps.sigma.value, lr=steps.lr.value, population=MEMBERS
        )
        self.es = Eggroll(model, kind="language", **eggroll_options(self.settings))
        self.task: EvolutionTask = find_task(settings.task, **settings.task_options)
        self.prompts = ask_prompts(self.task, "heldout", epoch=0, count=PROMPTS, seed=settings.seed)
        tokenizer = models.open_tokenizer(Path(settings.model), prompts=self.prompts)
        self.texts = models.Texts(tokenizer, stop=self.task.stop, chat=settings.chat, ends=end_tokens(model))
        self.ids = self.texts.ids(self.prompts)
        self.new = min(settings.max_new_tokens or self.task.max_new_tokens, MOST_TOKENS)

    def checks(self) -> Iterator[Check]:
        yield self._generation("batch, cache and slots", "one forward per text", plain=True, mode="eager")
        yield self._generation("members in one batch", "weights formed per member", mode="eager")
        for mode in _modes(self.es, asked=self.settings.mode):
            yield self._generation("steps", "weights formed per member", mode=mode)
        yield self._tokenizing()
        yield self._rewards()
        if self.settings.arithmetic == "float":
            yield self._update()

    def _generation(self, name: str, against: str, *, mode: Mode, plain: bool = False) -> Check:
        # Fewer slots than rows: some are refilled while others run.
        rows = len(self.ids) * (1 if plain else MEMBERS)
        done = self.es.generate(
            self.ids,
            max_new_tokens=self.new,
            plain=plain,
            slots=max(2, rows // 2),
            eos=self.texts.ends,
            mode=mode,
        )
        if name == "steps" and self.es.mode is not None:
            name = f"steps: {self.es.mode.value}"
        self.es.release()
        figure = 0.0
        for member, row in enumerate(done):
            with self.es.member_weights(None if plain else member):
                for prompt, completion in zip(self.ids, row, strict=True):
                    figure = max(figure, furthest(self.model, prompt, completion.tokens))
        return Check(name=name, against=against, figure=figure, unit="deviations", limit=self.limit)

    def _tokenizing(self) -> Check:
        """Compare one call of the tokenizer for all texts with a call per text."""
        encoded = _differing(self.ids, [self.texts.ids([prompt])[0] for prompt in self.prompts])
        decoded = _differing(self.texts.texts(self.ids), [self.texts.texts([ids])[0] for ids in self.ids])
        return _count("tokenizer in one call", "a call per text", encoded + decoded)

    def _rewards(self) -> Check:
        """Compare rewards of many rows in other processes with a call per row here."""
        rows = [(text, facts_of(prompt)) for prompt in self.prompts for text in (_expected(prompt), "", "7")]
        with RewardPool(
            self.task.reward, workers=self.settings.reward_workers, timeout_s=self.settings.reward_timeout_s
        ) as pool:
            together = pool.score(rows).values
        calls = [score_row(self.task.reward, row, index=number) for number, row in enumerate(rows)]
        alone = [score if isinstance(score, float) else None for score in calls]
        return _count("rewards in processes", "a call per row", _differing(together, alone))

    def _update(self) -> Check:
        """Compare one product per stack with the sum over members of fitness times noise, in float64."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        rewards = torch.randn(MEMBERS, len(self.ids), generator=generator, dtype=torch.float64)
        shaped = fitness.shape(rewards, how=self.settings.shaping).double()
        direct = {}
        for name in self.es.targets:
            deltas = [self.es.delta(name, member).double().cpu() for member in range(MEMBERS)]
            total = sum(value * delta for value, delta in zip(shaped.tolist(), deltas, strict=True))
            direct[name] = total / (self.es.sigma * MEMBERS)
        plain = dataclasses.replace(self.settings, optimizer="sgd", weight_decay=0.0, lr=1.0)
        es = Eggroll(self.model, kind="language", **eggroll_options(plain))
        before = {name: es.masters[name].double().cpu() for name in es.targets}
        es.tell(rewards, cosine=False)
        error = 0.0
        for name, expected in direct.items():
            moved = es.masters[name].double().cpu() - before[name]
            # A master holds the weight too: what it cannot resolve is not an error of the update.
            rounding = before[name].abs().max() * torch.finfo(torch.float32).eps
            off = ((moved - expected).abs() - rounding).clamp_min(0)
            error = max(error, float(off.norm() / expected.norm().clamp_min(1e-30)))
        return Check(
            name="one product per stack",
            against="a sum over members",
            figure=error,
            unit="relative",
            limit=UPDATE_ERROR,
        )


@torch.no_grad()
def furthest(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return how far the worst of `tokens` is below the best of transformers' forward, in deviations."""
    if not tokens:
        return 0.0
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return float(((logits.amax(1) - chosen) / logits.std(1).clamp_min(1e-30)).max())


def _modes(es: Eggroll, *, asked: Mode) -> list[Mode]:
    """Return the ways this device runs a step; on a CPU compiling takes long, and is checked if asked."""
    assert es.decoder is not None
    if es.decoder.device.type == "cuda":
        return ["compiled", "graph", "auto"]
    return [asked] if asked == "compiled" else []


def _differing(one: Sequence[Any], other: Sequence[Any]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def _expected(prompt: Prompt) -> str:
    """Return a plausible completion: the first fact of the answer, as text."""
    return next((str(value) for value in prompt.answer.values()), "")


def _count(name: str, against: str, differing: int) -> Check:
    return Check(name=name, against=against, figure=float(differing), unit="differing", limit=0.0)
