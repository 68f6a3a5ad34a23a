"""Phase 3: router, adapters and heads together.

The router's weights mix the adapters of every row, so the loss of a task reaches the router: it learns where
another adapter would answer better.  With hard Gumbel draws the forward uses one adapter and the gradient
that of the softmax.

The share of batches with rows of one task falls from `single_task_first` to `single_task_last` on a straight
line.  Adapters and heads learn at a tenth of the router's rate.  The router
sees the frozen features of phase 2, so one pass of the encoder is enough.  The weights of phase 2 are judged
first, and only better ones replace them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from flatout.engines.adapters.assembly import AdapterAssembly
from flatout.engines.adapters.lora.fused_step import half_precision
from flatout.engines.adapters.lora.gradient_sum import GradientSum
from flatout.engines.adapters.lora.optimizer import SHARED, AdapterOptimizer
from flatout.engines.adapters.lora.recorder import Recorder
from flatout.engines.adapters.settings import PhaseThree
from flatout.engines.adapters.tasks.task import TaskBatch
from flatout.engines.adapters.training.batches import TrainingBatches
from flatout.engines.adapters.training.phase import TOTAL, PhaseRun, check_share
from flatout.engines.adapters.training.phase1_adapters import optimizer_of, step_settings, training_batches
from flatout.engines.adapters.training.phase2_router import (
    NAME,
    calibrate_best,
    is_done,
    judge_router,
    router_losses,
    stack_rows,
)
from flatout.engines.adapters.training.validation import HeldOutScores, Validation, judge_shared
from flatout.ground.codec import fields_of
from flatout.ground.decisions import Decision

Figures = dict[str, float | None]


def train_jointly(run: PhaseRun) -> None:
    """Train from where `run` stands to its last step, or until it no longer improves."""
    assembly, phase = run.assembly, run.assembly.settings.phase3
    check_share(assembly, phase.accumulate, phase=run.phase)
    step = JointStep(run)
    validation = Validation(assembly, rows=phase.validate_rows)
    run.tell_at_first(validation.notes)
    held_out = {name: assembly.features(validation.rows[name].examples) for name in assembly.names}
    if run.found is not None:
        step.optimizer.load_state(*run.optimizer_state())
    run.training_state = step.optimizer.state
    assembly.router.gumbel = phase.noise == "gumbel"
    assembly.train()
    if not run.progress:
        judged, figures = _evaluate(run, validation, held_out)
        run.report_first(validation=_as_numbers(judged), routing=figures)
    chosen = step.decision
    run.on_progress(f"steps are {chosen}")
    run.begin()
    while run.step < run.steps and not is_done(run):
        with run.stepping():
            step(run.step)
        run.step += 1
        judged, figures = {}, {}
        if run.step % phase.evaluate_every == 0 or run.step == run.steps:
            judged, figures = _evaluate(run, validation, held_out)
        last = run.step == run.steps or is_done(run)
        if last:
            calibrate_best(run, stack_rows(assembly, held_out))
            _tell_if_useless(run, judged)
        run.end_step(
            learning_rates={NAME: step.optimizer.rate(SHARED)},
            validation=_as_numbers(judged),
            routing=figures,
            last=last,
        )
    if step.decision != chosen:
        run.on_progress(f"steps became {step.decision}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedBatch(TaskBatch):
    """A task's batch and what the router sees of its rows."""

    features: Tensor  # [B, H]


