"""What one line of the user's code does per step, all its operations together.

Evidence counts by operation; people edit lines.  `torch.zeros(n).to(x) + torch.ones(n)` is one line with two
creations, and gets one finding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean

from flatout.doctor.ceilings import KNOCKED_OUT, MOST, arm_at, holds, host_is_hidden, on_gpu, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.rule import Title
from flatout.doctor.sentences import phase_means, phase_shares
from flatout.ground.units import show_seconds, show_share
from flatout.measure import PHASES
from flatout.measure.evidence import Evidence, OptimizerSetup, Place, Site, SiteKind, StackPath
from flatout.measure.statistics import mean_interval, typical_steps

FEWEST_LOOKS, FEWEST_STEPS = 100, 3
FEWEST_SAMPLES = 5  # samples of a block
FEWEST_BETWEEN = 20  # samples between the phases
LEAST_OPTIMIZER_SHARE = 0.05
# A dataset fetches samples one by one by design; its cost belongs to the loader's rules.
_FETCHING = ("__getitem__", "__getitems__", "__iter__", "__next__")


LAYERS = {"lstm": "nn.LSTM", "gru": "nn.GRU", "rnn_tanh": "nn.RNN", "rnn_relu": "nn.RNN"}  # by operator
# Operators have no name in the source.
_WRITTEN = {
    **LAYERS,
    "__getitem__": "x[...]",
    "__setitem__": "x[...] =",
    "__bool__": "bool()",
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "use as an index",
    "__repr__": "print",
    "__format__": "format",
    "__array__": "numpy conversion",
    "__contains__": "in",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeLine:
    """The sites of one kind on one line."""

    place: Place
    ops: tuple[str, ...]  # most calls first
    calls_per_step: float
    host_s: float | None  # per step under attribution; None if no site knows it
    backward_s: float | None
    derived_s: float | None  # computed from these tensors and parameters alone
    bytes_per_step: float
    requires_grad: bool
    phases_s: dict[str, float] = field(default_factory=dict)  # host_s by phase
    steps_s: tuple[float, ...] = ()  # total_s of each attributed step

    @property
    def total_s(self) -> float | None:
        """The calls themselves, forward and backward together."""
        return _sum_of_known([self.host_s, self.backward_s])


def lines_of(sites: list[Site]) -> list[CodeLine]:
    """Sum `sites` by line, the busiest line first."""
    by_line: dict[tuple[str, int], list[Site]] = {}
    for site in sorted(sites, key=lambda site: -site.calls_per_step):
        by_line.setdefault(site.place.at, []).append(site)
    return sorted(map(_line_of, by_line.values()), key=lambda line: -line.calls_per_step)


def _line_of(here: Sequence[Site]) -> CodeLine:
    """Sum the sites of one line, without steps in which their thread lost its core."""
    steps_s = tuple(map(sum, zip(*(site.steps_s for site in here if site.steps_s), strict=False)))
    usual_s = [steps_s[number] for number in typical_steps(steps_s)]
    usual = mean(usual_s) / mean(steps_s) if any(usual_s) else 1.0

    def seconds(name: str) -> float | None:
        known = [value for site in here if (value := getattr(site, name)) is not None]
        return usual * sum(known) if known else None

    return CodeLine(
        place=here[0].place,
        ops=tuple(dict.fromkeys(site.op for site in here)),
        calls_per_step=sum(site.calls_per_step for site in here),
        host_s=seconds("host_s"),
        backward_s=seconds("backward_s"),
        derived_s=seconds("derived_s"),
        bytes_per_step=sum(site.bytes_per_step or 0.0 for site in here),
        requires_grad=any(site.requires_grad for site in here),
        phases_s={phase: usual * sum(site.phases_s.get(phase, 0.0) for site in here) for phase in PHASES},
        steps_s=tuple(usual_s),
    )


def direct_lines(evidence: Evidence, kind: SiteKind) -> list[CodeLine]:
    """Return lines that do `kind` themselves, outside the code that fetches and collates samples."""
    return lines_of(
        [
            site
            for site in evidence.sites
            if site.kind == kind and site.via is None and not _fetches(evidence, site.place)
        ]
    )


def costly_optimizers(evidence: Evidence) -> list[tuple[OptimizerSetup, float]]:
    """Return the optimizers of a step with their share of it, by the GPU's own clock if that was read.

    The list is empty if they take little.
    """
    shares = phase_shares(evidence, device=True) or phase_shares(evidence)
    share = shares.get("optimizer") or 0.0
    return [(setup, share) for setup in evidence.optimizers] if share >= LEAST_OPTIMIZER_SHARE else []


def optimizer_time(evidence: Evidence, share: float) -> str:
    """Say how much of the step the optimizer takes."""
    step_s = evidence.step_s or 0.0
    return f"the optimizer takes {show_seconds(share * step_s)} of a step of {show_seconds(step_s)}"


def looks_share(evidence: Evidence, place: Place) -> float | None:
    """Return the share of the step in which a line was on the stack, without its backward pass."""
    stacks, shares = evidence.stacks, phase_shares(evidence)
    if stacks is None or sum(stacks.samples_by_phase.values()) < FEWEST_LOOKS:
        return None
    parts = (
        path.samples / stacks.samples_by_phase[path.phase] * shares.get(path.phase, 0.0)
        for path in stacks.paths
        if stacks.samples_by_phase.get(path.phase) and place.at in (each.at for each in path.places)
    )
    return min(sum(parts), MOST) or None


def block_share(evidence: Evidence, place: Place) -> float | None:
    """Return the share of the step that the block around a line costs; None if no such block was removed."""
    found = arm_at(evidence, KNOCKED_OUT, place)
    return None if found is None or found.speedup <= 1 else min(1 - 1 / found.speedup, MOST)


def training_call(evidence: Evidence) -> Place | None:
    """Return the line of the longest outermost model call in the training step."""
    calls = [call for call in evidence.module_calls if call.training and call.has_parameters]
    longest = max(calls, key=lambda call: (call.host_s or 0.0, call.calls_per_step), default=None)
    return longest.place if longest is not None else None


def repeated_call(rule: Title, op: str, *, what: str) -> Callable[[Evidence], list[Finding]]:
    """Make the `detect` of a rule on a needless torch.cuda call that the user's lines make in every step."""

    def detect(evidence: Evidence) -> list[Finding]:
        findings = []
        calls = [site for site in evidence.sites if (site.kind, site.op, site.via) == ("call", op, None)]
        for line in lines_of(calls) if on_gpu(evidence) else ():
            if line.calls_per_step >= 1:
                number = show_calls(line.calls_per_step)
                findings += rule.proven(
                    evidence,
                    line.place,
                    f"torch.cuda.{op}() is called {number} times per step: it {what}",
                    figures=calls_and_timing(evidence, line),
                    share=line_share(evidence, line) or None,
                )
        return findings

    return detect


