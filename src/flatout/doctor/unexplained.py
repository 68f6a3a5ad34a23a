"""What costs time though no rule names a line for it.

A report without findings says where the time is.  First comes what an arm measured (the loader, a treatment),
then what was only seen: idle time of the GPU, time between the phases or outside the steps, and a step of
many small calls.  Less than a tenth of the step needs no explanation; neither does a loss function of
ordinary cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flatout.doctor.ceilings import RESOLVABLE_SPEEDUP, episode_share
from flatout.doctor.sentences import TREATMENTS, loader_costs, phase_shares, read_arm
from flatout.ground.units import show_ratio, show_seconds, show_share
from flatout.measure.evidence import Evidence, Place

LEAST_UNEXPLAINED = 0.1  # of the step: less needs no explanation
LEAST_SHOWN = 0.02  # of the step, a line
MOST_LINES = 3  # shown of the lines between the phases
MOST_LOSS = 0.2  # of the step: a loss with slower lines is worth a word, a loop over time for instance
LEAST_ROOFLINE = 0.1  # of the step, for one whose operators do some work
SMALL_CALL_S = 50e-6  # between the operator calls of a step that makes too many


def unexplained(evidence: Evidence) -> str | None:
    """Say what costs time though no rule names a line; None if hardly any time is left to explain."""
    return (
        _unexplained_loading(evidence)
        or _unexplained_treatment(evidence)
        or _unexplained_gaps(evidence)
        or _unexplained_outside(evidence)
        or _unexplained_calls(evidence)
    )


def _unexplained_treatment(evidence: Evidence) -> str | None:
    """Name a treatment that makes the step faster, though no rule reports it."""
    known = [each for each in evidence.counterfactuals if each.kind in TREATMENTS]
    best = max(known, key=lambda each: each.speedup_low, default=None)
    if best is None or best.speedup_low < 1 + LEAST_UNEXPLAINED:
        return None
    return f"{read_arm(best, evidence).label} the step is {show_ratio(best.speedup)} as fast, measured."


def _unexplained_outside(evidence: Evidence) -> str | None:
    """Name time between the steps of which no line is worth a finding."""
    known = [(episode, episode_share(evidence, episode)) for episode in evidence.episodes]
    shares = {str(episode.place): share for episode, share in known if share and episode.kind != "set-up"}
    together = min(1.0, sum(shares.values()))
    if together < LEAST_UNEXPLAINED:
        return None
    largest = sorted(shares.items(), key=lambda item: -item[1])[:3]
    lines = ", ".join(f"{place} ({show_share(share)})" for place, share in largest)
    return f"{show_share(together)} of the job lies outside its steps, at {lines}."


def _unexplained_calls(evidence: Evidence) -> str | None:
    """Describe a step without a GPU that is far from the roofline because its operators do so little."""
    roofline, kernels, step_s = evidence.roofline, evidence.kernels, evidence.step_s
    if roofline is None or kernels is None or not step_s or evidence.job.device != "cpu":
        return None
    share = max(roofline.memory_s, roofline.compute_s) / step_s
    if share >= LEAST_ROOFLINE or step_s > SMALL_CALL_S * kernels.num_kernels:
        return None
    number, apart_s = kernels.num_kernels, step_s / kernels.num_kernels
    return (
        f"the step runs at {show_share(share)} of the roofline: it calls {number:.0f} operators, "
        f"one every {show_seconds(apart_s)}, and each does little work."
    )


def _unexplained_gaps(evidence: Evidence) -> str | None:
    """Say how long the GPU idles or, without one, the time outside the model and the optimizer."""
    shares = phase_shares(evidence)
    busy = evidence.kernels.busy_share if evidence.kernels else None
    wait, rest = shares.get("wait", 0.0), shares.get("rest", 0.0)
    unexplained = wait + rest - _model_between_phases(evidence) if busy is None else 1 - busy
    if unexplained < LEAST_UNEXPLAINED:
        is_unknown = evidence.job.device == "cuda" and busy is None and bool(shares)
        return "how long the GPU idles was not measured." if is_unknown else None
    if busy is None:
        words = f"{show_share(unexplained)} of the step lies outside the model and the optimizer"
    else:
        words = f"the GPU is idle for {show_share(unexplained)} of the step"
    lines = [f"{place} ({show_share(share)} of the step)" for place, share in lines_between_phases(evidence)]
    return f"{words}; time between the phases is spent at {', '.join(lines)}." if lines else f"{words}."


def loss_share(evidence: Evidence) -> float:
    """Return the share of the time between the phases that the loss takes: its lines belong to the model."""
    return _share_between(evidence, evidence.stacks.differentiable if evidence.stacks is not None else ())


def _share_between(evidence: Evidence, lines: Iterable[Place]) -> float:
    """Return the share of the time between the phases that some lines take."""
    if evidence.stacks is None or not evidence.stacks.samples_by_phase.get("rest"):
        return 0.0
    among = set(lines)
    paths = [path for path in evidence.stacks.paths if path.phase == "rest" and path.places]
    taken = sum(path.samples for path in paths if path.places[-1] in among)
    return taken / evidence.stacks.samples_by_phase["rest"]


def _lines_of_the_model(evidence: Evidence) -> tuple[Place, ...]:
    """Return lines between the phases that need no explanation.

    A loss usually takes as much, and a `forward` that the script calls itself is the model.
    """
    if evidence.stacks is None:
        return ()
    loss = evidence.stacks.differentiable
    if phase_shares(evidence).get("rest", 0.0) * _share_between(evidence, loss) < MOST_LOSS:
        return loss
    return tuple(place for place in loss if (place.function or "").endswith(".forward"))


def _model_between_phases(evidence: Evidence) -> float:
    """Return the share of the step that such lines take."""
    return phase_shares(evidence).get("rest", 0.0) * _share_between(evidence, _lines_of_the_model(evidence))


def lines_between_phases(evidence: Evidence) -> list[tuple[Place, float]]:
    """Return the lines where samples between the phases found the training thread, with their shares."""
    samples = evidence.stacks.samples_by_phase.get("rest", 0) if evidence.stacks else 0
    if evidence.stacks is None or not samples:
        return []
    held: Counter[Place] = Counter()
    model = _lines_of_the_model(evidence)
    for path in evidence.stacks.paths:
        if path.phase == "rest" and path.places and path.places[-1] not in model:
            held[path.places[-1]] += path.samples
    rest = phase_shares(evidence).get("rest", 0.0)
    shares = [(place, num / samples * rest) for place, num in held.most_common(MOST_LINES)]
    return [(place, share) for place, share in shares if share >= LEAST_SHOWN]


def _unexplained_loading(evidence: Evidence) -> str | None:
    """Name a loader that was measured to cost time."""
    cached = evidence.counterfactual("cached")
    if cached is None or cached.speedup_low <= RESOLVABLE_SPEEDUP:
        return None
    return f"{loader_costs(cached, evidence)}."
