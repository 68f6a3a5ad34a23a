"""A config made to fit: the largest batch that fits, with the effective batch kept exactly.

Stages that take their batch size from one place form a group, and each group is searched alone.  Knobs of
the objective (learning rate, negatives, the effective batch itself) are changed only on request; where the
effective batch changes, the usual rule for the learning rate is stated and left to the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.ground.errors import BadInput
from flatout.planner.config.config_text import Value
from flatout.planner.config.job_config import ConfigPlace
from flatout.planner.config.settings import Setting, Settings, StageSettings
from flatout.planner.fit.fits import Budget, Forecast, Judge, device_notes, leaning_notes
from flatout.planner.fit.progress import Progress
from flatout.planner.fit.search import GroupSearch, expected_traces
from flatout.planner.fit.suggestions import NAMES, Fit, GroupFit, Wish, learning_rate_rule

ALLOWED = ("checkpointing", "eval_batch_size")  # beside the sizes of the job


def fit_settings(
    settings: Settings,
    *,
    budget: Budget,
    forecast: Forecast,
    wish: Wish | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Return suggestions for every group of stages; BatchDoesNotFit says what would help."""
    wish, progress = wish or Wish(), progress or Progress()
    ranks = settings.ranks.value
    _check_wish(wish, ranks=ranks, forecast=forecast)
    grouped = group_stages(settings.stages)
    progress.expect(number for stages in grouped for number in expected_traces(stages))
    judge = Judge(budget=budget, forecast=forecast)
    groups = tuple(
        GroupSearch(stages=stages, judge=judge, wish=wish, ranks=ranks, progress=progress).fit()
        for stages in grouped
    )
    for group in groups:
        group.suggestion(wish.choose)  # refuse an unknown name before anything is written
    return Fit(
        settings=settings,
        budget=budget,
        groups=groups,
        notes=(
            *_notes(settings, groups, forecast=forecast, wish=wish),
            *device_notes(settings.stages, budget),
            *leaning_notes(settings.stages, forecast, budget),
        ),
    )


def _check_wish(wish: Wish, *, ranks: int, forecast: Forecast) -> None:
    effective = wish.effective_batch
    if effective is not None and (effective < 1 or effective % ranks):
        near = sorted({max(effective // ranks, 1) * ranks, max(-(-effective // ranks), 1) * ranks})
        raise BadInput(
            f"--effective {effective} cannot be spread over {ranks} ranks",
            hint=f"nearest: {' or '.join(map(str, near))}",
        )
    if wish.choose is not None and wish.choose not in NAMES:
        raise BadInput(f"there is no suggestion {wish.choose!r}", hint=f"choose one of: {', '.join(NAMES)}")
    known = (*ALLOWED, *(name for name in forecast.sizes if name != "batch_size"))
    for name in wish.allow:
        if name not in known:
            reason = "the rule for it is stated and yours to apply" if name == "learning_rate" else "unknown"
            raise BadInput(f"--allow {name}: {reason}", hint=f"can be allowed: {', '.join(known)}")


def group_stages(stages: Sequence[StageSettings]) -> list[tuple[StageSettings, ...]]:
    """Group stages by the place of their batch size."""
    groups: dict[ConfigPlace | None, list[StageSettings]] = {}
    for stage in stages:
        groups.setdefault(stage.batch_size.place, []).append(stage)
    owners: dict[ConfigPlace, ConfigPlace | None] = {}
    for key, members in groups.items():
        for stage in members:
            place = stage.accumulation.place
            if place is not None and owners.setdefault(place, key) != key:
                raise BadInput(
                    f"{stage.name} has a batch size of its own but shares accumulation ({place}) with other "
                    "stages, so their effective batches cannot be kept apart",
                    hint="give the stage an accumulation of its own",
                )
    return [tuple(members) for members in groups.values()]


def _notes(
    settings: Settings, groups: Sequence[GroupFit], *, forecast: Forecast, wish: Wish
) -> Iterator[str]:
    yield from settings.notes
    unknown = {name for stage in settings.stages for name in stage.sizes} - set(forecast.sizes)
    for name in sorted(unknown):
        yield f"{name} is not a size of the job, so the estimate ignores it"
    for group in groups:
        for stage, sizes in group.lowered.items():
            for name, value in sizes.items():
                yield f"{name} of {stage} is lowered to {value}, as allowed: this changes the objective"
    if wish.effective_batch is not None:
        rates = {
            stage.batch_size.value * stage.accumulation.value * settings.ranks.value: stage.learning_rate
            for stage in settings.stages
        }
        for before, rate in rates.items():
            if before != wish.effective_batch:
                yield learning_rate_rule(
                    before, wish.effective_batch, learning_rate=rate.value if rate else None
                )


def changes_of(fit: Fit, *, choose: str | None = None) -> dict[ConfigPlace, Value]:
    """Return the values to write for the chosen suggestion, by place, without those that stay."""
    wanted: dict[ConfigPlace, Value] = {}
    for group in fit.groups:
        chosen = group.suggestion(choose)
        if not chosen.keeps_effective_batch:
            effective = max(chosen.effective_batches.values())
            raise BadInput(
                f"{chosen.names[0]!r} changes the effective batch, a part of the objective, to {effective}",
                hint=f"ask for it: --effective {effective}",
            )
        for stage in group.stages:
            _want(wanted, "batch_size", stage.batch_size, chosen.batch_size)
            if stage.global_batch_size is None:
                _want(wanted, "accumulation", stage.accumulation, chosen.accumulations[stage.name])
            else:  # accumulation follows from it
                whole = chosen.effective_batches[stage.name]
                _want(wanted, "global_batch_size", stage.global_batch_size, whole)
            if chosen.checkpointing != group.checkpointing:
                _want(wanted, "checkpointing", stage.checkpointing, chosen.checkpointing)
            if stage.eval_batch_size is not None and group.evaluation.suggested is not None:
                _want(wanted, "eval_batch_size", stage.eval_batch_size, group.evaluation.suggested)
            for name, value in group.lowered.get(stage.name, {}).items():
                _want(wanted, name, stage.sizes.get(name), value)
    return wanted


def _want(
    wanted: dict[ConfigPlace, Value],
    knob: str,
    setting: Setting[int] | Setting[bool] | None,
    value: int | bool,
) -> None:
    if setting is not None and setting.value == value:
        return
    if setting is None or setting.place is None:
        source = f" ({setting.source})" if setting is not None else ""
        raise BadInput(
            f"the plan sets {knob} to {str(value).lower()}, and there is no place to write it{source}",
            hint=f"add a key for it to the config, or name one with --knob {knob}=KEY",
        )
    if wanted.setdefault(setting.place, value) != value:
        raise BadInput(
            f"stages that share {knob} ({setting.place}) would need different values",
            hint="give each a key of its own",
        )
