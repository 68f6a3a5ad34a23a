"""Phase 2: the router, on features of the frozen encoder.

Features are computed once and kept; an epoch is then a few products on a matrix on the device.  Rows of all
tasks are mixed, and the target of a row is its own task.  The router is calibrated on held-out rows, and the
best epoch is the one whose calibrated router has the least loss on them: a network that keeps learning gets
too certain before it gets worse, and calibration corrects certainty.

A run is judged by the mean of its tasks' scores, in which every task counts the same.  A router that learns
the rows as they come resolves every doubt in favour of the task with more rows; so the tasks' shares are
removed from its logits (see `router`), and tasks weigh the same among held-out rows.  `equal: rows` keeps the
shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatout.engines.adapters.assembly import AdapterAssembly, weights_under
from flatout.engines.adapters.lora.optimizer import StepSettings
from flatout.engines.adapters.routing.losses import RouterLosses
from flatout.engines.adapters.routing.router import Router
from flatout.engines.adapters.training.phase import TOTAL, PhaseRun
from flatout.engines.adapters.training.phase1_adapters import step_settings
from flatout.engines.run.settings import check_keys

NAME = "router"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRows:
    """Features [N, H] of rows of all tasks, and the task of each."""

    features: Tensor
    tasks: Tensor

    def __len__(self) -> int:
        return len(self.tasks)


def train_router(run: PhaseRun) -> None:
    """Train from where `run` stands to its last step, or until it no longer improves."""
    assembly, phase = run.assembly, run.assembly.settings.phase2
    router = assembly.router
    losses = router_losses(phase.losses)
    train, held_out = routing_rows(assembly, "train"), routing_rows(assembly, "validation")
    log_shares_T = log_shares(train.tasks, num_tasks=router.num_tasks) if phase.equal == "tasks" else None
    steps_per_epoch = -(-len(train) // phase.rows)
    run.steps = phase.epochs * steps_per_epoch
    optimizer = RouterOptimizer(router, step_settings(phase, num_steps=run.steps))
    if run.found is not None:
        optimizer.load_state(*run.optimizer_state())
    run.training_state = optimizer.state
    router.gumbel = phase.noise == "gumbel"
    assembly.train()
    run.begin()
    while run.step < run.steps and not is_done(run):
        epoch, place = divmod(run.step, steps_per_epoch)
        rows = _batch(run, train, epoch=epoch, place=place, rows=phase.rows)
        run.seed(run.step)
        routing = router(rows.features)
        terms = losses.terms(routing, tasks_B=rows.tasks, features_BH=rows.features)
        total = losses.total(terms)
        total.backward()
        rate = optimizer.update(run.step)
        run.window.add((*terms, TOTAL), torch.stack((*terms.values(), total)), tokens=0)
        run.step += 1
        figures: dict[str, float | None] = {}
        if place == steps_per_epoch - 1:
            figures = _evaluate(run, held_out, log_shares_T=log_shares_T)
        last = run.step == run.steps or is_done(run)
        if last:
            calibrate_best(run, held_out, log_shares_T=log_shares_T)
        run.end_step(learning_rates={NAME: rate}, routing=figures, last=last)


def router_losses(given: Mapping[str, float]) -> RouterLosses:
    """Make the losses with the weights that the settings change."""
    check_keys(given, RouterLosses, verb="the router", source="losses")
    return RouterLosses(**given)


def routing_rows(assembly: AdapterAssembly, split: str) -> RoutingRows:
    """Return the features of a split of all tasks."""
    return stack_rows(
        assembly, {name: assembly.features(assembly.rows(name, split).examples) for name in assembly.names}
    )


def stack_rows(assembly: AdapterAssembly, features: Mapping[str, Tensor]) -> RoutingRows:
    """Stack the features of all tasks into one matrix."""
    tasks = [torch.full((len(found),), assembly.parts[name].adapter) for name, found in features.items()]
    return RoutingRows(
        features=torch.cat(list(features.values())), tasks=torch.cat(tasks).to(assembly.device)
    )


def is_done(run: PhaseRun) -> bool:
    return NAME in run.progress and run.progress[NAME].done is not None


class RouterOptimizer:
    """AdamW for the router with its schedule; the schedule is a function of the step."""

    def __init__(self, router: nn.Module, settings: StepSettings) -> None:
        self._settings = settings
        self.parameters = list(router.parameters())
        self.adamw = torch.optim.AdamW(self.parameters, lr=settings.lr, weight_decay=settings.weight_decay)

    def update(self, step: int) -> float:
        """Clip, update and clear the gradients; return the learning rate that was used."""
        rate = self._settings.rate_at(step)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(self.parameters, self._settings.clip)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return rate

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {
            f"{NAME}.{number}.{key}": value
            for number, parameter in enumerate(self.parameters)
            for key, value in self.adamw.state.get(parameter, {}).items()
        }
        return tensors, {}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        for name, value in tensors.items():
            _, number, key = name.split(".")
            parameter = self.parameters[int(number)]
            # AdamW keeps the step counter on the host.
            own = value.clone() if key == "step" else value.to(parameter.device, copy=True)
            self.adamw.state[parameter][key] = own


def log_shares(tasks_N: Tensor, *, num_tasks: int) -> Tensor:
    """Return the logarithm of each task's share of the rows; a task without rows counts as half a row."""
    counts_T = torch.bincount(tasks_N, minlength=num_tasks).float()
    return (counts_T.clamp_min(0.5) / len(tasks_N)).log()


