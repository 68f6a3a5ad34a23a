"""The losses that a router minimises.

    router        cross-entropy of the right task
    confidence    margin: confidence is well above one half where the choice is right, else well below
    balance       variance of how much more or less adapters are used than needed
    efficiency    probability spent on adapters that get too little of it to matter
    consistency   similar texts go the same way: KL divergence of similar rows
    entropy       a bonus: undecided weights keep a gradient
    temperature   (T - 1)²: the logits, not the temperature, should decide
    task          in joint training, the tasks' own losses under the mixed adapters

Each is one expression over the batch; none waits for the device.

    B rows   H width of the features   T tasks
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.engines.adapters.routing.router import Routing
from flatout.ground.errors import BadInput

TERMS = ("router", "confidence", "balance", "efficiency", "consistency", "entropy", "temperature")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLosses:
    """The weight of each loss, and the thresholds that some of them use."""

    router: float = 2.0
    confidence: float = 0.5
    balance: float = 0.1
    efficiency: float = 0.05
    consistency: float = 0.1
    entropy: float = 0.01
    temperature: float = 0.01
    task: float = 1.0
    margin: float = 0.4  # the distance of confidence from one half
    negligible: float = 0.1  # a probability under this is lost
    similar: float = 0.9  # rows whose cosine reaches this are alike

    def __post_init__(self) -> None:
        wrong = [
            f"{field.name}={value} is not a number of at least 0"
            for field in fields(self)
            if not (math.isfinite(value := getattr(self, field.name)) and value >= 0)
        ]
        for name, most in (("margin", 0.5), ("negligible", 1.0), ("similar", 1.0)):
            if getattr(self, name) > most:
                wrong.append(f"{name}={getattr(self, name)} is above {most}")
        if wrong:
            raise BadInput("losses of the router: " + "; ".join(wrong))

    @property
    def names(self) -> tuple[str, ...]:
        """What `terms` computes."""
        return tuple(name for name in TERMS if getattr(self, name))

    def terms(self, routing: Routing, *, tasks_B: Tensor, features_BH: Tensor) -> dict[str, Tensor]:
        """Compute every loss of a batch without its weight, by name; a loss of weight 0 is left out."""
        log_probabilities_BT = routing.log_probabilities
        computed: dict[str, Callable[[], Tensor]] = {
            "router": lambda: right_task(log_probabilities_BT, tasks_B),
            "confidence": lambda: confidence_margin(routing, tasks_B, margin=self.margin),
            "balance": lambda: load_imbalance(routing.weights, tasks_B),
            "efficiency": lambda: lost_mass(routing.probabilities, negligible=self.negligible),
            "consistency": lambda: inconsistency(log_probabilities_BT, features_BH, similar=self.similar),
            "entropy": lambda: mean_entropy(log_probabilities_BT),
            "temperature": lambda: distance_from_one(routing.temperature),
        }
        return {name: computed[name]() for name in self.names}

    def total(self, terms: dict[str, Tensor], *, task_loss: Tensor | None = None) -> Tensor:
        """Return the weighted sum to minimise; entropy is a bonus and counts against it."""
        weighted = [
            (-1 if name == "entropy" else 1) * getattr(self, name) * value for name, value in terms.items()
        ]
        if task_loss is not None:
            weighted.append(self.task * task_loss)
        if not weighted:
            raise BadInput("every loss of the router has weight 0", hint="give router a weight")
        return torch.stack(weighted).sum()


def right_task(log_probabilities_BT: Tensor, tasks_B: Tensor) -> Tensor:
    """Return the cross-entropy of each row's own task."""
    return F.nll_loss(log_probabilities_BT, tasks_B)


def confidence_margin(routing: Routing, tasks_B: Tensor, *, margin: float) -> Tensor:
    """Penalise confidence less than `margin` above one half in right choices, or below it in wrong ones.

    Whether the choice is right is taken as given: the loss changes the confidence, not the choice.
    """
    is_right_B = routing.log_probabilities.detach().argmax(dim=-1) == tasks_B
    sign_B = torch.where(is_right_B, 1.0, -1.0)
    return F.relu(margin - sign_B * (routing.confidence - 0.5)).mean()


def load_imbalance(weights_BT: Tensor, tasks_B: Tensor) -> Tensor:
    """Return the variance over adapters of their use beyond the share of rows that need them.

    With as many rows of each task it is the variance of use.  With more of one task than of another, the
    variance of use would punish a router that is right.
    """
    needed_BT = F.one_hot(tasks_B, weights_BT.shape[-1]).to(weights_BT.dtype)
    return (weights_BT - needed_BT).mean(dim=0).var(unbiased=False)


def lost_mass(probabilities_BT: Tensor, *, negligible: float) -> Tensor:
    """Return the probability that a row spends on adapters with less than `negligible` each."""
    return torch.where(probabilities_BT < negligible, probabilities_BT, 0.0).sum(dim=-1).mean()


def inconsistency(log_probabilities_BT: Tensor, features_BH: Tensor, *, similar: float) -> Tensor:
    """Return the mean KL divergence over pairs of similar rows; 0 if no two are similar.

    Encoders put all texts into a narrow cone, where every cosine is high; rows are compared around the mean
    of the batch.
    """
    around_BH = F.normalize((features_BH - features_BH.mean(dim=0)).float(), dim=-1)
    is_pair_BB = (around_BH @ around_BH.T) >= similar
    is_pair_BB = is_pair_BB & ~torch.eye(len(is_pair_BB), dtype=torch.bool, device=is_pair_BB.device)
    probabilities_BT = log_probabilities_BT.exp()
    own_B = (probabilities_BT * log_probabilities_BT).sum(dim=-1)
    divergence_BB = own_B[:, None] - probabilities_BT @ log_probabilities_BT.T
    return torch.where(is_pair_BB, divergence_BB, 0.0).sum() / is_pair_BB.sum().clamp_min(1)


def mean_entropy(log_probabilities_BT: Tensor) -> Tensor:
    """Return the mean entropy of a row, in nats."""
    return -(log_probabilities_BT.exp() * log_probabilities_BT).sum(dim=-1).mean()


def distance_from_one(temperature: Tensor) -> Tensor:
    return (temperature - 1).square()