def costly_lines(
    evidence: Evidence, lines: list[CodeLine], *, least_calls: float, least_share: float
) -> list[tuple[CodeLine, float]]:
    """Return the lines with enough calls per step and enough of its time, with their shares."""
    shares = [(line, line_share(evidence, line) or 0.0) for line in lines]
    return [
        (line, share) for line, share in shares if share >= least_share and line.calls_per_step >= least_calls
    ]


def calls_and_timing(evidence: Evidence, line: CodeLine) -> list[str]:
    """Return the figures of a line that calls too often."""
    calls = show_calls(line.calls_per_step)
    return [f"{show_ops(line)}: {calls} calls per step from this line", show_timing(evidence, line)]


def copied_lines(
    evidence: Evidence, kind: str, is_meant: Callable[[Site], bool], *, least: float
) -> list[tuple[CodeLine, float, float]]:
    """Return lines that copy to the GPU, with their shares of the step: copies of `kind`, divided by bytes.

    The third figure is what these copies take per step in the profile; they hold at least `least` of it.
    """
    kernels = evidence.kernels
    if not on_gpu(evidence) or kernels is None:
        return []
    copies_s = sum(copy.total_s for copy in kernels.copies if copy.kind.startswith(kind))
    share = share_of(copies_s, evidence.step_s)  # the profiler makes steps longer, but not copies
    lines = lines_of(
        [
            site
            for site in evidence.sites
            if site.kind == "copy" and site.device.startswith("cuda") and is_meant(site)
        ]
    )
    total_bytes = sum(line.bytes_per_step for line in lines)
    if share is None or share < least or total_bytes <= 0:
        return []
    return [
        (line, share * line.bytes_per_step / total_bytes, copies_s) for line in lines if line.bytes_per_step
    ]