class JointStep:
    """One optimizer step on single-task or mixed batches, recorded where their shapes occur again."""

    def __init__(self, run: PhaseRun) -> None:
        assembly = self._assembly = run.assembly
        self._run, self._phase = run, assembly.settings.phase3
        self._losses = router_losses(self._phase.losses)
        self._batches = training_batches(
            assembly,
            tokens=dict.fromkeys(assembly.names, self._phase.tokens),
            num_buckets=self._phase.buckets,
        )
        self._features = _bucket_features(assembly, self._batches)
        self.optimizer = _make_optimizer(assembly)
        self._recorder = Recorder(
            assembly.encoder,
            optimizer=self.optimizer,
            graph=assembly.settings.graph_choice,
            exchanges=assembly.ranks.num_ranks > 1,
        )
        self._sum = GradientSum.where_needed(
            accumulation=self._phase.accumulate,
            device=assembly.device,
            total=assembly.ranks.sum_in_order if assembly.ranks.num_ranks > 1 else None,
        )

    @property
    def decision(self) -> Decision[str]:
        """Whether steps are recorded."""
        return self._recorder.decision

    def __call__(self, step: int) -> None:
        phase = self._phase
        self.optimizer.write_rates()
        first = step * phase.accumulate
        own = self._assembly.ranks.own(range(first, first + phase.accumulate))
        for number in own:
            batches = self.batches(number, step=step)
            updates = number == own[-1]
            self._run.seed(number)
            losses = self._recorder(partial(self._eager, updates=updates), batches, key=updates)
            tasks = tuple(self._assembly.names[batch.block.adapter] for batch in batches)
            self._run.window.add(
                (*tasks, *self._losses.names, TOTAL),
                losses,
                tokens=sum(batch.block.num_tokens for batch in batches),
            )
        self.optimizer.count(self._assembly.names)

    def batches(self, number: int, *, step: int) -> list[RoutedBatch]:
        """Return batch `number`: rows of one task or of all, with their features."""
        assembly = self._assembly
        tasks = tasks_of_batch(
            assembly.names, self._phase, number=number, step=step, seed=assembly.settings.seed
        )
        found = []
        for rows, bucket, visit in self._batches.where(number, tasks=tasks):
            batch, (_, places) = rows.batch(bucket, visit=visit), rows.places(bucket, visit=visit)
            features = self._features[rows.adapter, bucket].index_select(0, places)
            found.append(RoutedBatch(**fields_of(batch), features=features))
        return found

    def _eager(self, batches: Sequence[RoutedBatch], *, updates: bool) -> Tensor:
        """Run backward, and the update where it is due; return the detached parts of the loss."""
        names = self._assembly.names
        total, losses = self.losses(batches)
        scaled = self.optimizer.scaled(SHARED, total)
        (scaled / self._phase.accumulate).backward()
        # All gradients, zero where a task had no row: AdamW skips parameters without a gradient, and a
        # resumed run would skip those for which an uninterrupted one has a gradient of zero.
        gradients = self.optimizer.gradients(names)
        if self._sum is not None:
            self._sum.add(gradients, last=updates)
        if updates:
            self.optimizer.update(names)
        return losses

    def losses(self, batches: Sequence[RoutedBatch]) -> tuple[Tensor, Tensor]:
        """Return (total, detached parts): the loss of each batch, the router's terms, the total."""
        features_BH = torch.cat([batch.features for batch in batches])
        tasks_B = torch.cat([torch.full_like(batch.block.lengths, batch.block.adapter) for batch in batches])
        routing = self._assembly.router(features_BH)
        terms = self._losses.terms(routing, tasks_B=tasks_B, features_BH=features_BH)
        of_tasks = torch.stack(self._task_losses(batches, routing.weights))
        total = self._losses.total(terms, task_loss=of_tasks.mean())
        return total, torch.cat((of_tasks, torch.stack((*terms.values(), total)))).detach()

    def _task_losses(self, batches: Sequence[RoutedBatch], weights_BT: Tensor) -> list[Tensor]:
        assembly, encoder = self._assembly, self._assembly.encoder
        states = encoder(tuple(batch.block for batch in batches), mixture=weights_BT, dropout=True)
        with half_precision(encoder):
            return [
                assembly.loss(batch.block.adapter, state, batch).float()
                for batch, state in zip(batches, states, strict=True)
            ]


