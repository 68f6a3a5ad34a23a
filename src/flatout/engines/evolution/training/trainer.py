"""A run of evolution on a language model: epochs, evaluations, checkpoints, and how it ends.

One epoch: prompts of the task, every member's completion of each (a chunk of members at a time), a reward per
completion, all ranks' rewards gathered, one update.  An epoch is a function of the weights, the settings and
its own number, so a run that is resumed at an epoch's border goes on as if it had never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatout.engines.evolution import fitness
from flatout.engines.evolution.eggroll import Eggroll
from flatout.engines.evolution.population.weights import summarise
from flatout.engines.evolution.report import plot_run, write_report
from flatout.engines.evolution.settings import (
    VERB,
    EvolveSettings,
    choose_step_sizes,
    eggroll_options,
    make_settings,
    read_settings,
    resume_settings,
    steps_at,
)
from flatout.engines.evolution.tasks.find_task import check_task, find_task, options_of
from flatout.engines.evolution.tasks.task import EvolutionTask, title_of
from flatout.engines.evolution.training import models
from flatout.engines.evolution.training.answers import Answers, wait_for
from flatout.engines.evolution.training.records import (
    KIND,
    EpochRecord,
    EvolutionState,
    checkpoints_of,
    read_log,
)
from flatout.engines.run.checkpoints import Checkpoint, thread_note
from flatout.engines.run.fingerprint import check_model, weights_fingerprint
from flatout.engines.run.folder import (
    Outcome,
    check_empty,
    choose_folder,
    draw_if_possible,
    find_begun,
    record_run,
)
from flatout.engines.run.log import RunLog, is_abandoned
from flatout.engines.run.meeting import Meeting
from flatout.engines.run.models import capability_of, choose_dtype
from flatout.engines.run.ranks import Ranks
from flatout.engines.run.settings import given_settings, save_settings
from flatout.ground import OnProgress, ignore
from flatout.ground.codec import encode
from flatout.ground.errors import BadInput, ChildDied, Interrupted
from flatout.ground.interrupts import Interrupts
from flatout.multiplex.models.families import read_decoder

MODEL, PLOT, REPORT = "model", "rewards.png", "report.html"
OnEvent = Callable[[EpochRecord], None]
FoundCheckpoint = Checkpoint[EvolutionState] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvolveOutcome(Outcome):
    """The result of a run of evolution."""

    epochs: int
    untrained_score: float | None
    score: float | None
    last: EpochRecord | None
    model: str | None
    plot: str | None
    report: str | None
    sent_bytes: dict[str, int] = field(default_factory=dict)  # to other ranks, by the first one, by what


def evolve(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    on_event: OnEvent = ignore,
    on_progress: OnProgress = ignore,
) -> EvolveOutcome:
    """Evolve a language model on a task; under torchrun, as one of its ranks.

    `settings` are keys and values, a YAML file or the folder of a run; `changes` override them.
    The `task` is a name, as on the command line, or a task object.  A process that torchrun restarted after a
    crash resumes, even if it was not asked to.
    """
    given, task = _apart(given_settings(settings, changes, read=read_settings))
    name = Path(str(given.get("task") or "task")).stem
    meeting = Meeting.join(on_progress=on_progress)
    out, resume = meeting.begin(
        lambda again: choose_folder(given.get("out"), kind=VERB, name=name, resume=again),
        begun=lambda: find_begun(given.get("out"), kind=VERB),
        resume=resume,
    )
    chosen, found = open_run(given, out, resume=resume, first=meeting.first)
    if resume and found is None and meeting.first:
        on_progress(f"{out} has no checkpoint yet: starting from epoch 0")
    meeting.agree("the epoch to resume from", 0 if found is None else found.state.epoch)
    with Ranks.join(chosen.device, meeting=meeting) as ranks:
        chosen = dataclasses.replace(chosen, out=str(out))
        tell = (on_event, on_progress) if ranks.first else (ignore, ignore)
        trainer = Trainer(chosen, ranks=ranks, found=found, task=task, on_event=tell[0], on_progress=tell[1])
        with record_run(out, kind=VERB, name=name) if ranks.first else contextlib.nullcontext():
            return trainer.run()


def _apart(given: Mapping[str, Any]) -> tuple[dict[str, Any], EvolutionTask | None]:
    """Separate settings that can be written down from a task object given instead of a name."""
    task = given.get("task")
    if task is None or isinstance(task, (str, Path)):
        return {**given, **({} if task is None else {"task": str(task)})}, None
    if given.get("task_options"):
        raise BadInput("task_options work only for a named task", hint="pass them to the task object")
    task = check_task(task)
    return {**given, "task": title_of(task), "task_options": options_of(task)}, task


def open_run(
    given: Mapping[str, Any], out: Path, *, resume: bool, first: bool = True
) -> tuple[EvolveSettings, FoundCheckpoint]:
    """Return the settings of the run in a folder and, if it is resumed, its checkpoint."""
    found = checkpoints_of(out).latest() if resume else None
    if found is not None:
        return resume_settings(found.state.config, given), found
    if resume and given.get("model") is None:
        raise BadInput(
            f"{out} has no checkpoint to resume", hint="check --out, or start a run with --model and --task"
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
        found: FoundCheckpoint = None,
        task: EvolutionTask | None = None,
        on_event: OnEvent = ignore,
        on_progress: OnProgress = ignore,
    ) -> None:
        assert settings.out is not None
        self.ranks, self.out = ranks, Path(settings.out)
        self._on_event, self._on_progress = on_event, on_progress
        self.task = task or find_task(settings.task, **settings.task_options)
        dtype = choose_dtype(settings.dtype, capability=capability_of(ranks.device))
        self.model = models.open_model(Path(settings.model), device=ranks.device, dtype=dtype.value)
        if found is not None:
            check_model(found.state.fingerprint, self.model, name=settings.model, checkpoint=found.path)
        self.fingerprint = weights_fingerprint(self.model)
        ranks.agree("the model's weights", self.fingerprint)
        steps = choose_step_sizes(settings, read_decoder(self.model))
        self.settings = settings = dataclasses.replace(
            settings,
            sigma=steps.sigma.value,
            lr=steps.lr.value,
            schedule_epochs=settings.schedule_epochs or settings.epochs,
        )
        self.es = Eggroll(self.model, kind="language", **eggroll_options(settings))
        self.answers = Answers(
            settings,
            self.es,
            task=self.task,
            model=self.model,
            ranks=ranks,
            saved=None if found is None else found.state,
            on_progress=on_progress,
        )
        chosen = self.answers.schedule
        on_progress(f"dtype: {dtype}; sigma: {steps.sigma}; lr: {steps.lr}")
        on_progress(f"rows at once: {chosen.rows}; members per chunk: {chosen.chunk_members}")
        self._perturbed = tuple(summarise(self.es.perturbed))
        self._frozen = tuple(summarise(self.es.frozen))
        on_progress(f"perturbed: {', '.join(self._perturbed)}")
        on_progress(f"frozen: {', '.join(self._frozen) or 'nothing'}")
        self._untrained_score: float | None = None
        self._score: float | None = None
        self._plain_rate: float | None = None
        self._last: EpochRecord | None = None
        self._elapsed_s = 0.0
        self._sent_before = 0
        if found is not None:
            self._go_on(found)

    def run(self) -> EvolveOutcome:
        """Train to the last epoch; an interrupt leaves a checkpoint and raises Interrupted."""
        settings = self.settings
        log = None
        if self.ranks.first:
            save_settings(self.out, settings)
            log = self._open_log()
        with (
            self.answers,
            log or contextlib.nullcontext() as self._log,
            Interrupts() as self._interrupts,
        ):
            try:
                self._train()
                return self._finish()
            except ChildDied:  # another rank; this one is between two epochs, worth saving
                if self._log is not None:
                    self._keep(self._log)
                elif self.ranks.is_deputy and is_abandoned(self.out):
                    with self._open_log() as abandoned:
                        self._keep(abandoned)
                raise
            except KeyboardInterrupt:
                if self._log is not None:
                    self._keep(self._log)
                raise Interrupted(
                    f"interrupted; {self.es.epoch} of {settings.epochs} epochs are kept in {self.out}",
                    hint="continue with --resume",
                ) from None

    def _open_log(self) -> RunLog[EpochRecord]:
        return RunLog(self.out, KIND, settings=encode(self.settings))

    def _keep(self, log: RunLog[EpochRecord]) -> None:
        """Save the last complete epoch: its record, if it is missing, then its checkpoint.

        After the update, until the first rank has judged the weights and written the record, the other ranks
        are an epoch ahead of the log.
        """
        if self._last is not None:
            log.write_if_missing(self._last)
        if self._untrained_score is None and (records := read_log(self.out)):
            self._untrained_score = records[0].reward_heldout
        self._save(log)

    def _train(self) -> None:
        settings, es = self.settings, self.es
        self._began_s = time.perf_counter() - self._elapsed_s
        if es.epoch == 0:
            self._score, samples = self.answers.held_out()
            self._untrained_score = self._score
            self._tell(
                EpochRecord(
                    epoch=0,
                    epochs=settings.epochs,
                    reward_heldout=self._score,
                    elapsed_s=self._elapsed(),
                    samples=samples,
                    perturbed=self._perturbed,
                    frozen=self._frozen,
                )
            )
        elif self._log is not None and self._is_judged_at(es.epoch):
            self._judge_what_was_not()
        while es.epoch < settings.epochs:
            if self._plain_rate is None or es.epoch % settings.plain_every == 0:
                self._plain_rate = self.answers.plain_tokens_per_s()
            self._tell(self._epoch())
            is_due = es.epoch % settings.checkpoint_every == 0 or es.epoch == settings.epochs
            if is_due and self._log is not None:
                self._save(self._log)

    def _tell(self, record: EpochRecord) -> None:
        if self._log is not None:
            self._log.write(record)
        self._on_event(record)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began_s

    def _epoch(self) -> EpochRecord:
        settings, es = self.settings, self.es
        began_s = time.perf_counter()
        es.sigma, es.lr = sigma, lr = steps_at(settings, es.epoch)
        rewards, num_tokens, num_failed = self.answers.of_members()
        if self._last is None:
            fitness.refuse_no_reward(rewards, num_failed=num_failed, failure=self.answers.last_failure)
        with self._interrupts.held():  # keep the update and its record together
            statistics = es.tell(rewards, cosine=(es.epoch + 1) % settings.cosine_every == 0)
            wait_for(self.ranks.device)
            epoch_s = time.perf_counter() - began_s
            tokens_per_s = num_tokens / epoch_s
            plain_rate = (self._plain_rate or 0.0) * self.ranks.num_ranks
            self._last = EpochRecord(
                epoch=es.epoch,
                epochs=settings.epochs,
                reward_train=statistics.reward_mean,
                rewards_per_s=rewards.numel() / epoch_s,
                tokens_per_s=tokens_per_s,
                plain_share=tokens_per_s / plain_rate if plain_rate else None,
                failed_rows=num_failed,
                sigma=sigma,
                lr=lr,
                sent_bytes=self._sent_bytes(),
                elapsed_s=self._elapsed(),
                statistics=encode(statistics),
            )
        if self._is_judged_at(es.epoch):
            self._last = self._judged(self._last)
        return self._last

    def _is_judged_at(self, epoch: int) -> bool:
        return epoch % self.settings.evaluate_every == 0 or epoch == self.settings.epochs

    def _judged(self, record: EpochRecord) -> EpochRecord:
        """Add to a record of these weights their score on held-out prompts."""
        self._score, samples = self.answers.held_out()
        return dataclasses.replace(
            record, reward_heldout=self._score, samples=samples, elapsed_s=self._elapsed()
        )

    def _judge_what_was_not(self) -> None:
        """Judge the epoch that this run continues from, if the previous run ended before it could."""
        for record in read_log(self.out):
            if record.epoch == self.es.epoch and record.reward_heldout is None:
                self._tell(self._judged(record))

    def _sent_bytes(self) -> int:
        """Return what this rank sent since the last call."""
        before, self._sent_before = self._sent_before, self.ranks.sent_bytes.total()
        return self._sent_before - before

    def _go_on(self, found: Checkpoint[EvolutionState]) -> None:
        if note := thread_note(found.state.threads, on_cpu=self.ranks.device.type == "cpu"):
            self._on_progress(note)
        self.es.load(found.tensors(), epoch=found.state.epoch)
        self._untrained_score = found.state.untrained_score
        self._elapsed_s = found.state.elapsed_s
        done, asked = found.state.epoch, self.settings.epochs
        more = "nothing is left to train; --epochs asks for more"
        self._on_progress(
            f"continuing after epoch {done} of {asked}" if done < asked else f"epoch {done} is done: {more}"
        )

    def _save(self, log: RunLog[EpochRecord]) -> None:
        """Write a checkpoint; an interrupt waits for its end."""
        state = EvolutionState(
            epoch=self.es.epoch,
            config=encode(self.settings),
            fingerprint=self.fingerprint,
            threads=torch.get_num_threads(),
            rows=self.answers.schedule.rows.value,
            chunk_members=self.answers.schedule.chunk_members.value,
            max_tokens=self.answers.max_tokens,
            untrained_score=self._untrained_score,
            elapsed_s=self._elapsed(),
        )
        with self._interrupts.held():
            log.flush()
            checkpoints_of(self.out).save(
                state.epoch,
                state=state,
                files={"tensors": self.es.tensors()},
                keep=self.settings.keep_checkpoints,
            )

    def _finish(self) -> EvolveOutcome:
        saved = drawn = reported = None
        if self.ranks.first:
            if self.settings.save_model:
                saved = self.out / MODEL
                models.save_model(self.model, self.answers.tokenizer, saved)
            records = read_log(self.out)
            if self._last is None and records:  # nothing was left to do
                self._score = records[-1].reward_heldout
            reported = write_report(self.out, self.out / REPORT)
            title = f"{self.task.name}, population {self.settings.population}"
            drawn = draw_if_possible(
                lambda: plot_run(records, self.out / PLOT, title=title), on_progress=self._on_progress
            )
        return EvolveOutcome(
            out=str(self.out),
            epochs=self.es.epoch,
            untrained_score=self._untrained_score,
            score=self._score,
            last=self._last,
            model=None if saved is None else str(saved),
            plot=drawn,
            report=None if reported is None else str(reported),
            sent_bytes=dict(self.ranks.sent_bytes),
        )
