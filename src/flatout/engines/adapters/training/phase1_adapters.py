"""Phase 1: an adapter and a head per task, all of them in every step.

Every adapter trains as if it were alone: with its own learning rate, schedule, clipping and patience.  An
adapter that no longer improves leaves, and the batch shrinks by its block; so does one whose loss stays not a
number.  Tasks that write share a decoder, and their weights match only within one step: they are judged
together, by the mean of their scores, and leave together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flatout.engines.adapters.assembly import AdapterAssembly
from flatout.engines.adapters.lora.fused_step import SHARED, AdapterOptimizer, FusedStep, StepSettings
from flatout.engines.adapters.settings import LearningSettings, PhaseSettings, TaskSettings
from flatout.engines.adapters.tasks.task import TaskBatch
from flatout.engines.adapters.training.batches import TaskRows, TrainingBatches
from flatout.engines.adapters.training.phase import PhaseRun, check_share
from flatout.engines.adapters.training.records import BestSoFar
from flatout.engines.adapters.training.validation import HeldOutScores, Validation, judge_shared

LOOK_EVERY = 10  # steps between two checks for losses that are not numbers: a check waits for the GPU
LOST_AFTER = 20  # steps in a row without a loss that is a number
LOST = "its loss is not a number"


def train_adapters(run: PhaseRun) -> None:
    """Train from the current step of `run` to its last, or until every adapter has left."""
    assembly, settings = run.assembly, run.assembly.settings.phase1
    ranks = assembly.ranks
    check_share(assembly, settings.accumulate, phase=run.phase)
    tokens = {name: part.settings.tokens or settings.tokens for name, part in assembly.parts.items()}
    batches = training_batches(assembly, tokens=tokens, num_buckets=settings.buckets)
    validation = Validation(assembly, rows=settings.validate_rows)
    run.tell_at_first(validation.notes)
    optimizer = make_optimizer(assembly)
    step = FusedStep(
        assembly.encoder,
        optimizer=optimizer,
        loss=assembly.loss,
        accumulation=settings.accumulate // ranks.num_ranks,
        num_batches=settings.accumulate,
        graph=assembly.settings.graph_choice,
        total=ranks.sum_in_order if ranks.num_ranks > 1 else None,
    )
    if run.found is not None:
        step.load_state(*run.optimizer_state())
    run.training_state = step.state
    chosen = step.decision
    run.on_progress(f"steps are {chosen}")
    assembly.train()
    run.begin()
    while run.step < run.steps and optimizer.active:
        first = run.step * settings.accumulate
        with run.stepping():
            for number in ranks.own(range(first, first + settings.accumulate)):
                run.seed(number)
                taken = batches.at(number, tasks=optimizer.active)
                losses = step(taken)
                run.window.add(
                    optimizer.active,
                    _of_present(losses, taken),
                    tokens=sum(batch.block.num_tokens for batch in taken),
                )
        run.step += 1
        rates = {name: optimizer.rate(name) for name in optimizer.active}
        if run.step % LOOK_EVERY == 0:
            _drop_lost(run, step, optimizer)
        judged = _evaluate(run, validation, optimizer)
        run.end_step(
            learning_rates=rates,
            validation={name: each.all() for name, each in judged.items()},
            last=run.step == run.steps or not optimizer.active,
        )
    if step.decision != chosen:
        run.on_progress(f"steps became {step.decision}")


def _of_present(losses: Tensor, taken: Sequence[TaskBatch]) -> Tensor:
    """Return the losses of the adapters that have a batch."""
    if len(taken) == len(losses):
        return losses
    return torch.stack([losses[batch.block.adapter] for batch in taken])


def training_batches(
    assembly: AdapterAssembly, *, tokens: Mapping[str, int], num_buckets: int
) -> TrainingBatches:
    """Return the training rows of every task, in blocks of a number of tokens."""
    rows = {
        name: TaskRows(
            part.task,
            assembly.rows(name, "train").examples,
            name=name,
            adapter=part.adapter,
            tokens=tokens[name],
            num_buckets=num_buckets,
            pad_id=assembly.pad_id,
            seed=assembly.settings.seed,
            device=assembly.device,
        )
        for name, part in assembly.parts.items()
    }
    return TrainingBatches(rows, seed=assembly.settings.seed)


def make_optimizer(assembly: AdapterAssembly) -> AdapterOptimizer:
    """Make an AdamW per adapter with the settings of its task, or else of the phase."""
    phase = assembly.settings.phase1
    settings = {
        name: step_settings(phase, num_steps=steps_of(assembly, name), task=task)
        for name, task in assembly.settings.tasks.items()
    }
    writing = [name for name, part in assembly.parts.items() if part.task.needs_decoder]
    num_steps = max((steps_of(assembly, name) for name in writing), default=phase.steps)
    settings[SHARED] = step_settings(phase, num_steps=num_steps)
    return optimizer_of(assembly, settings, shared=assembly.decoder, shared_by=writing)


def step_settings(phase: PhaseSettings, *, num_steps: int, task: TaskSettings | None = None) -> StepSettings:
    """Make the schedule of a phase over `num_steps`; what a task sets for itself replaces the phase's."""
    learning = {each.name: getattr(phase, each.name) for each in dataclasses.fields(LearningSettings)}
    own = {name: getattr(task, name, None) for name in learning}
    learning |= {name: value for name, value in own.items() if value is not None}
    return StepSettings(num_steps=num_steps, **learning)


