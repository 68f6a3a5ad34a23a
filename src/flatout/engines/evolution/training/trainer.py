"""A run of evolution on a language model: epochs, evaluations, checkpoints, and how it ends.

One epoch: prompts of the task, every member's completion of each (a chunk of members at a time), a reward per
completion, all ranks' rewards gathered, one update.  An epoch is a function of the weights, the settings and
its own number, so a run that is resumed at an epoch's border goes on as if it had never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.codec import encode
from flatout.engines.evolution import fitness
from flatout.engines.evolution.eggroll import Eggroll
from flatout.engines.evolution.rewards.pool import RewardPool, RewardScores
from flatout.engines.evolution.run_plot import plot_run
from flatout.engines.evolution.settings import (
    VERB,
    EvolveSettings,
    choose_step_sizes,
    eggroll_options,
    make_settings,
    resume_settings,
)
from flatout.engines.evolution.tasks import Prompt, find_task
from flatout.engines.evolution.training import evaluate, models, schedule
from flatout.engines.evolution.training.records import (
    KIND,
    EpochRecord,
    EvolutionState,
    checkpoints_of,
    read_log,
)
from flatout.engines.evolution.training.texts import Texts
from flatout.engines.run.checkpoints import Checkpoint, thread_note
from flatout.engines.run.fingerprint import check_model, weights_fingerprint
from flatout.engines.run.folder import OnProgress, Outcome, check_empty, choose_folder, ignore, recorded
from flatout.engines.run.log import RunLog
from flatout.engines.run.models import capability_of, choose_dtype
from flatout.engines.run.ranks import Ranks
from flatout.engines.run.settings import save_settings
from flatout.errors import BadInput, ChildDied, Interrupted, MissingExtra
from flatout.interrupts import Interrupts
from flatout.multiplex.decode.requests import Completion
from flatout.multiplex.decode.sampling import Sampling
from flatout.multiplex.models.families import read_decoder
from flatout.torchrun import read_launch

MODEL, PLOT = "model", "rewards.png"
POSITIONS_STEP = 64  # slots grow by so many positions, so that few lengths of prompts need another generator
OnEvent = Callable[[EpochRecord], None]
Found = Checkpoint[EvolutionState] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvolveOutcome(Outcome):
    """What a run of evolution left."""

    epochs: int
    untrained_score: float | None
    score: float | None
    last: EpochRecord | None
    model: str | None
    plot: str | None


def evolve(
    given: Mapping[str, Any],
    *,
    resume: bool = False,
    on_event: OnEvent = ignore,
    on_progress: OnProgress = ignore,
) -> EvolveOutcome:
    """Run the settings that are `given`, as one of torchrun's ranks where it started this process.

    A process that torchrun started again after a crash resumes, whether it was asked to or not.
    """
    launch = read_launch()
    resume = resume or launch.restarts > 0
    name = Path(str(given.get("task") or "task")).stem
    out = choose_folder(given.get("out"), kind=VERB, name=name, resume=resume)
    settings, found = open_run(given, out, resume=resume, first=launch.is_first)
    with Ranks.join(settings.device) as ranks:
        settings = dataclasses.replace(settings, out=ranks.share_text(str(out)))
        ranks.agree("the epoch to go on from", 0 if found is None else found.state.epoch)
        tell = (on_event, on_progress) if ranks.first else (ignore, ignore)
        trainer = Trainer(settings, ranks=ranks, found=found, on_event=tell[0], on_progress=tell[1])
        with recorded(out, kind=VERB, name=name) if ranks.first else contextlib.nullcontext():
            return trainer.run()


def open_run(
    given: Mapping[str, Any], out: Path, *, resume: bool, first: bool = True
) -> tuple[EvolveSettings, Found]:
    """The settings of the run in a folder and, where it is resumed, what it goes on from."""
    found = checkpoints_of(out).latest() if resume else None
    if found is not None:
        return resume_settings(found.state.config, given), found
    if resume and given.get("model") is None:
        raise BadInput(
            f"{out} has no checkpoint to resume", hint="check --out, or begin with --model and --task"
        )
    settings = make_settings(given)
    if first and not resume:
        check_empty(out)
    return settings, None


class Trainer:
    """Runs settings, in this process as one of `ranks`."""

    def __init__(
        self,
        settings: EvolveSettings,
        *,
        ranks: Ranks,
        found: Found = None,
        on_event: OnEvent = ignore,
        on_progress: OnProgress = ignore,
    ) -> None:
        assert settings.out is not None
        self.ranks, self.out = ranks, Path(settings.out)
        self._on_event, self._on_progress = on_event, on_progress
        self.task = find_task(settings.task, **settings.task_options)
        self.held_out = self.task.prompts(
            "heldout", epoch=0, count=settings.evaluate_prompts, seed=settings.seed
        )
        folder = Path(settings.model)
        dtype = choose_dtype(settings.dtype, capability=capability_of(ranks.device))
        self.model = models.open_model(folder, device=ranks.device, dtype=dtype.value)
        if found is not None:
            check_model(found.state.fingerprint, self.model, name=settings.model, checkpoint=found.path)
        self.fingerprint = weights_fingerprint(self.model)
        self.texts = Texts(
            models.open_tokenizer(folder, prompts=self.held_out),
            stop=self.task.stop,
            chat=settings.chat,
            ends=models.end_tokens(self.model),
        )
        steps = choose_step_sizes(settings, read_decoder(self.model))
        self.settings = settings = dataclasses.replace(settings, sigma=steps.sigma.value, lr=steps.lr.value)
        self._on_progress(f"dtype: {dtype}; sigma: {steps.sigma}; lr: {steps.lr}")
        self.es = Eggroll(self.model, kind="language", **eggroll_options(settings))
        self._max_new_tokens = settings.max_new_tokens or self.task.max_new_tokens
        self._max_tokens = 0 if found is None else found.state.max_tokens
        self._held_out_ids = self._encoded(self.held_out)
        self._encoded(self._prompts(epoch=0, count=settings.prompts))
        self.schedule = self._schedule(found)
        self._untrained_score: float | None = None
        self._score: float | None = None
        self._plain_rate: float | None = None
        self._last: EpochRecord | None = None
        self._elapsed_s = 0.0
        if found is not None:
            self._go_on(found)

    def run(self) -> EvolveOutcome:
        """Train to the last epoch; an interrupt leaves a checkpoint and raises Interrupted."""
        settings = self.settings
        log = None
        if self.ranks.first:
            save_settings(self.out, settings)
            log = RunLog(self.out, KIND, settings=encode(settings))
        with (
            RewardPool(
                self.task.reward, workers=settings.reward_workers, timeout_s=settings.reward_timeout_s
            ) as self._pool,
            log or contextlib.nullcontext() as self._log,
            Interrupts() as self._interrupts,
        ):
            try:
                self._train()
                return self._finish()
            except ChildDied:  # another rank; this one stands at the border of an epoch, worth keeping
                with self._interrupts.held():
                    self._save()
                raise
            except KeyboardInterrupt:
                with self._interrupts.held():
                    self._save()
                raise Interrupted(
                    f"interrupted; {self.es.epoch} of {settings.epochs} epochs are kept in {self.out}",
                    hint="go on with --resume",
                ) from None

    def _train(self) -> None:
        settings, es = self.settings, self.es
        self._began_s = time.perf_counter() - self._elapsed_s
        self._pool.start()
        if es.epoch == 0:
            self._untrained_score = self._score = self._evaluate()
            self._tell(
                EpochRecord(
                    epoch=0, epochs=settings.epochs, reward_heldout=self._score, elapsed_s=self._elapsed()
                )
            )
        while es.epoch < settings.epochs:
            if self._plain_rate is None or es.epoch % settings.plain_every == 0:
                self._plain_rate = self._measured_plain()
            self._last = self._epoch()
            self._tell(self._last)
            if es.epoch % settings.checkpoint_every == 0 or es.epoch == settings.epochs:
                with self._interrupts.held():
                    self._save()

    def _tell(self, record: EpochRecord) -> None:
        if self._log is not None:
            self._log.write(record)
        self._on_event(record)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began_s

    def _epoch(self) -> EpochRecord:
        settings, es = self.settings, self.es
        began_s = time.perf_counter()
        prompts = self._prompts(epoch=es.epoch, count=settings.prompts)
        ids = self._encoded(prompts)
        rewards = torch.zeros(settings.population, len(prompts), dtype=torch.float64)
        num_tokens = torch.zeros(1, dtype=torch.float64)
        for chunk in self.schedule.of_rank(self.ranks.rank, num_ranks=self.ranks.num_ranks):
            done = self._generate(ids, members=chunk)
            num_tokens += sum(len(each.tokens) for row in done for each in row)
            rewards[chunk.start : chunk.stop] = self._rewards(prompts, done)
        rewards, num_tokens = self.ranks.gather(rewards), self.ranks.gather(num_tokens)
        if self._last is None:
            fitness.refuse_all_failed(rewards)
        with self._interrupts.held():
            statistics = es.tell(rewards, cosine=(es.epoch + 1) % settings.cosine_every == 0)
        evaluate.wait_for(self.ranks.device)
        epoch_s = time.perf_counter() - began_s
        tokens_per_s = float(num_tokens) / epoch_s
        held_out = None
        if es.epoch % settings.evaluate_every == 0 or es.epoch == settings.epochs:
            held_out = self._score = self._evaluate()
        return EpochRecord(
            epoch=es.epoch,
            epochs=settings.epochs,
            reward_train=statistics.reward_mean,
            reward_heldout=held_out,
            rewards_per_s=rewards.numel() / epoch_s,
            tokens_per_s=tokens_per_s,
            plain_share=tokens_per_s / (self._plain_rate * self.ranks.num_ranks)
            if self._plain_rate
            else None,
            failed_rows=statistics.reward_failures,
            elapsed_s=self._elapsed(),
            statistics=encode(statistics),
        )

    def _rewards(self, prompts: Sequence[Prompt], done: list[list[Completion]]) -> torch.Tensor:
        """The rewards of one chunk [members, prompts], each row saying whose it is."""
        rows = [(member, place, each) for member, row in enumerate(done) for place, each in enumerate(row)]
        scores = self._scored([prompts[place] for _, place, _ in rows], [each for _, _, each in rows])
        return fitness.reward_matrix(
            scores.values,
            member_of_row=[member for member, _, _ in rows],
            prompt_of_row=[place for _, place, _ in rows],
            num_members=len(done),
            num_prompts=len(prompts),
        )

    def _evaluate(self) -> float | None:
        """The held-out score, on the first rank: the others need it for nothing."""
        if not self.ranks.first:
            return None
        done = self._generate(self._held_out_ids, members=self.schedule.chunks[0], plain=True)
        return evaluate.mean_score(self._scored(self.held_out, done[0]))

    def _scored(self, prompts: Sequence[Prompt], done: Sequence[Completion]) -> RewardScores:
        scores = evaluate.score_texts(self._pool, self.texts, prompts, done)
        if said := scores.summary():
            self._on_progress(said)
        return scores

    def _measured_plain(self) -> float:
        """Plain inference on as many rows as a chunk has; every rank at once, as they train."""
        num_rows = len(self.schedule.chunks[0]) * self.settings.prompts
        ids = self._encoded(self._prompts(epoch=self.es.epoch, count=num_rows))
        assert self.es.decoder is not None
        self.es.release()  # its cache must not lie beside the one that is measured
        return evaluate.plain_tokens_per_s(
            self.es.decoder,
            ids,
            slots=self.schedule.rows.value,
            max_tokens=self._max_tokens,
            max_new_tokens=self._max_new_tokens,
            sampling=self._sampling,
            ends=self.texts.ends,
        )

    def _generate(
        self, ids: list[tuple[int, ...]], *, members: range, plain: bool = False
    ) -> list[list[Completion]]:
        return self.es.generate(
            ids,
            max_new_tokens=self._max_new_tokens,
            members=members,
            plain=plain,
            slots=self.schedule.rows.value,
            capacity=self.schedule.chunk_members.value,
            max_tokens=self._max_tokens,
            sampling=self._sampling,
            eos=self.texts.ends,
        )

    @property
    def _sampling(self) -> Sampling:
        settings = self.settings
        return Sampling(
            temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, seed=settings.seed
        )

    def _prompts(self, *, epoch: int, count: int) -> list[Prompt]:
        return self.task.prompts("train", epoch=epoch, count=count, seed=self.settings.seed)

    def _encoded(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """Token numbers of prompts; slots grow to hold the longest and its completion."""
        assert self.es.decoder is not None
        ids = [self.texts.ids(prompt) for prompt in prompts]
        longest = max(ids, key=len)
        needed, most = len(longest) + self._max_new_tokens, self.es.decoder.max_positions
        if needed > most:
            raise BadInput(
                f"a prompt of {len(longest)} tokens and {self._max_new_tokens} more pass the model's {most}",
                hint="take fewer --max-new-tokens or shorter prompts",
            )
        if needed > self._max_tokens:
            self._max_tokens = min(-(-needed // POSITIONS_STEP) * POSITIONS_STEP, most)
        return ids

    def _schedule(self, found: Found) -> schedule.PopulationSchedule:
        settings = self.settings
        assert self.es.decoder is not None
        needs = schedule.needs_of(
            self.es.decoder,
            max_tokens=self._max_tokens,
            rank=settings.rank,
            noise=settings.noise,
            targets=self.es.targets,
        )
        made = schedule.schedule(
            population=settings.population,
            prompts=settings.prompts,
            antithetic=settings.antithetic,
            needs=needs,
            rows=settings.rows if found is None else found.state.rows,
            chunk_members=settings.chunk_members if found is None else found.state.chunk_members,
            num_ranks=self.ranks.num_ranks,
        )
        self._on_progress(f"rows at once: {made.rows}; members per chunk: {made.chunk_members}")
        return made

    def _go_on(self, found: Checkpoint[EvolutionState]) -> None:
        if note := thread_note(found.state.threads, on_cpu=self.ranks.device.type == "cpu"):
            self._on_progress(note)
        self.es.load(found.tensors(), epoch=found.state.epoch)
        self._untrained_score = found.state.untrained_score
        self._elapsed_s = found.state.elapsed_s
        done, asked = found.state.epoch, self.settings.epochs
        more = "nothing is left to train; --epochs asks for more"
        self._on_progress(
            f"going on after epoch {done} of {asked}" if done < asked else f"epoch {done} is done: {more}"
        )

    def _save(self) -> None:
        if not self.ranks.first:
            return
        state = EvolutionState(
            epoch=self.es.epoch,
            config=encode(self.settings),
            fingerprint=self.fingerprint,
            threads=torch.get_num_threads(),
            rows=self.schedule.rows.value,
            chunk_members=self.schedule.chunk_members.value,
            max_tokens=self._max_tokens,
            untrained_score=self._untrained_score,
            elapsed_s=self._elapsed(),
        )
        checkpoints_of(self.out).save(
            state.epoch,
            state=state,
            files={"tensors": self.es.tensors()},
            keep=self.settings.keep_checkpoints,
        )

    def _finish(self) -> EvolveOutcome:
        saved = drawn = None
        if self.ranks.first:
            if self.settings.save_model:
                saved = self.out / MODEL
                models.save_model(self.model, self.texts.tokenizer, saved)
            records = read_log(self.out)
            if self._last is None and records:  # there was nothing left to do
                self._score = records[-1].reward_heldout
            try:
                title = f"{self.task.name}, population {self.settings.population}"
                drawn = plot_run(records, self.out / PLOT, title=title)
            except MissingExtra as error:
                self._on_progress(f"no plot: {error}")
        return EvolveOutcome(
            out=str(self.out),
            epochs=self.es.epoch,
            untrained_score=self._untrained_score,
            score=self._score,
            last=self._last,
            model=None if saved is None else str(saved),
            plot=None if drawn is None else str(drawn),
        )
