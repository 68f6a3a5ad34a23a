"""A run of evolution on a language model: epochs, evaluations, checkpoints, and how it ends.

One epoch: prompts of the task, every member's completion of each (a chunk of members at a time), a reward per
completion, all ranks' rewards gathered, one update.  An epoch is a function of the weights, the config and
its own number, so a run that is resumed at an epoch's border goes on as if it had never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.codec import encode
from flatout.engines.evolution import fitness
from flatout.engines.evolution.eggroll import Eggroll
from flatout.engines.evolution.rewards.pool import RewardPool, Scores
from flatout.engines.evolution.run_plot import plot_run
from flatout.engines.evolution.settings import EvolveConfig, eggroll_options, make_config, resumed
from flatout.engines.evolution.tasks import Prompt, task_named
from flatout.engines.evolution.training import checkpoint, evaluate, models, schedule, step_sizes
from flatout.engines.evolution.training.checkpoint import Checkpoint, State
from flatout.engines.evolution.training.log import KIND, EpochRecord, read_log
from flatout.engines.evolution.training.texts import Texts, open_tokenizer
from flatout.engines.run.log import RunLog
from flatout.engines.run.ranks import Ranks
from flatout.errors import BadInput, ChildDied, Interrupted, MissingExtra
from flatout.interrupts import Interrupts
from flatout.multiplex.decode.requests import Completion
from flatout.multiplex.decode.sampling import Sampling
from flatout.multiplex.models.families import read_decoder

CHECKPOINTS, MODEL, PLOT = "checkpoints", "model", "rewards.png"
POSITIONS_STEP = 64  # slots grow by so many positions, so that few lengths of prompts need another generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run left."""

    out: str
    epochs: int
    untrained_score: float | None
    score: float | None
    last: EpochRecord | None
    model: str | None
    plot: str | None


def open_run(
    given: Mapping[str, Any], *, resume: bool, first: bool = True
) -> tuple[EvolveConfig, Checkpoint | None]:
    """The config of a run and, where it is resumed, what it goes on from."""
    out = Path(given.get("out") or EvolveConfig(model="", task="").out)
    found = checkpoint.latest(out / CHECKPOINTS) if resume else None
    if found is not None:
        return resumed(found.state.config, given), found
    if resume and given.get("model") is None:
        raise BadInput(
            f"{out} has no checkpoint to resume", hint="check --out, or begin with --model and --task"
        )
    config = make_config(given)
    if first and not resume and out.is_dir() and any(out.iterdir()):
        raise BadInput(f"{out} is not empty", hint="go on with --resume, or take another --out")
    return config, None