def show_calls(calls: float) -> str:
    """Format a mean number of calls: 1536, 64, 2.5."""
    return f"{calls:.0f}" if calls >= 10 or calls == int(calls) else f"{calls:.1f}"


def show_ops(line: CodeLine) -> str:
    """Format a line's operations as the source writes them: `x[...]`, `item`, `tensor`."""
    return ", ".join(_WRITTEN.get(op, op) for op in line.ops)


def line_share(evidence: Evidence, line: CodeLine) -> float | None:
    """Return the share of an ordinary step that a line's calls hold, at most that of their phases.

    Timing every call slows a step tenfold and more, and calls themselves a little.  So a line gets its part
    of each phase's calls, and the phase its share of ordinary steps.  If there was no time for that, stack
    samples give the same without the backward pass, or steps without the line's loop give all of it.
    """
    shares, means = phase_shares(evidence), phase_means(evidence)
    if line.total_s is None:
        known = [_share_of_looks(evidence, line, shares), _share_of_block(evidence, line)]
        return max((share for share in known if share is not None), default=None)
    if not evidence.attributed_calls_s or not shares:
        return share_of(line.total_s, evidence.attributed_step_s)
    held = {**line.phases_s, "backward": line.phases_s.get("backward", 0.0) + (line.backward_s or 0.0)}
    # calls exclude the Python code between them; backward nodes exclude nothing
    within = {phase: max(evidence.attributed_calls_s.get(phase, 0.0), means[phase]) for phase in means}
    within["backward"] = evidence.attributed_backward_s or within["backward"]
    parts = (
        min(1.0, seconds / within[phase]) * shares[phase]
        for phase, seconds in held.items()
        if seconds > 0 and within.get(phase)
    )
    return min(sum(parts), MOST)


def _share_of_looks(evidence: Evidence, line: CodeLine, shares: dict[str, float]) -> float | None:
    """Return a line's part of each phase's samples, weighted by the phase's share of ordinary steps."""
    stacks = evidence.stacks
    if stacks is None or sum(stacks.samples_by_phase.values()) < FEWEST_LOOKS:
        return None
    held = [path for path in stacks.paths if _is_in_calls(path, line)]
    parts = (
        path.samples / stacks.samples_by_phase[path.phase] * shares.get(path.phase, 0.0)
        for path in held
        if stacks.samples_by_phase.get(path.phase)
    )
    return min(sum(parts), MOST)


def _share_of_block(evidence: Evidence, line: CodeLine) -> float | None:
    """Return a line's part, by stack samples, of what steps without its block save."""
    found, stacks = arm_at(evidence, KNOCKED_OUT, line.place), evidence.stacks
    if stacks is None or found is None or found.speedup_low <= 1:
        return None
    in_block = [path for path in stacks.paths if any(holds(found, place) for place in path.places)]
    at_line = [path for path in in_block if _is_in_calls(path, line)]
    looks = sum(path.samples for path in in_block)
    if looks < FEWEST_SAMPLES:
        return None
    return min(1 - 1 / found.speedup, MOST) * sum(path.samples for path in at_line) / looks