def _batch(run: PhaseRun, train: RoutingRows, *, epoch: int, place: int, rows: int) -> RoutingRows:
    order = np.random.default_rng([run.assembly.settings.seed, epoch]).permutation(len(train))
    places = torch.from_numpy(order[place * rows : (place + 1) * rows]).to(train.tasks.device)
    return RoutingRows(features=train.features[places], tasks=train.tasks[places])


def judge_router(
    router: Router, rows: RoutingRows, *, log_shares_T: Tensor | None = None
) -> dict[str, float | None]:
    """Judge on held-out rows, as if calibrated there: accuracy in points (all, worst task), and loss."""
    fit = router.judge(rows.features, rows.tasks, log_shares_T=log_shares_T)
    is_right = (fit.log_probabilities.argmax(-1) == rows.tasks).float()
    by_task = [float(is_right[rows.tasks == task].mean()) for task in rows.tasks.unique()]
    return {
        "accuracy": 100 * float(is_right.mean()),
        "worst_task_accuracy": 100 * min(by_task),
        "loss": fit.loss,
        "temperature": router.temperature.item(),
    }


def _evaluate(
    run: PhaseRun, held_out: RoutingRows, *, log_shares_T: Tensor | None
) -> dict[str, float | None]:
    assembly = run.assembly
    assembly.ranks.share_weights(assembly.router)
    figures = judge_router(assembly.router, held_out, log_shares_T=log_shares_T)
    scores = {name: value for name, value in figures.items() if value is not None and name != "temperature"}
    is_best = run.record_scores(
        (NAME,), score=-scores["loss"], scores={NAME: scores}, patience=assembly.settings.phase2.patience
    )
    if is_best:
        run.keep_best(assembly.module_weights(NAME))
    return figures


def calibrate_best(run: PhaseRun, held_out: RoutingRows, *, log_shares_T: Tensor | None = None) -> None:
    """Calibrate the best weights on rows that the router has not learned from."""
    router = run.assembly.router
    before = {name: value.clone() for name, value in router.state_dict().items()}
    router.load_state_dict(weights_under(run.best, NAME))
    router.calibrate(held_out.features, held_out.tasks, log_shares_T=log_shares_T)
    run.keep_best(run.assembly.module_weights(NAME))
    router.load_state_dict(before)