class Trainer:
    """Runs a config, in this process as one of `ranks`."""

    def __init__(
        self,
        config: EvolveConfig,
        *,
        ranks: Ranks,
        found: Checkpoint | None = None,
        on_epoch: Callable[[EpochRecord], None] = lambda record: None,
        on_note: Callable[[str], None] = lambda note: None,
    ) -> None:
        self.ranks = ranks
        self.out = Path(config.out)
        self._on_epoch = on_epoch if ranks.first else lambda record: None
        self._on_note = on_note if ranks.first else lambda note: None
        self.task = task_named(config.task, **config.task_options)
        self.held_out = self.task.prompts("heldout", epoch=0, count=config.evaluate_prompts, seed=config.seed)
        folder = Path(config.model)
        self.model = models.open_model(folder, device=ranks.device, dtype=config.dtype)
        self.texts = Texts(
            open_tokenizer(folder, prompts=self.held_out),
            stop=self.task.stop,
            chat=config.chat,
            ends=models.end_tokens(self.model),
        )
        self.fingerprint = checkpoint.fingerprint(self.model.named_parameters())
        steps = step_sizes.of(config, read_decoder(self.model))
        self.config = config = dataclasses.replace(config, sigma=steps.sigma.value, lr=steps.lr.value)
        self._on_note(f"sigma: {steps.sigma}; lr: {steps.lr}")
        self.es = Eggroll(self.model, kind="language", **eggroll_options(config))
        self._max_new_tokens = config.max_new_tokens or self.task.max_new_tokens
        self._max_tokens = 0 if found is None else found.state.max_tokens
        self._held_out_ids = self._encoded(self.held_out)
        self._encoded(self._prompts(epoch=0, count=config.prompts))
        self.schedule = self._schedule(found)
        self._untrained_score: float | None = None
        self._score: float | None = None
        self._plain_rate: float | None = None
        self._last: EpochRecord | None = None
        self._elapsed_s = 0.0
        if found is not None:
            self._go_on(found)

    def run(self) -> Outcome:
        """Train to the last epoch; an interrupt leaves a checkpoint and raises Interrupted."""
        config = self.config
        log = RunLog(self.out, KIND, settings=encode(config)) if self.ranks.first else None
        with (
            RewardPool(
                self.task.reward, workers=config.reward_workers, timeout_s=config.reward_timeout_s
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
                    f"interrupted; {self.es.epoch} of {config.epochs} epochs are kept in {self.out}",
                    hint="go on with --resume",
                ) from None

    def _train(self) -> None:
        config, es = self.config, self.es
        self._began_s = time.perf_counter() - self._elapsed_s
        self._pool.start()
        if es.epoch == 0:
            self._untrained_score = self._score = self._evaluate()
            self._tell(
                EpochRecord(
                    epoch=0, epochs=config.epochs, reward_heldout=self._score, elapsed_s=self._elapsed()
                )
            )
        while es.epoch < config.epochs:
            if self._plain_rate is None or es.epoch % config.plain_every == 0:
                self._plain_rate = self._measured_plain()
            self._last = self._epoch()
            self._tell(self._last)
            if es.epoch % config.checkpoint_every == 0 or es.epoch == config.epochs:
                with self._interrupts.held():
                    self._save()

    def _tell(self, record: EpochRecord) -> None:
        if self._log is not None:
            self._log.write(record)
        self._on_epoch(record)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began_s

    def _epoch(self) -> EpochRecord:
        config, es = self.config, self.es
        began_s = time.perf_counter()
        prompts = self._prompts(epoch=es.epoch, count=config.prompts)
        ids = self._encoded(prompts)
        rewards = torch.zeros(config.population, len(prompts), dtype=torch.float64)
        num_tokens = torch.zeros(1, dtype=torch.float64)
        for chunk in self.schedule.of_rank(self.ranks.rank, num_ranks=self.ranks.num_ranks):
            done = self._generate(ids, members=chunk)
            num_tokens += sum(len(each.tokens) for row in done for each in row)
            rewards[chunk.start : chunk.stop] = self._rewards(prompts, done)
        rewards, num_tokens = self.ranks.gather(rewards), self.ranks.gather(num_tokens)
        if self._last is None:
            fitness.refuse_all_failed(rewards)
        with self._interrupts.held():
            statistics = es.tell(rewards, cosine=(es.epoch + 1) % config.cosine_every == 0)
        evaluate.wait_for(self.ranks.device)
        epoch_s = time.perf_counter() - began_s
        tokens_per_s = float(num_tokens) / epoch_s
        held_out = None
        if es.epoch % config.evaluate_every == 0 or es.epoch == config.epochs:
            held_out = self._score = self._evaluate()
        return EpochRecord(
            epoch=es.epoch,
            epochs=config.epochs,
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

    def _scored(self, prompts: Sequence[Prompt], done: Sequence[Completion]) -> Scores:
        scores = evaluate.score_texts(self._pool, self.texts, prompts, done)
        if said := scores.summary():
            self._on_note(said)
        return scores

    def _measured_plain(self) -> float:
        """Plain inference on as many rows as a chunk has; every rank at once, as they train."""
        num_rows = len(self.schedule.chunks[0]) * self.config.prompts
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
        config = self.config
        return Sampling(
            temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, seed=config.seed
        )

    def _prompts(self, *, epoch: int, count: int) -> list[Prompt]:
        return self.task.prompts("train", epoch=epoch, count=count, seed=self.config.seed)

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

    def _schedule(self, found: Checkpoint | None) -> schedule.Schedule:
        config = self.config
        assert self.es.decoder is not None
        needs = schedule.needs_of(
            self.es.decoder,
            max_tokens=self._max_tokens,
            rank=config.rank,
            noise=config.noise,
            targets=self.es.targets,
        )
        made = schedule.schedule(
            population=config.population,
            prompts=config.prompts,
            antithetic=config.antithetic,
            needs=needs,
            rows=config.rows if found is None else found.state.rows,
            chunk_members=config.chunk_members if found is None else found.state.chunk_members,
            num_ranks=self.ranks.num_ranks,
        )
        self._on_note(f"rows at once: {made.rows}; members per chunk: {made.chunk_members}")
        return made

    def _go_on(self, found: Checkpoint) -> None:
        if found.state.fingerprint != self.fingerprint:
            raise BadInput(
                f"the checkpoint in {self.out} belongs to another model than {self.config.model}",
                hint="resume with the model that the run began with",
            )
        if found.state.threads != torch.get_num_threads() and self.ranks.device.type == "cpu":
            self._on_note(
                f"the run had {found.state.threads} threads and has {torch.get_num_threads()} here: "
                "it may differ from an uninterrupted one in the last bits"
            )
        self.es.load(found.tensors, epoch=found.state.epoch)
        self._untrained_score = found.state.untrained_score
        self._elapsed_s = found.state.elapsed_s
        done, asked = found.state.epoch, self.config.epochs
        more = "nothing is left to train; --epochs asks for more"
        self._on_note(
            f"going on after epoch {done} of {asked}" if done < asked else f"epoch {done} is done: {more}"
        )

    def _save(self) -> None:
        if not self.ranks.first:
            return
        state = State(
            epoch=self.es.epoch,
            config=encode(self.config),
            fingerprint=self.fingerprint,
            threads=torch.get_num_threads(),
            rows=self.schedule.rows.value,
            chunk_members=self.schedule.chunk_members.value,
            max_tokens=self._max_tokens,
            untrained_score=self._untrained_score,
            elapsed_s=self._elapsed(),
        )
        checkpoint.save(
            self.out / CHECKPOINTS, state=state, tensors=self.es.tensors(), keep=self.config.keep_checkpoints
        )

    def _finish(self) -> Outcome:
        saved = drawn = None
        if self.ranks.first:
            if self.config.save_model:
                saved = self.out / MODEL
                models.save_model(self.model, self.texts.tokenizer, saved)
            records = read_log(self.out)
            if self._last is None and records:  # there was nothing left to do
                self._score = records[-1].reward_heldout
            try:
                title = f"{self.task.name}, population {self.config.population}"
                drawn = plot_run(records, self.out / PLOT, title=title)
            except MissingExtra as error:
                self._on_note(f"no plot: {error}")
        return Outcome(
            out=str(self.out),
            epochs=self.es.epoch,
            untrained_score=self._untrained_score,
            score=self._score,
            last=self._last,
            model=None if saved is None else str(saved),
            plot=None if drawn is None else str(drawn),
        )


def evolve(
    given: Mapping[str, Any],
    *,
    resume: bool = False,
    on_epoch: Callable[[EpochRecord], None] = lambda record: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Outcome:
    """Run the settings that are `given`, as one of torchrun's ranks where it started this process.

    A process that torchrun started again after a crash resumes, whether it was asked to or not.
    """
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    first = int(os.environ.get("RANK", "0")) == 0
    config, found = open_run(given, resume=resume or restarted, first=first)
    with Ranks.join(config.device) as ranks:
        ranks.agree("the epoch to go on from", 0 if found is None else found.state.epoch)
        trainer = Trainer(config, ranks=ranks, found=found, on_epoch=on_epoch, on_note=on_note)
        return trainer.run()