def tasks_of_batch(
    names: Sequence[str], phase: PhaseThree, *, number: int, step: int, seed: int
) -> tuple[str, ...]:
    """Choose the tasks whose rows are in batch `number`: one of them, or all."""
    draw = np.random.default_rng([seed, number, 3])
    if draw.random() < single_task_share(phase, step=step):
        return (names[int(draw.integers(len(names)))],)
    return tuple(names)


def single_task_share(phase: PhaseThree, *, step: int) -> float:
    """Return the chance that a batch has rows of one task only: a straight line over the steps."""
    way = step / max(1, phase.steps - 1)
    return phase.single_task_first + (phase.single_task_last - phase.single_task_first) * way


def _make_optimizer(assembly: AdapterAssembly) -> AdapterOptimizer:
    """Train router and decoder at the phase's rate, adapters and heads at a share of it."""
    phase = assembly.settings.phase3

    slow = step_settings(replace(phase, lr=phase.lr * phase.adapter_lr_share), num_steps=phase.steps)
    settings = dict.fromkeys(assembly.names, slow)
    settings[SHARED] = step_settings(phase, num_steps=phase.steps)
    shared: dict[str, nn.Module] = {NAME: assembly.router}
    if assembly.decoder is not None:
        shared["decoder"] = assembly.decoder
    return optimizer_of(assembly, settings, shared=nn.ModuleDict(shared), shared_by=None)


def _bucket_features(assembly: AdapterAssembly, batches: TrainingBatches) -> dict[tuple[int, int], Tensor]:
    """Return the features of every bucket's rows, by (adapter, bucket), on the device."""
    found = {}
    for name, rows in batches.rows.items():
        examples = assembly.rows(name, "train").examples
        features = assembly.features(examples)
        place_of = {example.index: place for place, example in enumerate(examples)}
        for number, bucket in enumerate(rows.buckets):
            places = [place_of[index] for index in bucket.whole.indices]
            found[rows.adapter, number] = features[places]
    return found


def _evaluate(
    run: PhaseRun, validation: Validation, held_out: Mapping[str, Tensor]
) -> tuple[dict[str, HeldOutScores], Figures]:
    """Judge every task under the adapters that the router chooses; the best has the highest mean metric."""
    assembly = run.assembly
    judged = judge_shared(
        list(held_out),
        lambda name: validation.judge(name, weights_NT=assembly.decider.route(held_out[name]).weights),
        ranks=assembly.ranks,
    )
    figures = judge_router(assembly.router, stack_rows(assembly, held_out))
    scores = {name: each.scores[assembly.parts[name].task.metric] for name, each in judged.items()}
    is_best = run.record_scores(
        (NAME,),
        score=_mean_metric(assembly, judged),
        scores={NAME: {**scores, "routing_accuracy": figures["accuracy"] or 0.0}},
        patience=assembly.settings.phase3.patience,
    )
    if is_best:
        run.keep_best(assembly.weights())
    return judged, figures


def _mean_metric(assembly: AdapterAssembly, judged: Mapping[str, HeldOutScores]) -> float:
    metrics = [judged[name].scores[part.task.metric] for name, part in assembly.parts.items()]
    return sum(metrics) / len(metrics)


def _as_numbers(judged: Mapping[str, HeldOutScores]) -> dict[str, dict[str, float | None]]:
    return {name: each.all() for name, each in judged.items()}


def _tell_if_useless(run: PhaseRun, judged: Mapping[str, HeldOutScores]) -> None:
    """Report if no evaluation was better than the first: the weights of phase 2 are then kept."""
    found = run.progress[NAME]
    if found.best_step == 0 and found.best_score is not None:
        run.tell(
            "joint training was never better on held-out rows "
            f"(mean score of the tasks {found.best_score:.2f} before it, "
            f"{_mean_metric(run.assembly, judged):.2f} at its end): the weights of phase2 are kept"
        )