def optimizer_of(
    assembly: AdapterAssembly,
    settings: dict[str, StepSettings],
    *,
    shared: nn.Module | None,
    shared_by: list[str] | None,
) -> AdapterOptimizer:
    """Make the optimizer of all adapters and heads, and of the modules that some of them share."""
    return AdapterOptimizer(
        assembly.bank,
        settings=settings,
        heads={name: part.head for name, part in assembly.parts.items()},
        shared=shared,
        shared_by=shared_by,
        loss_scaling=assembly.precision.value == "float16",  # whose gradients below 6e-8 become zero
    )


def decoder_groups(assembly: AdapterAssembly) -> list[tuple[str, ...]]:
    """Group tasks by what they share: those with the decoder together, every other one alone."""
    writing = tuple(name for name, part in assembly.parts.items() if part.task.needs_decoder)
    groups: list[tuple[str, ...]] = [(name,) for name in assembly.names if name not in writing]
    return [*groups, writing] if writing else groups


def steps_of(assembly: AdapterAssembly, name: str) -> int:
    """Return the optimizer steps of a task: its own or the phase's; the decoder's tasks share them."""
    (names,) = (names for names in decoder_groups(assembly) if name in names)
    return max(assembly.settings.tasks[each].steps or assembly.settings.phase1.steps for each in names)


def _evaluate(run: PhaseRun, validation: Validation, optimizer: AdapterOptimizer) -> dict[str, HeldOutScores]:
    """Judge the adapters that are due, keep better weights, and let finished adapters leave."""
    assembly, phase = run.assembly, run.assembly.settings.phase1
    is_round = run.step % phase.evaluate_every == 0
    due = [name for name in optimizer.active if is_round or run.step == steps_of(assembly, name)]
    judged = judge_shared(due, validation.judge, ranks=assembly.ranks)
    for every in decoder_groups(assembly):
        names = tuple(name for name in every if name in judged)
        if not names:
            continue
        patiences = [assembly.settings.tasks[name].patience or phase.patience for name in names]
        known = [patience for patience in patiences if patience is not None]
        is_best = run.record_scores(
            names,
            score=sum(_score(assembly, name, judged[name]) for name in names) / len(names),
            scores={name: {**judged[name].scores, "loss": judged[name].loss} for name in names},
            patience=max(known) if known else None,
        )
        if is_best:
            run.keep_best(assembly.weights(only=names))
            if assembly.parts[names[0]].task.needs_decoder:
                run.keep_best(assembly.module_weights("decoder"))
        _let_go(run, names, optimizer)
    return judged


def _let_go(run: PhaseRun, names: tuple[str, ...], optimizer: AdapterOptimizer) -> None:
    """Let adapters leave that no longer improve or whose schedule has ended."""
    at_end = run.step == steps_of(run.assembly, names[0])
    for name in names:
        if at_end:
            run.progress[name] = dataclasses.replace(run.progress[name], done=run.step)
        if run.progress[name].done is not None:
            optimizer.finish(name)
            if run.step < run.steps:
                best = run.progress[name].best_step
                run.on_progress(f"{name} leaves at step {run.step}; best at step {best}")


def _drop_lost(run: PhaseRun, step: FusedStep, optimizer: AdapterOptimizer) -> None:
    """Let adapters leave whose loss stays not a number: such steps teach nothing.

    In a shared decoder they teach none of the tasks.
    """
    assembly = run.assembly
    calls = LOST_AFTER * (assembly.settings.phase1.accumulate // assembly.ranks.num_ranks)
    counts = step.num_not_finite()
    lost = [name for name in optimizer.active if assembly.ranks.any(counts[name] >= calls)]
    for name in lost:
        progress = run.progress.get(name, BestSoFar())
        run.progress[name] = dataclasses.replace(progress, done=run.step, left_because=LOST)
        optimizer.finish(name)
        run.tell(f"{name} left at step {run.step}: {LOST}")
    for names in decoder_groups(assembly):
        if any(name in lost for name in names):
            for name in set(names) & set(optimizer.active) & run.progress.keys():
                # Its best score is a mean that includes the task that left.
                run.progress[name] = dataclasses.replace(
                    run.progress[name], best_score=None, evaluations_without_better=0
                )


def _score(assembly: AdapterAssembly, name: str, judged: HeldOutScores) -> float:
    """Return the score that picks the best weights: higher is better."""
    part = assembly.parts[name]
    if (part.settings.select or assembly.settings.phase1.select) == "loss":
        return -judged.loss
    return judged.scores[part.task.metric]
