"""What every phase does besides training: count steps, report, save checkpoints, stop.

All of it happens at the end of an optimizer step, where weights and optimizer states match.  Losses stay on
the device until a report is due: reading one would wait for the GPU.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.engines.adapters.assembly import AdapterAssembly, seed_of, weights_under
from flatout.engines.adapters.settings import check_resume
from flatout.engines.adapters.training.live_line import LiveLine
from flatout.engines.adapters.training.records import (
    BEST,
    CHOSEN_BY_HASH,
    KIND,
    TRAINING,
    BestSoFar,
    PhaseCheckpoint,
    PhaseState,
    StepRecord,
    checkpoints_of,
)
from flatout.engines.run.checkpoints import thread_note
from flatout.engines.run.log import RunLog, is_abandoned
from flatout.ground import OnProgress
from flatout.ground.codec import encode
from flatout.ground.errors import BadInput, ChildDied, Interrupted
from flatout.ground.interrupts import Interrupts
from flatout.ground.units import round_up

TOTAL = "total"  # the name of the loss that is minimised, where it is more than the mean of the tasks
ASK_EVERY = 10  # steps between two checks whether another rank was told to stop

StateFunction = Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]


class LossWindow:
    """Losses since the last report, summed on the device."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._counts: Counter[tuple[str, ...]] = Counter()
        self.tokens = 0
        self.steps = 0
        self._began_s = time.perf_counter()

    def add(self, names: tuple[str, ...], losses: Tensor, *, tokens: int) -> None:
        """Add the losses [names] of one batch."""
        before = self._sums.get(names)
        self._sums[names] = losses.detach() if before is None else before + losses.detach()
        self._counts[names] += 1
        self.tokens += tokens

    def means(self) -> tuple[dict[str, float], float]:
        """Return (mean losses by name, seconds since the window was opened)."""
        sums: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for names, totals in self._sums.items():
            for name, total in zip(names, totals.tolist(), strict=True):
                sums[name] += total
                counts[name] += self._counts[names]
        return {name: sums[name] / counts[name] for name in sums}, time.perf_counter() - self._began_s


