"""Findings on time outside the typical step: an evaluation's, a rollout's or a checkpoint's share of the job.

The share is of the job's time after set-up.  The ceiling is the job without that time, from measured shares:
it applies to the job and leaves the step as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from flatout.doctor.ceilings import episode_share, without_episode
from flatout.doctor.finding import Finding, by_argument
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Episode, EpisodeKind, Evidence
from flatout.measure.run.steps import MODEL_CALLED

ARMS = ("outside",)
LEAST_SHARE = 0.10  # of the job
FEWEST_SAMPLES = 3
OF_TRAINING = ("evaluation", "rollout")  # they interrupt training, so there must be some


def outside_rule(
    doc: str | None,
    kind: EpisodeKind,
    *,
    what: str,
    transformers: str | None = None,
    lightning: str | None = None,
) -> Callable[[Evidence], list[Finding]]:
    """Make the `detect` of a rule on one kind of episode; `what` says what its lines do.

    `transformers` and `lightning` are the arguments that apply the fix in these frameworks.
    """
    rule = title_of(doc)

    def detect(evidence: Evidence) -> list[Finding]:
        if kind in OF_TRAINING and not trains(evidence):
            return []
        return [
            rule.finding(
                episode.place,
                f"{name_of(episode)} {what}: {show_share(share)} of {_of_what(episode)}",
                figures=_figures(evidence, episode),
                share=share,
                ceiling=without_episode(evidence, share) if episode.per_step_s is not None else None,
                fix=by_argument(evidence, rule.fix, transformers=transformers, lightning=lightning),
            )
            for episode in evidence.episodes
            if episode.kind == kind
            and (share := episode_share(evidence, episode) or 0.0) >= LEAST_SHARE
            and episode.samples >= FEWEST_SAMPLES
        ]

    return detect


def trains(evidence: Evidence) -> bool:
    """Return whether the steps are training steps, not mere calls of a model."""
    return not (evidence.job.anchor or "").endswith(MODEL_CALLED)


def name_of(episode: Episode) -> str:
    if episode.kind == "epoch-start":
        return "the loader"
    name = (episode.function or "").rpartition(".")[2]
    says_something = bool(name) and not name.startswith(("__", "<"))  # unlike __init__ and <lambda>
    return f"{episode.function}()" if says_something else "this block"


def _of_what(episode: Episode) -> str:
    return "the time observed" if episode.per_step_s is None else "the job, outside its steps"


def _figures(evidence: Evidence, episode: Episode) -> list[str]:
    each_s = episode.seconds / max(1, episode.times)
    times = "once" if episode.times == 1 else f"{episode.times} times"
    figures = [
        f"seen {times} in {episode.num_steps} steps, {show_seconds(each_s)} each",
        f"a typical step takes {show_seconds(evidence.step_s)}",
        f"on the stack in {episode.samples} samples, about 25 per second",
    ]
    if episode.inside is not None:
        figures.append(f"most of the time at {episode.inside}")
    if episode.with_epoch:
        figures.append("it recurs every epoch, and its time is spread over the epoch")
    if episode.per_step_s is None:
        figures.append(
            "seen once: how often it recurs is unknown, and so are its share of the job and a ceiling"
        )
    return figures
