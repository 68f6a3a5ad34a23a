"""EGGROLL: evolution strategies whose members differ from one model by low-rank noise.

    es = Eggroll(model, population=64, sigma=0.02, lr=0.5)
    for _ in range(200):
        with es.forward(rows_per_member=8) as members:      # any module: 64 x 8 rows in one batch
            output = members(inputs.repeat(64, 1))
        es.tell(score(output).view(64, 8))                  # rewards [members, prompts]

A language model generates instead: `es.generate(prompts, max_new_tokens=...)` returns the completions of
every member.  Member i runs W + s_i sigma E, where s is 1 for even and -1 for odd members, and the two
members of a pair share E; no weight is ever copied or restored.  Noise is a function of (seed, epoch //
noise_reuse, parameter, pair, element), so an update is rebuilt from the rewards alone, in this process or in
another.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from flatout.engines.evolution import fitness
from flatout.engines.evolution.population.perturbations import NoiseKind, NoiseSource, Perturbations
from flatout.engines.evolution.population.weights import (
    Kind,
    Others,
    choose_weights,
    is_language_model,
    linear_weights,
    stacks_of,
    unmoved_parameters,
    vectors,
    warn_of_frozen,
)
from flatout.engines.evolution.update import integer
from flatout.engines.evolution.update.directions import Coefficients, UpdateTally
from flatout.engines.evolution.update.masters import Masters, MastersPlace, OptimizerName
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.multiplex.decode.generator import Generator, end_tokens
from flatout.multiplex.decode.requests import Completion, Request
from flatout.multiplex.decode.sampling import Sampling
from flatout.multiplex.decode.steppers import Mode
from flatout.multiplex.models.decoder import Decoder
from flatout.multiplex.models.families import read_decoder
from flatout.multiplex.rows import Rows
from flatout.multiplex.swap import multiplexed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flatout.engines.evolution.population.weights import Names
    from flatout.engines.evolution.update.directions import Statistics

ArithmeticKind = Literal["float", "int8"]


class Eggroll:
    """Ask for members' outputs (`forward` or `generate`), tell their rewards (`tell`)."""

    def __init__(
        self,
        model: nn.Module | Decoder,
        *,
        population: int,
        sigma: float,
        lr: float,
        rank: int = 1,
        targets: Sequence[str] | None = None,
        others: Others = "freeze",
        antithetic: bool = True,
        noise: NoiseKind = "int8",
        noise_reuse: int = 1,
        optimizer: OptimizerName = "sgd",
        weight_decay: float = 0.0,
        shaping: fitness.Shaping = "centred",
        arithmetic: ArithmeticKind = "float",
        masters: MastersPlace = "auto",
        kind: Kind = "auto",
        seed: int = 0,
    ) -> None:
        check(population=population, rank=rank, sigma=sigma, antithetic=antithetic, noise_reuse=noise_reuse)
        self.model = model
        self.population = population
        self.antithetic = antithetic
        self.num_variants = population // 2 if antithetic else population
        self._rank = rank
        self.epoch = 0
        self._noise_reuse = noise_reuse
        self._drawn_sigma = self._sigma = sigma  # the sigma in the factors, and the sigma of the members
        self._lr = lr
        self._shaping: fitness.Shaping = "sign" if arithmetic == "int8" else shaping
        language = kind == "language" or kind == "auto" and is_language_model(model)
        self.decoder = read_decoder(model) if language else None
        self._targets, self._others = _weights(model, self.decoder, patterns=targets, others=others)
        if self.decoder is None and targets is None:
            warn_of_frozen(model, self.frozen)  # type: ignore[arg-type]
        self._stacks = stacks_of(self._targets, terms=self.num_variants * rank)
        source = NoiseSource(seed=seed, rank=rank, sigma=sigma, kind=noise)
        self.masters: Masters | integer.IntegerMasters  # the weights that sum the updates
        if arithmetic == "int8":
            self.masters, self._noise = self._in_integers(source, share=lr)
        else:
            self._noise = Perturbations(
                source, targets=self._targets, stacks=self._stacks, others=self._others
            )
            self.masters = Masters(
                {**self._targets, **self._others},
                stacks=(*self._stacks, *self._alone),
                lr=lr,
                optimizer=optimizer,
                weight_decay=weight_decay,
                place=masters,
                divisor=sigma * population,
                fused=noise == "int8",
            )
        self._previous: tuple[Tensor, int] | None = None  # coefficients and noise epoch of the last update
        self._generator: tuple[dict[str, Any], Generator] | None = None  # with the arguments it was made for

    @property
    def targets(self) -> tuple[str, ...]:
        """The weights that get low-rank noise."""
        return tuple(self._targets)

    @property
    def perturbed(self) -> dict[str, int]:
        """The weights that get noise, with their numbers of elements."""
        return {name: weight.numel() for name, weight in {**self._targets, **self._others}.items()}

    @property
    def frozen(self) -> dict[str, int]:
        """The parameters that get no noise and never move, with their numbers of elements."""
        if isinstance(self.model, Decoder):
            return {}
        return unmoved_parameters(self.model, self._targets.values(), names=self._others)

    @property
    def sigma(self) -> float:
        """How far members are from the weights; it may change between epochs."""
        return self._sigma

    @sigma.setter
    def sigma(self, value: float) -> None:
        if not value > 0:
            raise BadInput(f"sigma={value} is not above 0")
        if value != self._drawn_sigma and isinstance(self.masters, integer.IntegerMasters):
            raise BadInput(
                "sigma cannot change in int8 arithmetic, whose scales are powers of two",
                hint="use arithmetic: float, or sigma_schedule: constant",
            )
        self._sigma = value

    @property
    def lr(self) -> float:
        """The size of a step; it may change between epochs."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = value
        if isinstance(self.masters, Masters):
            self.masters.set_lr(value)
        else:
            self.masters.threshold = self._threshold(value)

    @property
    def mode(self) -> Decision[Mode] | None:
        """How the steps of a generation run, and why; None before the first."""
        return None if self._generator is None else self._generator[1].decision

    @property
    def noise_epoch(self) -> int:
        """The epoch as the noise sees it."""
        return self.epoch // self._noise_reuse

    def member(self, index: int) -> tuple[int, int]:
        """Return the variant whose noise a member runs, and with which sign."""
        return (index // 2, -1 if index % 2 else 1) if self.antithetic else (index, 1)

    def delta(self, name: str, index: int) -> Tensor:
        """Return what a member adds to the target `name`, in float32 [out, in]."""
        variant, sign = self._strength(index)
        drawn = self._noise.factors(name, variants=range(variant, variant + 1), epoch=self.noise_epoch)
        return drawn.delta(0) * sign

    @contextlib.contextmanager
    def member_weights(self, index: int | None) -> Iterator[None]:
        """Give the model a member's weights inside the block: slow, and the reference for every other path.

        None leaves them unchanged.  Vectors with full noise get none.
        """
        saved = {} if index is None else {name: weight.clone() for name, weight in self._targets.items()}
        with torch.no_grad():
            try:
                for name in saved:
                    assert index is not None
                    self._targets[name].add_(self.delta(name, index))
                yield
            finally:
                for name, weight in saved.items():
                    self._targets[name].copy_(weight)

    @contextlib.contextmanager
    def forward(self, *, rows_per_member: int = 1, members: range | None = None) -> Iterator[nn.Module]:
        """Run `rows_per_member` rows for each member inside the block, in the members' order."""
        if isinstance(self.model, Decoder):
            raise BadInput(
                "a Decoder has no forward of its own", hint="make it with the model, or call generate"
            )
        members = self._checked(members)
        variants = self._variants(members)
        who = [self._strength(index) for index in members for _ in range(rows_per_member)]
        rows = Rows(tuple(variant - variants.start for variant, _ in who), tuple(sign for _, sign in who))
        factors = self._noise.resident(variants=variants, epoch=self.noise_epoch, capacity=len(variants))
        own = {
            name: self._noise.full(name, variants=variants, epoch=self.noise_epoch) for name in self._others
        }
        with torch.no_grad(), multiplexed(self.model, factors, rows, vectors=own) as model:
            yield model

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        members: range | None = None,
        plain: bool = False,
        slots: int | None = None,
        capacity: int | None = None,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        eos: Sequence[int] | None = None,
        mode: Mode = "auto",
    ) -> list[list[Completion]]:
        """Complete every prompt with every member, [members][prompts].

        `members` runs a part of the population; `capacity` is the most members that any such part has.
        `plain` runs the weights themselves, as the only member.  `slots` rows run at once.  `eos` are the
        tokens that end a text, None for those of the model's generation config.  Every member
        samples with the same random numbers, so that rewards differ by the weights alone.
        """
        members = self._checked(members)
        variants = self._variants(members)
        wanted = {
            "slots": slots or len(prompts) * (1 if plain else len(members)),
            "max_tokens": max_tokens or max(len(prompt) for prompt in prompts) + max_new_tokens,
            "sampling": sampling or Sampling(),
            "eos": end_tokens(self.model) if eos is None else tuple(eos),
            "mode": mode,
        }
        kept = len(self._variants(range(max(capacity or 0, len(members)))))
        generator = self._generating(wanted, variants, capacity=kept)
        first, who = variants.start, [self._strength(index) for index in members]
        requests = [
            Request(
                prompt=tuple(prompt),
                variant=None if plain else variant - first,
                sign=sign,
                key=number if plain else self.epoch * len(prompts) + number,
            )
            for variant, sign in ([(0, 1)] if plain else who)
            for number, prompt in enumerate(prompts)
        ]
        done = generator.generate(requests, max_new_tokens=max_new_tokens)
        return [done[start : start + len(prompts)] for start in range(0, len(done), len(prompts))]

    def release(self) -> None:
        """Free the memory of generator and noise; the next call allocates it again."""
        self._generator = None
        self._noise.release()

    def tell(self, rewards: Tensor, *, cosine: bool = True) -> Statistics:
        """Move the weights by the rewards [members, prompts], or [members], of this epoch; begin the next.

        A reward that is not a number is ignored.  `cosine` compares with the previous update, whose noise it
        draws again.
        """
        rewards = torch.as_tensor(rewards)
        if rewards.ndim == 1:
            rewards = rewards[:, None]
        if rewards.ndim != 2 or rewards.shape[0] != self.population:
            raise BadInput(
                f"rewards are {tuple(rewards.shape)}; the population has {self.population} members",
                hint="rewards are [members, prompts]",
            )
        shaped = fitness.shape(rewards, how=self._shaping)
        device = next(iter(self._targets.values())).device
        found = Coefficients.of_fitness(shaped, antithetic=self.antithetic, device=device)
        before = None
        if cosine and self._previous is not None:
            before = Coefficients.of(self._previous[0], device=device)
        tally = UpdateTally()
        for names in (*self._stacks, *self._alone):
            draw = functools.partial(self._noise.draw, names, epoch=self.noise_epoch)
            moved = self.masters.step_at_once(names, draw, found) if before is None else None
            if moved is None:
                ascent = self.masters.direction(draw, found)
                if before is not None and self._previous is not None:
                    draw = functools.partial(self._noise.draw, names, epoch=self._previous[1])
                    tally.compare(ascent, self.masters.direction(draw, before))
                moved = self.masters.step(names, ascent)
            tally.steps.append(moved)
        if self._generator is not None:
            self._generator[1].weights_changed()
        self._previous = found.host, self.noise_epoch
        self.epoch += 1
        return tally.statistics(rewards)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that the next epoch depends on, in addition to `epoch` and the arguments."""
        found = self.masters.tensors()
        if self._previous is not None:
            found["previous/coefficients"] = self._previous[0]
            found["previous/epoch"] = torch.tensor(self._previous[1])
        return found

    def load(self, tensors: Mapping[str, Tensor], *, epoch: int) -> None:
        """Continue at `epoch` from what `tensors` returned."""
        self.masters.load(tensors)
        self.epoch = epoch
        self._previous = None
        if "previous/coefficients" in tensors:
            self._previous = tensors["previous/coefficients"], int(tensors["previous/epoch"])

    def _strength(self, index: int) -> tuple[int, float]:
        """Return the variant of a member, and its sign times sigma over the sigma in the factors."""
        variant, sign = self.member(index)
        return variant, sign * (self._sigma / self._drawn_sigma)

    def _threshold(self, share: float) -> int:
        return integer.threshold_of(share, num_variants=self.num_variants, rank=self._rank)

    def _checked(self, members: range | None) -> range:
        if members is None:
            return range(self.population)
        if not members or members.step != 1 or members.start < 0 or members.stop > self.population:
            raise BadInput(
                f"members {members} are not a range within the population of {self.population}",
                hint=f"give range(first, last), with last at most {self.population}",
            )
        return members

    def _variants(self, members: range) -> range:
        if not self.antithetic:
            return members
        return range(members.start // 2, -(-members.stop // 2))

    def _in_integers(
        self, source: NoiseSource, *, share: float
    ) -> tuple[integer.IntegerMasters, Perturbations]:
        if self._others or not self.antithetic:
            raise BadInput(
                "int8 arithmetic needs antithetic pairs and evolves only matrices",
                hint='use antithetic=True and others="freeze"',
            )
        masters = integer.IntegerMasters(self._targets, stacks=self._stacks, threshold=self._threshold(share))
        scales = {name: masters.scale(name, sigma=source.sigma, rank=source.rank) for name in self._targets}
        device = next(iter(self._targets.values())).device
        table = integer.NoiseTable.drawn(source.seed, device=device)
        noise = Perturbations(
            source, targets=self._targets, stacks=self._stacks, others={}, table=table, scales=scales
        )
        return masters, noise

    @property
    def _alone(self) -> tuple[Names, ...]:
        """The others, each a stack of its own."""
        return tuple((name,) for name in self._others)

    def _generating(self, wanted: dict[str, Any], variants: range, *, capacity: int) -> Generator:
        """Return the current generator, or make another if it does not fit."""
        if self.decoder is None:
            raise BadInput(
                f"a {type(self.model).__name__} is not a causal language model",
                hint="run its members with forward",
            )
        factors = self._noise.resident(variants=variants, epoch=self.noise_epoch, capacity=capacity)
        made_for = {**wanted, "capacity": capacity}
        if self._generator is None or self._generator[0] != made_for:
            self._generator = None  # free its cache before making the next one
            # Every variant has an even number of rows, next to each other: both halves of a pair.
            tile = 2 if self.antithetic and wanted["slots"] % 2 == 0 else 1
            self._generator = made_for, Generator(self.decoder, factors=factors, tile=tile, **wanted)
        generator = self._generator[1]
        generator.weights_changed()
        return generator


def check(*, population: int, rank: int, sigma: float, antithetic: bool, noise_reuse: int = 1) -> None:
    """Refuse values that no population can have, all in one message."""
    wrong = []
    if population < 2:
        wrong.append(f"population={population} is below 2")
    elif antithetic and population % 2:
        wrong.append(f"population={population} is odd, and antithetic members come in pairs")
    if rank < 1:
        wrong.append(f"rank={rank} is below 1")
    if not sigma > 0:
        wrong.append(f"sigma={sigma} is not above 0")
    if noise_reuse < 1:
        wrong.append(f"noise_reuse={noise_reuse} is below 1")
    if wrong:
        raise BadInput("; ".join(wrong), hint="see flatout evolve --help")


def _weights(
    model: nn.Module | Decoder, decoder: Decoder | None, *, patterns: Sequence[str] | None, others: Others
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights with low-rank noise and those with full noise."""
    if decoder is not None:
        if others == "full":
            raise BadInput(
                'others="full" is for modules: the generator of a language model shares norms and biases',
                hint='use others="freeze", or kind="module" and your own forward',
            )
        products = {name: product.weight for name, product in decoder.projections().items()}
        return choose_weights(products, patterns), {}
    if isinstance(model, Decoder):
        raise BadInput("a Decoder is a language model", hint='leave kind="auto"')
    return choose_weights(linear_weights(model), patterns), vectors(model) if others == "full" else {}