def _is_in_calls(path: StackPath, line: CodeLine) -> bool:
    """Return whether a path ends in calls that the line makes itself.

    A function or a module that the line also calls is not among them, nor is a backward pass.
    """
    if not path.places or path.places[-1].at != line.place.at or path.library == "torch/autograd":
        return False
    return path.library != "torch/nn/modules" or any(op.endswith("cell") or op in LAYERS for op in line.ops)


def share_interval(share: float, line: CodeLine) -> tuple[float, float] | None:
    """Return the 95 % interval of a line's share, by resampling attributed steps; None below three."""
    whole = sum(line.steps_s)
    if len(line.steps_s) < FEWEST_STEPS or whole <= 0:
        return None
    low, high = (end * len(line.steps_s) / whole for end in mean_interval(line.steps_s))
    return min(share * low, 1.0), min(share * high, 1.0)


def show_timing(evidence: Evidence, line: CodeLine) -> str:
    """Show the seconds of a line's calls, beside the step they were measured in."""
    if line.total_s is None:
        return "its calls were not timed; the share comes from stack samples, or from its block"
    step = show_seconds(evidence.attributed_step_s)
    words = f"{show_seconds(line.total_s)} of a step of {step} while calls were timed"
    share = line_share(evidence, line)
    interval = share_interval(share, line) if share is not None else None
    if interval is None:
        return words
    low, high = (show_share(end) for end in interval)
    return f"{words}; over {len(line.steps_s)} such steps {low} to {high} of an ordinary one"


def at_least(found: int, looks: int) -> float:
    """Return the lower end of the 95 % interval (Wilson's) of a share, `found` out of `looks`."""
    z, share = 1.96, found / looks
    spread = z * math.sqrt(max(0.0, share * (1 - share)) / looks + (z / looks / 2) ** 2)
    return (share + z**2 / looks / 2 - spread) / (1 + z**2 / looks)


def found_between_phases(
    rule: Title,
    evidence: Evidence,
    block_of: Callable[[StackPath, Evidence], Place | None],
    *,
    what: str,
    least: float,
) -> list[Finding]:
    """Return findings on blocks that hold at least `least` of the step outside its phases.

    `block_of` returns the block that a path lies in.  Thin evidence does not suffice if the block could not
    be removed.
    """
    stacks, step_s, rest_s = evidence.stacks, evidence.step_s, evidence.phase_s("rest")
    looks = stacks.samples_by_phase.get("rest", 0) if stacks is not None else 0
    if stacks is None or not step_s or not rest_s or not looks or host_is_hidden(evidence):
        return []
    found: Counter[Place] = Counter()
    for path in stacks.paths:
        place = block_of(path, evidence) if path.phase == "rest" and path.places else None
        if place is not None:
            found[place] += path.samples
    findings, rest_share = [], min(1.0, rest_s / step_s)
    for place, samples in found.most_common():
        share = min(MOST, samples / looks * rest_share)
        if samples < FEWEST_SAMPLES or share < least:
            continue
        proven = rule.proven(
            evidence,
            place,
            f"{what} {show_share(share)} of the step",
            figures=(f"on the stack in {samples} of {looks} samples between the phases",),
            share=share,
        )
        is_sure = looks >= FEWEST_BETWEEN and at_least(samples, looks) * rest_share >= least
        findings += [finding for finding in proven if is_sure or finding.ceiling is not None]
    return findings


def _fetches(evidence: Evidence, place: Place) -> bool:
    if place.function is None:
        return False
    if place.function.rpartition(".")[2] in _FETCHING:
        return True
    return any(
        loader.collate_place is not None
        and loader.collate_place.function == place.function
        and loader.collate_place.file == place.file
        for loader in evidence.loaders
    )


def _sum_of_known(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
