"""What every phase does beside training: it counts steps, tells how it goes, keeps checkpoints, and stops.

Everything happens at the border of an optimizer step, where weights and optimizer states belong together.
Losses stay on the device until a report is due: reading one would wait for the GPU.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.codec import encode
from flatout.engines.adapters.assembly import Assembly, seed_of, under
from flatout.engines.adapters.settings import check_unchanged
from flatout.engines.adapters.training import checkpoint
from flatout.engines.adapters.training.checkpoint import Checkpoint, Progress, State
from flatout.engines.adapters.training.live_line import LiveLine
from flatout.engines.adapters.training.log import RunLog, StepRecord
from flatout.engines.adapters.training.stopping import StopRequest, after_evaluation
from flatout.errors import Interrupted

TOTAL = "total"  # the name of what is minimised, where that is more than the mean of the tasks
ASK_EVERY = 10  # steps between two questions whether another process was told to stop

TrainingState = Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]


class Window:
    """Losses since the last report, summed on the device."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._counts: Counter[tuple[str, ...]] = Counter()
        self.tokens = 0
        self.steps = 0
        self._began_s = time.perf_counter()

    def add(self, names: tuple[str, ...], losses: Tensor, *, tokens: int) -> None:
        """Losses [names] of one batch."""
        before = self._sums.get(names)
        self._sums[names] = losses.detach() if before is None else before + losses.detach()
        self._counts[names] += 1
        self.tokens += tokens

    def closed(self) -> tuple[dict[str, float], float]:
        """The mean losses and the seconds since the window was opened."""
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
        assembly: Assembly,
        *,
        phase: str,
        steps: int,
        found: Checkpoint | None,
        log: RunLog | None,
        live: LiveLine,
        stop: StopRequest,
        on_line: Callable[[str], None],
        on_note: Callable[[str], None],
    ) -> None:
        self.assembly, self.phase, self.steps, self.found = assembly, phase, steps, found
        self.on_note = on_note
        self.folder = Path(assembly.config.out) / phase
        self._log, self._live, self._stop, self._on_line = log, live, stop, on_line
        self.step = 0
        self.progress: dict[str, Progress] = {}
        self.best: dict[str, Tensor] = {}
        self.window = Window()
        self._notes: list[str] = []  # since the last report
        self.training_state: TrainingState = lambda: ({}, {})
        self._kept_at: int | None = None
        self._elapsed_s = 0.0
        if found is not None:
            self._go_on(found)
        else:
            self.best = self._copied(assembly.weights())
        self._began_s = time.perf_counter()

    def _go_on(self, found: Checkpoint) -> None:
        state, config = found.state, self.assembly.config
        checkpoint.check_model(
            state, fingerprint=self.assembly.fingerprint, model=config.model, path=found.path
        )
        check_unchanged(state.config, config, phase=self.phase)
        if state.threads != torch.get_num_threads() and self.assembly.device.type == "cpu":
            self.on_note(
                f"the run had {state.threads} threads and has {torch.get_num_threads()} here: "
                "it may differ from an uninterrupted one in the last bits"
            )
        self.assembly.load_weights(under(found.training(), "weights"))
        self.best = found.best()
        self.step, self.progress, self._elapsed_s = state.step, dict(state.progress), state.elapsed_s
        self._kept_at = state.step
        self.on_note(f"{self.phase}: going on after step {state.step} of {self.steps}")

    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `training_state` gave when the checkpoint was kept."""
        assert self.found is not None
        return under(self.found.training(), "training"), self.found.state.extra

    def seed(self, number: int) -> None:
        """Dropout of batch `number` is a function of the run's seed and the number."""
        torch.manual_seed(seed_of(self.assembly.config.seed, self.phase, number))

    def begin(self) -> None:
        """The first step is about to be made: what was loaded before it does not count as its time."""
        self.window = Window()

    def elapsed_s(self) -> float:
        return self._elapsed_s + time.perf_counter() - self._began_s

    def better(
        self,
        names: tuple[str, ...],
        *,
        score: float,
        scores: Mapping[str, dict[str, float]],
        patience: int | None,
    ) -> bool:
        """Note an evaluation of parts that are judged together; whether their weights are the best so far."""
        is_best = False
        for name in names:
            self.progress[name], is_best = after_evaluation(
                self.progress.get(name, Progress()),
                score=score,
                scores=scores.get(name, {}),
                step=self.step,
                patience=patience,
            )
        return is_best

    def tell(self, note: str) -> None:
        """Say what happened, here and in the next report, which is due at this step's border."""
        self.on_note(note)
        self._notes.append(note)

    def keep_best(self, weights: Mapping[str, Tensor]) -> None:
        self.best |= self._copied(weights)

    def look(
        self, *, validation: Mapping[str, dict[str, float | None]], routing: Mapping[str, float | None]
    ) -> None:
        """Report an evaluation that was made before the first step."""
        self._report({}, validation=validation, routing=routing)

    def border(
        self,
        *,
        learning_rates: Mapping[str, float],
        validation: Mapping[str, dict[str, float | None]] | None = None,
        routing: Mapping[str, float | None] | None = None,
        last: bool = False,
    ) -> None:
        """The end of a step: report, keep a checkpoint, stop, each where it is due."""
        config = self.assembly.config
        self.window.steps += 1
        if self.step % config.log_every == 0 or validation or routing or self._notes or last:
            self._report(learning_rates, validation=validation or {}, routing=routing or {})
        if self.step % config.checkpoint_every == 0 or last:
            self.keep(finished=last)
        self._stop_if_asked()

    def keep(self, *, finished: bool) -> None:
        if not self.assembly.processes.first or (self._kept_at == self.step and not finished):
            return
        tensors, extra = self.training_state()
        weights = {f"weights/{name}": value for name, value in self.assembly.weights().items()}
        state = State(
            phase=self.phase,
            step=self.step,
            steps=self.steps,
            finished=finished,
            config=encode(self.assembly.config),
            fingerprint=self.assembly.fingerprint,
            threads=torch.get_num_threads(),
            progress=self.progress,
            extra=extra,
            elapsed_s=self.elapsed_s(),
        )
        checkpoint.save(
            self.folder,
            state=state,
            training={**weights, **{f"training/{name}": value for name, value in tensors.items()}},
            best=self.best,
            keep=self.assembly.config.keep_checkpoints,
        )
        self._kept_at = self.step

    def _report(
        self,
        learning_rates: Mapping[str, float],
        *,
        validation: Mapping[str, dict[str, float | None]],
        routing: Mapping[str, float | None],
    ) -> None:
        losses, seconds = self.window.closed()
        steps, tokens = self.window.steps, self.window.tokens * self.assembly.processes.num
        steps_per_s = steps / seconds if steps and seconds else None
        record = StepRecord(
            phase=self.phase,
            step=self.step,
            losses={**losses},
            learning_rates=dict(learning_rates),
            validation=dict(validation),
            routing=dict(routing),
            tokens_per_s=tokens / seconds if tokens and seconds else None,
            steps_per_s=steps_per_s,
            elapsed_s=self.elapsed_s(),
            notes=tuple(self._notes),
        )
        if self._log is not None:
            self._log.write(record)
        shown = [losses[TOTAL]] if TOTAL in losses else losses.values()
        known = [loss for loss in shown if math.isfinite(loss)]
        line = self._live.shown(
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
        self.window, self._notes = Window(), []

    def _stop_if_asked(self) -> None:
        # Other processes are asked seldom: the answer waits for the GPU.
        processes = self.assembly.processes
        if processes.num == 1:
            asked = self._stop.came
        else:
            asked = self.step % ASK_EVERY == 0 and processes.any(self._stop.came)
        if asked:
            self.keep(finished=False)
            out = self.folder.parent
            raise Interrupted(
                f"interrupted; step {self.step} of {self.steps} of {self.phase} is kept in {out}",
                hint="go on with --resume",
            )

    @staticmethod
    def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.detach().cpu().clone() for name, value in weights.items()}
