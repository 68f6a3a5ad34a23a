"""What training itself shows: losses, parameters without a gradient, schedules that have ended.

Nothing here slows a timed step.  Losses are read during warm-up only, since reading waits for the GPU; after
each step only the parameters that never had a gradient are checked again, and after the first step there are
mostly none left.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

from flatout.measure.clock import Clock, ident
from flatout.measure.evidence import Losses, Place, RateSchedule, Training, Untrained
from flatout.measure.lines.live_objects import live_objects, with_subclasses
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode

HORIZONS = {"CosineAnnealingLR": "T_max", "PolynomialLR": "total_iters"}  # by name: subclasses may differ
MOST_NAMES = 5
READ = ("cpu", "cuda")  # devices whose losses are read


@dataclass(slots=True)
class Steps:
    """What an optimizer's steps have shown about its parameters."""

    num: int = 0
    num_looked: int = 0  # steps after which the parameters were checked
    num_parameters: int = 0
    without: list[Any] = field(default_factory=list)  # parameters that never had a gradient


class TrainingWatch:
    """Looks at losses, gradients and schedules."""

    def __init__(self, clock: Clock, user_code: UserCode) -> None:
        self._clock, self._user_code = clock, user_code
        self._loss: Any = None  # of this step
        self._looks = True
        self._disturbed = False  # an arm may give gradients to parameters that have none
        self._untrained: tuple[Untrained, ...] = ()
        self._schedules: tuple[RateSchedule, ...] = ()
        self.finite: list[bool] = []
        self._place: Place | None = None  # of the last backward call
        self._steps: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()  # by optimizer
        self._made_at: weakref.WeakKeyDictionary[Any, Place | None] = weakref.WeakKeyDictionary()  # schedules

    def install(self, patches: Patches) -> None:
        from torch.optim.lr_scheduler import LRScheduler

        make = LRScheduler.__init__

        def make_noted(schedule: Any, *args: Any, **kwargs: Any) -> None:
            self._made_at[schedule] = self._user_code.place(sys._getframe(1))[0]
            make(schedule, *args, **kwargs)

        patches.replace(LRScheduler, "__init__", make_noted)

    def note_loss(self, given: Any) -> None:
        """Remember the loss that `backward` was called on."""
        if not self._looks:
            return
        import torch

        if type(given) is torch.Tensor and given.device.type in READ and given.numel() == 1:
            self._loss = given.detach()
            self._place = self._user_code.place(sys._getframe(1))[0] or self._place

    def note_optimizer(self, optimizer: Any) -> None:
        """Check an optimizer's parameters after its step."""
        steps = self._steps.get(optimizer)
        if steps is None:
            steps = self._steps[optimizer] = Steps()
            steps.without = [each for group in optimizer.param_groups for each in group["params"]]
            steps.num_parameters = len(steps.without)
        steps.num += 1
        if steps.without and not self._disturbed:
            steps.num_looked += 1
            steps.without = [each for each in steps.without if each.requires_grad and each.grad is None]

    def step_end(self, arm: str) -> None:
        self._looks = arm == "warmup"
        loss, self._loss = self._loss, None
        if loss is None or not self._looks or ident() != self._clock.owner:
            return
        import torch

        if not (loss.is_cuda and torch.cuda.is_current_stream_capturing()):  # a capture must not wait
            self.finite.append(bool(loss.isfinite()))

    def block_begins(self, *, of_arm: bool) -> None:
        """Read optimizers and schedules while they exist: they end with the script."""
        if not self._disturbed:
            self._untrained = tuple(self._find_untrained())
        self._disturbed |= of_arm
        self._schedules = tuple(self._find_schedules())

    def evidence(self) -> Training:
        losses = Losses(num=len(self.finite), num_not_finite=self._num_not_finite(), place=self._place)
        return Training(losses=losses, untrained=self._untrained, schedules=self._schedules)

    def _num_not_finite(self) -> int:
        """Count the steps in a row, at the end of warm-up, whose loss was not finite."""
        return next((num for num, fine in enumerate(reversed(self.finite)) if fine), len(self.finite))

    def _find_untrained(self) -> list[Untrained]:
        found = []
        for steps in list(self._steps.values()):
            if steps.without and len(steps.without) < steps.num_parameters:  # otherwise it needs no gradients
                found += self._by_owner(steps.without, steps.num_looked)
        return found

    def _by_owner(self, parameters: list[Any], steps: int) -> list[Untrained]:
        """Group parameters by the user's module that holds them."""
        import torch

        wanted = {id(each): each for each in parameters}
        names: dict[int, dict[Any, str]] = {}
        for module in live_objects(with_subclasses(torch.nn.Module)):
            forward = getattr(type(module).forward, "__code__", None)
            if forward is None or not self._user_code.is_user(forward):
                continue
            for name, each in module.named_parameters():
                if id(each) in wanted:
                    known = names.setdefault(id(each), {})
                    known[module] = name
        owned: dict[Any, list[str]] = {}
        for holders in names.values():
            owner = min(holders, key=lambda module: holders[module].count("."))  # the nearest
            owned.setdefault(owner, []).append(holders[owner])
        return [
            Untrained(
                module=type(owner).__name__,
                place=self._user_code.place_in(type(owner).forward.__code__),
                names=tuple(sorted(own)[:MOST_NAMES]),
                num=len(own),
                num_steps=steps,
            )
            for owner, own in owned.items()
        ]

    def _find_schedules(self) -> list[RateSchedule]:
        found = []
        for schedule, place in list(self._made_at.items()):
            name = type(schedule).__name__
            horizon = getattr(schedule, HORIZONS.get(name, ""), None)
            steps = self._steps.get(getattr(schedule, "optimizer", self))
            if isinstance(horizon, int) and steps is not None:
                found.append(
                    RateSchedule(
                        name=name,
                        argument=HORIZONS[name],
                        place=place,
                        horizon=horizon,
                        num_steps=int(schedule.last_epoch),
                        num_optimizer_steps=steps.num,
                    )
                )
        return found
