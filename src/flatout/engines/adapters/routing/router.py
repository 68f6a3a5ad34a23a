"""The router: which adapter a text needs, read off the frozen encoder.

A small network sees the mean of a text's states under the plain encoder (no adapter has touched them, so they
can be computed once and kept) and gives every task a logit.  Logits over a learned temperature make the
weights that mix adapters: a softmax, or in training a hard Gumbel draw whose gradient is the softmax's.

A second output, the confidence, is the chance that the choice is right; a threshold on it decides when to
trust the choice.  A network that has fitted its training rows calls everything certain, so both are
calibrated on rows it has not learned from (`calibrate`): the logits by one factor, the confidence by a
logistic regression on the top probability and on what the confidence head says.

Logits learned from tasks of unequal size contain the tasks' shares of the rows (log p(task | text) is
log p(text | task) plus the logarithm of the share) and resolve a doubt in favour of the larger task.  Where
every task counts the same, the calibration removes the shares; benchmarks/LOG.md says what that is worth.

    B rows   H width of the encoder   T tasks   K adapters that are mixed
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.ground.errors import BadInput

Fallback = Literal["best", "uniform"]
COLDEST, HOTTEST = 0.1, 10.0  # a temperature beyond these makes weights that nothing can move
PRIOR = 1.0  # weight, in rows, of the belief that the top probability is the confidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The router's outputs for a batch; gradients flow through all of them."""

    log_probabilities: Tensor  # [B, T], of the logits over the temperature
    weights: Tensor  # [B, T], what mixes the adapters: the softmax, or a hard draw with its gradient
    confidence: Tensor  # [B], the chance that the largest probability is the right task
    temperature: Tensor  # before it is clamped, so that a loss can pull it back

    @property
    def probabilities(self) -> Tensor:
        return self.log_probabilities.exp()


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Adapters chosen for a batch: `weights` are what the encoder mixes, each row summing to one."""

    chosen: Tensor  # [B, K], adapters by falling probability; what an unsure row would have got, too
    weights: Tensor  # [B, T]
    probabilities: Tensor  # [B, T]
    confidence: Tensor  # [B]
    is_sure: Tensor  # [B], False where the fallback decided


class Router(nn.Module):
    """Pooled frozen features to adapters."""

    calibration: Tensor

    def __init__(
        self,
        width: int,
        *,
        num_tasks: int,
        hidden: Sequence[int] = (512, 256),
        dropout: float = 0.1,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        _check(width=width, num_tasks=num_tasks, hidden=hidden, dropout=dropout, temperature=temperature)
        self.num_tasks = num_tasks
        self.gumbel = False  # in training, draw one adapter per row; a phase may set it
        sizes = (width, *hidden)
        # Encoders differ in the scale of their states; the first layer must not.
        layers: list[nn.Module] = [nn.LayerNorm(width)]
        for entering, leaving in itertools.pairwise(sizes):
            layers += [nn.Linear(entering, leaving), nn.GELU(), nn.Dropout(dropout)]
        self.trunk = nn.Sequential(*layers)
        self.tasks = nn.Linear(sizes[-1], num_tasks)
        self.sureness = nn.Linear(sizes[-1], 1)
        self.temperature = nn.Parameter(torch.tensor(float(temperature)))
        # Factor of the logits; then for the confidence: weights of its head and of the top probability, bias.
        self.register_buffer("calibration", torch.tensor([1.0, 1.0, 0.0, 0.0]))

    def forward(self, features_BH: Tensor) -> Routing:
        """Route as in training: without the calibration, which is fitted afterwards."""
        logits_BT, sureness_B = self._outputs(features_BH)
        log_probabilities_BT = F.log_softmax(logits_BT, dim=-1)
        if self.gumbel and self.training:
            weights_BT = F.gumbel_softmax(logits_BT, hard=True)
        else:
            weights_BT = log_probabilities_BT.exp()
        return Routing(
            log_probabilities=log_probabilities_BT,
            weights=weights_BT,
            confidence=sureness_B.sigmoid(),
            temperature=self.temperature,
        )

    @torch.no_grad()
    def route(
        self,
        features_BH: Tensor,
        *,
        threshold: float = 0.0,
        top_k: int = 1,
        fallback: Fallback = "best",
    ) -> Route:
        """Choose adapters, calibrated and without dropout.

        A row whose confidence reaches `threshold` gets its `top_k` adapters, weighted by their probabilities
        scaled to a sum of one; any other row gets its best adapter alone, or all of them equally.
        """
        logits_BT, sureness_B = self._evaluate(features_BH)
        factor, of_head, of_top, bias = self.calibration.unbind()
        log_probabilities_BT = F.log_softmax(logits_BT * factor, dim=-1)
        probabilities_BT = log_probabilities_BT.exp()
        confidence_B = torch.sigmoid(of_head * sureness_B + of_top * _top_logit(log_probabilities_BT) + bias)
        is_sure_B = confidence_B >= threshold
        top_BK, chosen_BK = probabilities_BT.topk(top_k, dim=-1)
        mixed_BT = torch.zeros_like(probabilities_BT).scatter(
            1, chosen_BK, top_BK / top_BK.sum(dim=-1, keepdim=True)
        )
        if fallback == "uniform":
            other_BT = torch.full_like(mixed_BT, 1 / self.num_tasks)
        else:
            other_BT = F.one_hot(chosen_BK[:, 0], self.num_tasks).to(mixed_BT.dtype)
        return Route(
            chosen=chosen_BK,
            weights=torch.where(is_sure_B[:, None], mixed_BT, other_BT),
            probabilities=probabilities_BT,
            confidence=confidence_B,
            is_sure=is_sure_B,
        )

    def calibrate(self, features_BH: Tensor, tasks_B: Tensor, *, log_shares_T: Tensor | None = None) -> None:
        """Fit the calibration on rows that the router has not learned from.

        With the logarithms of the tasks' shares of the training rows, every task counts the same from here
        on: the shares are removed from the logits permanently, and rows of small tasks weigh more in the fit.
        """
        num_rows = len(tasks_B)
        with torch.no_grad():
            logits_BT, sureness_B = (found.double() for found in self._evaluate(features_BH))
        fit = fit_logits(logits_BT, tasks_B, log_shares_T=log_shares_T)
        if log_shares_T is not None:
            temperature = self.temperature.detach().clamp(COLDEST, HOTTEST)
            with torch.no_grad():
                self.tasks.bias.sub_(temperature * log_shares_T / fit.factor)
        inputs_B3 = torch.stack(
            (sureness_B, _top_logit(fit.log_probabilities), torch.ones_like(sureness_B)), dim=1
        )
        slack = _slack(num_rows)
        is_right_B = (fit.log_probabilities.argmax(dim=-1) == tasks_B).double()
        right_B = is_right_B * (1 - slack) + (1 - is_right_B) * slack
        believed = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, device=logits_BT.device)

        def unsure_by(weights: Tensor) -> Tensor:
            error = F.binary_cross_entropy_with_logits(inputs_B3 @ weights, right_B)
            return error + PRIOR / num_rows * (weights - believed).square().sum()

        self.calibration.copy_(torch.cat((fit.factor, _minimise(unsure_by, believed))))

    def judge(self, features_BH: Tensor, tasks_B: Tensor, *, log_shares_T: Tensor | None = None) -> LogitsFit:
        """Return what `calibrate` would make of the logits, and change nothing."""
        with torch.no_grad():
            logits_BT, _ = self._evaluate(features_BH)
        return fit_logits(logits_BT.double(), tasks_B, log_shares_T=log_shares_T)

    def logit_scale(self) -> Tensor:
        """Return the factor of the last layer's outputs when a row is routed."""
        return self.calibration[0] / self.temperature.detach().clamp(COLDEST, HOTTEST)

    def _outputs(self, features_BH: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits over the temperature, and the confidence's logit."""
        hidden = self.trunk(features_BH.to(self.tasks.weight.dtype))
        return self.tasks(hidden) / self.temperature.clamp(COLDEST, HOTTEST), self.sureness(hidden)[:, 0]

    def _evaluate(self, features_BH: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `_outputs` without dropout, whatever mode the router is in."""
        was_training = self.training
        self.eval()
        try:
            return self._outputs(features_BH)
        finally:
            self.train(was_training)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decider:
    """A router, and when its choice is trusted."""

    router: Router
    threshold: float = 0.0
    top_k: int = 1
    fallback: Fallback = "best"

    def route(self, features_NH: Tensor) -> Route:
        """Choose adapters for rows."""
        return self.router.route(
            features_NH.to(self.router.temperature.device),
            threshold=self.threshold,
            top_k=self.top_k,
            fallback=self.fallback,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsFit:
    """Logits calibrated on rows that the router has not learned from."""

    factor: Tensor  # [1]
    log_probabilities: Tensor  # [B, T]
    loss: float  # their cross-entropy


def fit_logits(logits_BT: Tensor, tasks_B: Tensor, *, log_shares_T: Tensor | None = None) -> LogitsFit:
    """Find the factor of the logits with the least cross-entropy; with shares, every task weighs the same.

    A router that made no mistake on n rows has not shown that it makes none, only that one in n + 2 is a fair
    guess (Laplace's rule): targets fall short of certainty by that much, which also keeps the fit finite
    where every row is right.
    """
    num_rows, num_tasks = logits_BT.shape
    if num_rows == 0:
        raise BadInput(
            "a router is calibrated on at least one row, 0 were given", hint="give num_validation rows"
        )
    slack = _slack(num_rows)
    targets_BT = torch.full_like(logits_BT, slack / max(num_tasks - 1, 1)).scatter(
        1, tasks_B[:, None], 1 - slack
    )
    weights_B = torch.full_like(logits_BT[:, 0], 1 / num_rows)
    shares_T = torch.zeros_like(logits_BT[0])
    if log_shares_T is not None:
        counts_B = tasks_B.bincount(minlength=num_tasks)[tasks_B]
        weights_B, shares_T = 1 / (counts_B * len(tasks_B.unique())), log_shares_T.to(logits_BT)

    def log_probabilities_at(log_factor: Tensor) -> Tensor:
        return F.log_softmax(logits_BT * log_factor.exp() - shares_T, dim=-1)

    def wrong_by(log_factor: Tensor) -> Tensor:
        return -(weights_B * (targets_BT * log_probabilities_at(log_factor)).sum(dim=-1)).sum()

    found = _minimise(wrong_by, torch.zeros_like(logits_BT[0, :1]))
    return LogitsFit(
        factor=found.exp(), log_probabilities=log_probabilities_at(found), loss=float(wrong_by(found))
    )


def _slack(num_rows: int) -> float:
    """Return the chance of a mistake that remains after `num_rows` rows without one (Laplace's rule)."""
    return 1 / (num_rows + 2)


def _check(*, width: int, num_tasks: int, hidden: Sequence[int], dropout: float, temperature: float) -> None:
    wrong = []
    if width < 1 or any(size < 1 for size in hidden):
        wrong.append(f"width={width} and hidden={tuple(hidden)} must be at least 1")
    if num_tasks < 1:
        wrong.append(f"num_tasks={num_tasks} is below 1")
    if not 0 <= dropout < 1:
        wrong.append(f"dropout={dropout} is not between 0 and 1")
    if not COLDEST <= temperature <= HOTTEST:
        wrong.append(f"temperature={temperature} is not between {COLDEST} and {HOTTEST}")
    if wrong:
        raise BadInput("the router cannot be built: " + "; ".join(wrong))


def _top_logit(log_probabilities_BT: Tensor) -> Tensor:
    """Return the log odds of the largest probability, exact even if it rounds to one."""
    others_BT = log_probabilities_BT.sort(dim=-1, descending=True).values
    if others_BT.shape[-1] == 1:
        return torch.zeros_like(others_BT[:, 0])
    return others_BT[:, 0] - others_BT[:, 1:].logsumexp(dim=-1)


def _minimise(error_of: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Find the minimum of a smooth convex function of a few numbers."""
    values = start.clone().requires_grad_()
    search = torch.optim.LBFGS([values], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        with torch.enable_grad():
            error = error_of(values)
            error.backward()
        return error

    search.step(closure)
    return values.detach()
