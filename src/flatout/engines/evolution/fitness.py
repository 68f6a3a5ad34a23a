"""From rewards to fitness: how much each member counts in the update, and with which sign.

Rewards are a matrix of members x prompts, members first.  An easy prompt gives every member a high reward and
says nothing about any of them, so each prompt's mean over the members is subtracted first: the rest says who
did better than the others *on the same prompt*.  Then:

    centred    mean over prompts, divided by one standard deviation of all centred rewards
    z-score    mean over prompts, divided by the standard deviation over members
    ranks      members in order, spread evenly from -0.5 to 0.5: outliers count no more than their place
    sign       +1 and -1 for the better and the worse of an antithetic pair (members 2k and 2k + 1)

All of them sum to zero over the members, ignore a constant added to all rewards of a prompt, and are zero,
never NaN, where the rewards say nothing.  A missing reward is NaN: it is left out of its prompt's mean and
counts as average for its member.  A member without any reward has fitness 0.

Sums are float64, so that members with equal rewards come out equal; the result is float32.

Shapes: M members, P prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from flatout.ground.errors import BadInput

Shaping = Literal["centred", "z-score", "ranks", "sign"]
# Differences below this share of the largest reward are rounding, which no division may blow up.
ROUNDING = 1e-12


def reward_matrix(
    scores: Sequence[float | None],
    *,
    member_of_row: Sequence[int],
    prompt_of_row: Sequence[int],
    num_members: int,
    num_prompts: int,
) -> Tensor:
    """Arrange scores of rows, in any order, as rewards [members, prompts]; NaN where a row has none.

    Each row names its member and prompt.  Reshaping a flat list would be right for one order of rows only;
    in any other, members would silently get each other's rewards.
    """
    if not len(scores) == len(member_of_row) == len(prompt_of_row):
        raise ValueError(
            f"each row needs a score, a member and a prompt: there are {len(scores)} scores, "
            f"{len(member_of_row)} members and {len(prompt_of_row)} prompts"
        )
    rewards_MP = torch.full((num_members, num_prompts), torch.nan, dtype=torch.float64)
    if not scores:
        return rewards_MP
    members, prompts = torch.tensor(member_of_row), torch.tensor(prompt_of_row)
    for name, places, size in (("member", members, num_members), ("prompt", prompts, num_prompts)):
        if int(places.min()) < 0 or int(places.max()) >= size:
            raise ValueError(f"a row belongs to a {name} outside 0..{size - 1}")
    if len(torch.unique(members * num_prompts + prompts)) != len(scores):
        raise ValueError("two rows belong to the same member and prompt")
    values = [torch.nan if score is None else score for score in scores]
    rewards_MP[members, prompts] = torch.tensor(values, dtype=torch.float64)
    return rewards_MP


def refuse_no_reward(rewards_MP: Tensor, *, num_failed: int, failure: object | None) -> None:
    """Raise BadInput if no row has a reward: such a run would take hours to learn nothing.

    `failure` is one of those of this rank, if it has any.
    """
    if bool(rewards_MP.isnan().all()):
        found = f"{num_failed} failed" if num_failed else "the reward is None for each"
        why = "" if failure is None else f": {failure}"
        raise BadInput(
            f"none of the {rewards_MP.numel()} rows of the first epoch has a reward: {found}{why}",
            hint="fix the reward and run the same command with --resume",
        )


def shape(rewards_MP: Tensor, *, how: Shaping = "centred") -> Tensor:
    """Turn rewards [members, prompts] into fitness [members]."""
    if rewards_MP.ndim != 2:
        raise ValueError(f"rewards are [members, prompts], not {tuple(rewards_MP.shape)}")
    if how not in _SHAPINGS:
        raise BadInput(f"there is no fitness shaping {how!r}", hint=f"known: {', '.join(get_args(Shaping))}")
    if torch.isinf(rewards_MP).any():
        raise ValueError("a reward is infinite; a missing one is NaN")
    if not rewards_MP.numel():
        return torch.zeros(len(rewards_MP), device=rewards_MP.device)
    return _SHAPINGS[how](rewards_MP.to(torch.float64)).to(torch.float32)


def centred_rewards(rewards_MP: Tensor) -> Tensor:
    """Subtract the mean of each prompt; 0 if there is no reward, or if only rounding is left."""
    valid_MP = ~torch.isnan(rewards_MP)
    known_MP = rewards_MP.nan_to_num(nan=0.0)
    mean_P = known_MP.sum(dim=0) / valid_MP.sum(dim=0).clamp(min=1)
    centred_MP = torch.where(valid_MP, known_MP - mean_P, 0.0)
    return torch.where(centred_MP.abs() <= _rounding(known_MP), 0.0, centred_MP)


def _rounding(known_MP: Tensor) -> Tensor:
    return ROUNDING * known_MP.abs().amax()


def _divided(values_M: Tensor, deviation: Tensor) -> Tensor:
    return values_M / deviation if deviation > 0 else torch.zeros_like(values_M)


def _centred(rewards_MP: Tensor) -> Tensor:
    centred_MP = centred_rewards(rewards_MP)
    num_valid = (~torch.isnan(rewards_MP)).sum().clamp(min=1)
    # Over all prompts, not only those with a reward: one lucky row must not outweigh many.
    return _divided(centred_MP.mean(dim=1), (centred_MP.square().sum() / num_valid).sqrt())


def _z_score(rewards_MP: Tensor) -> Tensor:
    scores_M = centred_rewards(rewards_MP).mean(dim=1)
    num_present = _present(rewards_MP).sum().clamp(min=1)
    scores_M = torch.where(scores_M.abs() <= _rounding(rewards_MP.nan_to_num(nan=0.0)), 0.0, scores_M)
    return _divided(scores_M, (scores_M.square().sum() / num_present).sqrt())


def _ranks(rewards_MP: Tensor) -> Tensor:
    present_M = _present(rewards_MP)
    scores = centred_rewards(rewards_MP).mean(dim=1)[present_M]
    fitness_M = torch.zeros_like(rewards_MP[:, 0])
    if len(scores) < 2:
        return fitness_M
    ordered, order = scores.sort()
    # A gap as small as rounding is a tie, and tied members share the mean of their places.
    is_step = ordered.diff() > _rounding(rewards_MP.nan_to_num(nan=0.0))
    group = torch.cat([is_step.new_zeros(1), is_step]).cumsum(dim=0)
    places = torch.arange(len(scores), dtype=torch.float64, device=scores.device)
    sizes = torch.bincount(group)
    shared = (torch.bincount(group, weights=places) / sizes)[group]
    ranked = torch.empty_like(scores)
    ranked[order] = shared / (len(scores) - 1) - 0.5
    fitness_M[present_M] = ranked
    return fitness_M


def _sign(rewards_MP: Tensor) -> Tensor:
    if len(rewards_MP) % 2:
        raise BadInput(
            f"{len(rewards_MP)} members do not make pairs",
            hint="sign shaping needs an even, antithetic population",
        )
    # A prompt counts only where both members of the pair have a reward.
    difference = (rewards_MP[0::2] - rewards_MP[1::2]).nan_to_num(nan=0.0).mean(dim=1)
    rounding = _rounding(rewards_MP.nan_to_num(nan=0.0))
    better = torch.where(difference.abs() <= rounding, 0.0, difference.sign())
    return torch.stack([better, -better], dim=1).flatten()


def _present(rewards_MP: Tensor) -> Tensor:
    """Return which members have at least one reward."""
    return ~torch.isnan(rewards_MP).all(dim=1)


_SHAPINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": _centred,
    "z-score": _z_score,
    "ranks": _ranks,
    "sign": _sign,
}