class PhaseRun:
    """One phase under way."""

    def __init__(
        self,
        assembly: AdapterAssembly,
        *,
        phase: str,
        steps: int,
        found: PhaseCheckpoint | None,
        log: RunLog[StepRecord] | None,
        live: LiveLine,
        stop: Interrupts,
        on_line: OnProgress,
        on_progress: OnProgress,
    ) -> None:
        self.assembly, self.phase, self.steps, self.found = assembly, phase, steps, found
        self.on_progress = on_progress
        self.checkpoints = checkpoints_of(assembly.settings.folder, phase)
        self._log, self._live, self._stop, self._on_line = log, live, stop, on_line
        self.step = 0
        self.progress: dict[str, BestSoFar] = {}
        self.best: dict[str, Tensor] = {}
        self.window = LossWindow()
        self._notes: list[str] = []  # since the last report
        self._reported: StepRecord | None = None
        self.training_state: StateFunction = lambda: ({}, {})
        self._kept_at: int | None = None
        self._sent_before = assembly.ranks.sent_bytes.total()
        self._elapsed_s = 0.0
        if found is not None:
            self._resume(found)
        else:
            self.best = _copies(assembly.weights())
        self._began_s = time.perf_counter()

    def _resume(self, found: PhaseCheckpoint) -> None:
        state, assembly = found.state, self.assembly
        assembly.check(found)
        check_resume(state.config, assembly.settings, phase=self.phase)
        if state.version < CHOSEN_BY_HASH:
            self._check_all_judged(found)
        if (note := thread_note(state.threads, on_cpu=assembly.device.type == "cpu")) is not None:
            self.on_progress(note)
        assembly.load_weights(weights_under(found.tensors(TRAINING), "weights"))
        self.best = found.tensors(BEST)
        self.step, self.progress, self._elapsed_s = state.step, dict(state.progress), state.elapsed_s
        self._kept_at = state.step
        self.on_progress(f"{self.phase}: continuing after step {state.step} of {self.steps}")

    def _check_all_judged(self, found: PhaseCheckpoint) -> None:
        """Raise BadInput if a phase was judged on its first rows: scores on other rows do not compare."""
        rows = getattr(getattr(self.assembly.settings, self.phase), "validate_rows", None)
        for name, splits in self.assembly.splits.items():
            if rows is not None and len(splits.validation) > rows:
                raise BadInput(
                    f"{found.path} was judged on the first {rows} of {len(splits.validation)} "
                    f"validation rows of {name}; this version chooses them by a hash",
                    hint=f"start {self.phase} again in another --out",
                )

    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what `training_state` gave when the checkpoint was saved."""
        assert self.found is not None
        return weights_under(self.found.tensors(TRAINING), "training"), self.found.state.extra

    def seed(self, number: int) -> None:
        """Make dropout of batch `number` a function of the run's seed and the number."""
        torch.manual_seed(seed_of(self.assembly.settings.seed, self.phase, number))

    def begin(self) -> None:
        """Start the clock of the first report: loading before it does not count."""
        self.window = LossWindow()

    def elapsed_s(self) -> float:
        return self._elapsed_s + time.perf_counter() - self._began_s

    def record_scores(
        self,
        names: tuple[str, ...],
        *,
        score: float,
        scores: Mapping[str, dict[str, float]],
        patience: int | None,
    ) -> bool:
        """Count an evaluation of adapters judged together; return whether it is their best so far."""
        is_best = False
        for name in names:
            self.progress[name], is_best = self.progress.get(name, BestSoFar()).after(
                score=score, scores=scores.get(name, {}), step=self.step, patience=patience
            )
        return is_best

    def tell(self, note: str) -> None:
        """Report a note now, and again in the log line of this step."""
        self.on_progress(note)
        self._notes.append(note)

    def tell_at_first(self, notes: Sequence[str]) -> None:
        """Report notes on the whole phase; a resumed phase has already done so."""
        if self.found is None:
            for note in notes:
                self.tell(note)

    def keep_best(self, weights: Mapping[str, Tensor]) -> None:
        self.best |= _copies(weights)

    def report_first(
        self, *, validation: Mapping[str, dict[str, float | None]], routing: Mapping[str, float | None]
    ) -> None:
        """Report an evaluation that was made before the first step."""
        self._report({}, validation=validation, routing=routing)

    def end_step(
        self,
        *,
        learning_rates: Mapping[str, float],
        validation: Mapping[str, dict[str, float | None]] | None = None,
        routing: Mapping[str, float | None] | None = None,
        last: bool = False,
    ) -> None:
        """Report, save a checkpoint and stop, each if it is due."""
        settings = self.assembly.settings
        self.window.steps += 1
        if self.step % settings.log_every == 0 or validation or routing or self._notes or last:
            self._report(learning_rates, validation=validation or {}, routing=routing or {})
        if self.assembly.ranks.first and (self.step % settings.checkpoint_every == 0 or last):
            self.save(finished=last)
        self._stop_if_asked()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Save the previous step if another process is lost in the block, which computes a step."""
        try:
            yield
        except ChildDied:
            ranks, settings = self.assembly.ranks, self.assembly.settings
            if ranks.first:
                self.save(finished=False)
            elif ranks.is_deputy and is_abandoned(settings.folder):
                # The first rank may have ended between the update and its report.
                with RunLog(settings.folder, KIND, settings=encode(settings)) as self._log:
                    if self._reported is not None:
                        self._log.write_if_missing(self._reported)
                    self.save(finished=False)
            raise

    def save(self, *, finished: bool) -> None:
        """Write a checkpoint of this step, once."""
        if self._kept_at == self.step and not finished:
            return
        tensors, extra = self.training_state()
        weights = {f"weights/{name}": value for name, value in self.assembly.weights().items()}
        state = PhaseState(
            phase=self.phase,
            step=self.step,
            steps=self.steps,
            finished=finished,
            config=encode(self.assembly.settings),
            fingerprint=self.assembly.fingerprint,
            threads=torch.get_num_threads(),
            progress=self.progress,
            extra=extra,
            elapsed_s=self.elapsed_s(),
        )
        training = {**weights, **{f"training/{name}": value for name, value in tensors.items()}}
        if self._log is not None:
            self._log.flush()
        self.checkpoints.save(
            self.step,
            state=state,
            files={TRAINING: training, BEST: self.best},
            keep=self.assembly.settings.keep_checkpoints,
        )
        self._kept_at = self.step

    def _report(
        self,
        learning_rates: Mapping[str, float],
        *,
        validation: Mapping[str, dict[str, float | None]],
        routing: Mapping[str, float | None],
    ) -> None:
        losses, seconds = self.window.means()
        steps, tokens = self.window.steps, self.window.tokens * self.assembly.ranks.num_ranks
        steps_per_s = steps / seconds if steps and seconds else None
        self._reported = record = StepRecord(
            phase=self.phase,
            step=self.step,
            losses={**losses},
            learning_rates=dict(learning_rates),
            validation=dict(validation),
            routing=dict(routing),
            tokens_per_s=tokens / seconds if tokens and seconds else None,
            steps_per_s=steps_per_s,
            sent_bytes=self.assembly.ranks.sent_bytes.total() - self._sent_before,
            elapsed_s=self.elapsed_s(),
            notes=tuple(self._notes),
        )
        if self._log is not None:
            self._log.write(record)
        shown = [losses[TOTAL]] if TOTAL in losses else losses.values()
        known = [loss for loss in shown if math.isfinite(loss)]
        line = self._live.render(
            loss=sum(known) / len(known) if known else None,
            lr=max(learning_rates.values(), default=None),
            steps_per_s=steps_per_s,
        )
        scores = "".join(
            f" · {name} {next(iter(each.values())):.1f}" for name, each in validation.items() if each
        )
        accuracy = (routing or {}).get("accuracy")
        if accuracy is not None:
            scores += f" · routing {accuracy:.1f} %"
        self._on_line(f"{self.phase} {self.step}/{self.steps} | {line}{scores}")
        self._sent_before = self.assembly.ranks.sent_bytes.total()
        self.window, self._notes = LossWindow(), []

    def _stop_if_asked(self) -> None:
        # Ask other ranks rarely: the answer waits for the GPU.
        ranks = self.assembly.ranks
        if ranks.num_ranks == 1:
            asked = self._stop.came
        else:
            asked = self.step % ASK_EVERY == 0 and ranks.any(self._stop.came)
        if asked:
            if ranks.first:
                self.save(finished=False)
            out = self.assembly.settings.folder
            raise Interrupted(
                f"interrupted; step {self.step} of {self.steps} of {self.phase} is kept in {out}",
                hint="continue with --resume",
            )


def check_share(assembly: AdapterAssembly, accumulate: int, *, phase: str) -> None:
    """Raise BadInput unless the ranks can share the batches of a step evenly."""
    num_ranks = assembly.ranks.num_ranks
    if accumulate % num_ranks:
        raise BadInput(
            f"{phase}.accumulate={accumulate} batches cannot be shared among {num_ranks} processes",
            hint=f"--set {phase}.accumulate={round_up(accumulate, num_ranks)}",
        )


def _copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in weights.items()}
