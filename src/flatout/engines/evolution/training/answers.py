"""The members' answers to the prompts of a task, and the rewards of these answers.

A chunk of members answers all prompts in one call of the generator; every completion gets a reward, and what
all ranks computed is gathered.  Held-out prompts are answered by the weights themselves, without noise, with
the training's own reward.  The share of plain inference in the log compares with the same number of rows,
prompts of the same task and the same engine without any variant, timed after a warm-up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flatout.engines.evolution import fitness
from flatout.engines.evolution.rewards.kinds import PROMPT, check_answer
from flatout.engines.evolution.rewards.pool import RewardPool, RewardScores
from flatout.engines.evolution.rewards.worker import Failure
from flatout.engines.evolution.tasks.task import ask_prompts, running, text_of_ids
from flatout.engines.evolution.training import models, population_schedule
from flatout.engines.evolution.training.records import ShownAnswer
from flatout.ground import OnProgress
from flatout.ground.errors import BadInput
from flatout.ground.units import round_up
from flatout.multiplex.decode.generator import Generator, end_tokens
from flatout.multiplex.decode.requests import Completion, Request
from flatout.multiplex.decode.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.engines.evolution.eggroll import Eggroll
    from flatout.engines.evolution.settings import EvolveSettings
    from flatout.engines.evolution.tasks.task import EvolutionTask, Prompt
    from flatout.engines.evolution.training.records import EvolutionState
    from flatout.engines.run.ranks import Ranks
    from flatout.multiplex.decode.steppers import Mode
    from flatout.multiplex.models.decoder import Decoder

Ids = tuple[int, ...]
Ran = TypeVar("Ran")
POSITIONS_STEP = 64  # slots grow by so many positions: new prompt lengths seldom need another generator


class Answers:
    """Answers prompts of `task` and scores them, for the members of `es` or for its weights alone.

    Use it in a `with`: the processes that compute rewards end with the block.
    """

    def __init__(
        self,
        settings: EvolveSettings,
        es: Eggroll,
        *,
        task: EvolutionTask,
        model: Any,
        ranks: Ranks,
        saved: EvolutionState | None,
        on_progress: OnProgress,
    ) -> None:
        assert es.decoder is not None
        self._settings, self._es, self._task, self._ranks = settings, es, task, ranks
        self._decoder, self._on_progress = es.decoder, on_progress
        count = settings.evaluate_prompts
        self._held_out = ask_prompts(task, "heldout", epoch=0, count=count, seed=settings.seed)
        self.tokenizer = models.open_tokenizer(Path(settings.model), prompts=self._held_out)
        ends = end_tokens(model)
        self._texts = models.Texts(self.tokenizer, stop=task.stop, chat=settings.chat, ends=ends)
        self._max_new_tokens = settings.max_new_tokens or task.max_new_tokens
        self._sampling = Sampling(
            temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, seed=settings.seed
        )
        self.max_tokens = 0 if saved is None else saved.max_tokens
        self._held_out_ids = self._encoded(self._held_out)
        first = self._prompts(epoch=0, count=settings.prompts)
        self._encoded(first)
        with running(task):
            for prompt in (*self._held_out, *first):
                check_answer(task.reward, facts_of(prompt))
        self.schedule = self._make_schedule(saved)
        self._told_mode = False
        self.last_failure: Failure | None = None  # of this rank's rewards
        self._pool = RewardPool(
            task.reward, workers=settings.reward_workers, timeout_s=settings.reward_timeout_s
        )

    def __enter__(self) -> Answers:
        self._pool.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def of_members(self) -> tuple[Tensor, int, int]:
        """Return the rewards [members, prompts] of this epoch; the tokens and the failures of all ranks."""
        settings = self._settings
        prompts = self._prompts(epoch=self._es.epoch, count=settings.prompts)
        ids = self._encoded(prompts)
        # Rewards and, behind them, the numbers of tokens and of failures: one message.
        gathered = torch.zeros(settings.population * len(prompts) + 2, dtype=torch.float64)
        rewards = gathered[:-2].view(settings.population, len(prompts))
        for chunk in self.schedule.of_rank(self._ranks.rank, num_ranks=self._ranks.num_ranks):
            done = self._generate(ids, members=chunk)
            gathered[-2] += sum(len(each.tokens) for row in done for each in row)
            rewards[chunk.start : chunk.stop], num_failed = self._rewards(prompts, done)
            gathered[-1] += num_failed
        gathered = self._ranks.gather(gathered, what="rewards")
        return gathered[:-2].view_as(rewards), int(gathered[-2]), int(gathered[-1])

    def held_out(self) -> tuple[float | None, tuple[ShownAnswer, ...]]:
        """Return the mean reward of the held-out prompts, and some completions with their rewards.

        Runs on the first rank alone: no other rank needs the result.
        """
        if not self._ranks.first:
            return None, ()
        done = self._generate(self._held_out_ids, members=self.schedule.chunks[0], plain=True)[0]
        scores = self._scored(self._held_out, done)
        shown = self._held_out[: self._settings.samples]
        said = self._texts.texts([each.tokens for each in done[: len(shown)]])
        samples = zip(shown, said, scores.values, strict=False)
        return scores.mean, tuple(
            ShownAnswer(
                prompt=text_of_ids(prompt.token_ids or ()) if prompt.text is None else prompt.text,
                completion=text,
                reward=value,
            )
            for prompt, text, value in samples
        )

    def plain_tokens_per_s(self) -> float:
        """Measure plain inference on as many rows as a chunk has; all ranks at once, as they train."""
        num_rows = len(self.schedule.chunks[0]) * self._settings.prompts
        ids = self._encoded(self._prompts(epoch=self._es.epoch, count=num_rows))
        self._es.release()  # its cache must not take memory from the measurement
        return self._fitting(
            lambda rows: plain_tokens_per_s(
                self._decoder,
                ids,
                slots=rows,
                max_tokens=self.max_tokens,
                max_new_tokens=self._max_new_tokens,
                sampling=self._sampling,
                ends=self._texts.ends,
                mode=self._settings.mode,
            )
        )

    def _rewards(self, prompts: Sequence[Prompt], done: list[list[Completion]]) -> tuple[Tensor, int]:
        """Return the rewards of one chunk [members, prompts], and how many failed; rows name theirs."""
        rows = [(member, place, each) for member, row in enumerate(done) for place, each in enumerate(row)]
        scores = self._scored([prompts[place] for _, place, _ in rows], [each for _, _, each in rows])
        matrix = fitness.reward_matrix(
            scores.values,
            member_of_row=[member for member, _, _ in rows],
            prompt_of_row=[place for _, place, _ in rows],
            num_members=len(done),
            num_prompts=len(prompts),
        )
        return matrix, len(scores.failures)

    def _scored(self, prompts: Sequence[Prompt], done: Sequence[Completion]) -> RewardScores:
        scores = score_texts(self._pool, self._texts, prompts, done)
        if said := scores.summary():
            self._on_progress(said)
            self.last_failure = scores.failures[0]
        return scores

    def _generate(self, ids: list[Ids], *, members: range, plain: bool = False) -> list[list[Completion]]:
        done = self._fitting(
            lambda rows: self._es.generate(
                ids,
                max_new_tokens=self._max_new_tokens,
                members=members,
                plain=plain,
                slots=rows,
                capacity=self.schedule.chunk_members.value,
                max_tokens=self.max_tokens,
                sampling=self._sampling,
                eos=self._texts.ends,
                mode=self._settings.mode,
            )
        )
        if not self._told_mode:
            self._told_mode = True
            self._on_progress(f"steps: {self._es.mode}")
        return done

    def _fitting(self, run: Callable[[int], Ran]) -> Ran:
        """Run with as many rows as the schedule says; where memory runs out, with half of them from then on.

        Chunks, noise and the random numbers of a row do not depend on the rows beside it, so the tokens are
        those of a run that fitted, except where two tokens are a rounding error apart.
        """
        while True:
            rows = self.schedule.rows.value
            with contextlib.suppress(torch.OutOfMemoryError):
                return run(rows)
            # After the error is gone: its traceback held the tensors that did not fit.
            self._es.release()
            if self._decoder.device.type == "cuda":
                torch.cuda.empty_cache()
            self.schedule = population_schedule.halve_rows(self.schedule)
            self._on_progress(f"out of memory with {rows} rows at once: continuing with {self.schedule.rows}")

    def _prompts(self, *, epoch: int, count: int) -> list[Prompt]:
        return ask_prompts(self._task, "train", epoch=epoch, count=count, seed=self._settings.seed)

    def _encoded(self, prompts: Sequence[Prompt]) -> list[Ids]:
        """Encode prompts; slots grow to hold the longest and its completion."""
        ids = self._texts.ids(prompts)
        longest = max(ids, key=len)
        needed, most = len(longest) + self._max_new_tokens, self._decoder.max_positions
        if needed > most:
            raise BadInput(
                f"{len(longest)} prompt tokens and {self._max_new_tokens} more exceed the model's {most}",
                hint="use fewer --max-new-tokens or shorter prompts",
            )
        if needed > self.max_tokens:
            self.max_tokens = min(round_up(needed, POSITIONS_STEP), most)
        return ids

    def _make_schedule(self, saved: EvolutionState | None) -> population_schedule.PopulationSchedule:
        settings = self._settings
        needs = population_schedule.needs_of(
            self._decoder,
            max_tokens=self.max_tokens,
            rank=settings.rank,
            noise=settings.noise,
            targets=self._es.targets,
        )
        return population_schedule.schedule(
            population=settings.population,
            prompts=settings.prompts,
            antithetic=settings.antithetic,
            needs=needs,
            rows=settings.rows if saved is None else saved.rows,
            chunk_members=settings.chunk_members if saved is None else saved.chunk_members,
            num_ranks=self._ranks.num_ranks,
        )


def score_texts(
    pool: RewardPool, texts: models.Texts, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> RewardScores:
    """Score each completion, together with the prompt it belongs to."""
    said = texts.texts([completion.tokens for completion in completions])
    return pool.score([(text, facts_of(prompt)) for text, prompt in zip(said, prompts, strict=True)])


def facts_of(prompt: Prompt) -> Mapping[str, Any]:
    """Return what a reward knows of a prompt: its answer and, if it is a text, the prompt."""
    return prompt.answer if prompt.text is None else {PROMPT: prompt.text, **prompt.answer}


def plain_tokens_per_s(
    decoder: Decoder,
    prompts: Sequence[Ids],
    *,
    slots: int,
    max_tokens: int,
    max_new_tokens: int,
    sampling: Sampling,
    ends: Sequence[int],
    mode: Mode = "auto",
) -> float:
    """Measure tokens per second of the model alone, over `prompts`; its cache is freed afterwards."""
    generator = Generator(decoder, slots=slots, max_tokens=max_tokens, sampling=sampling, eos=ends, mode=mode)
    requests = [Request(prompt=prompt, key=key) for key, prompt in enumerate(prompts)]

    def run() -> int:
        done = generator.generate(requests, max_new_tokens=max_new_tokens)
        wait_for(decoder.device)
        return sum(len(each.tokens) for each in done)

    run()
    began_s = time.perf_counter()
    num_tokens = run()
    return num_tokens / (time.perf_counter() - began_s)


def wait_for(device: torch.device) -> None:
    """Let a GPU finish what it was given, so that the clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
