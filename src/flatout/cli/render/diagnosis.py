"""A diagnosis in the terminal: made for 80 columns, for a pipe, and for readers who see no colour.

Everything that came from the job is shown as plain text: a file name can neither colour the terminal nor
be read as markup.  The order is the order of the questions: what ran, what the step spends its time on,
what taking a cause away changed, which lines to fix and what each is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.cli.output import bullet, plain_table, render_lines
from flatout.doctor.causal_map import flat
from flatout.doctor.finding import Finding
from flatout.doctor.rule import all_rules
from flatout.doctor.sentences import (
    LEAST_DIFFERENT,
    SAFETY,
    ended_early,
    instruments,
    is_of_the_job,
    own_work_s,
    phase_shares,
    proof_words,
    read_arms,
    say_bound,
    short_of_time,
    straggler_words,
    too_little,
    undecided,
)
from flatout.doctor.unexplained import unexplained
from flatout.ground.units import UNKNOWN, show_interval, show_ratio, show_seconds, show_share
from flatout.page.printable import printable

if TYPE_CHECKING:
    from flatout.doctor.examine import Diagnosis
    from flatout.measure.evidence import Evidence

LEAST_SHOWN = 0.02  # of the step, what a block of the causal map frees
MOST_BLOCKS = 8
MOST_RANKS = 16
SHORTEST_BAR, LONGEST_BAR = 8, 30  # columns

# A glyph as well as a colour per phase: the bar stays readable in a log file.
LOOKS = {
    "wait": ("░", "yellow"),
    "transfer": ("▒", "magenta"),
    "forward": ("█", "blue"),
    "backward": ("▓", "cyan"),
    "optimizer": ("▚", "green"),
    "rest": ("·", "bright_black"),
}


def render(diagnosis: Diagnosis, *, console: Console | None = None) -> str:
    """Render the report as text, coloured if `console` (by default stdout) is a terminal."""
    console = console or Console(highlight=False)
    return render_lines(console, _parts(diagnosis, width=min(console.width, 100)))


def _parts(diagnosis: Diagnosis, *, width: int) -> Iterator[RenderableType]:
    evidence = diagnosis.evidence
    yield from _headline(evidence)
    yield ""
    yield Text(say_bound(evidence), style="bold")
    if evidence.step_s is not None:
        yield from _phase_bar(evidence, width=width)
        yield from _readings(evidence)
        yield from _map(diagnosis, width=width)
    yield ""
    if diagnosis.findings:
        yield _table(diagnosis.findings, width=width)
        for number, finding in enumerate(diagnosis.findings, start=1):
            yield ""
            yield from _details(finding, number=number)
        yield ""
        codes = dict.fromkeys(finding.code for finding in diagnosis.findings)
        yield Text(f"Examples of these fixes, before and after: flatout rules {' | '.join(codes)}")
        if (short := short_of_time(evidence)) is not None:
            yield Text(short)
    else:
        yield from _nothing_found(evidence)
    if len(evidence.ranks) > 1:
        yield ""
        yield from _ranks(evidence)
    if evidence.not_measured:
        yield ""
        yield Text("not measured:")
        for reason in evidence.not_measured:
            yield bullet(reason)
    if diagnosis.evidence_path is not None:
        yield ""
        yield Text("Evidence: ", style="dim").append(printable(str(diagnosis.evidence_path)), style="not dim")


def _headline(evidence: Evidence) -> Iterator[Text]:
    job = evidence.job
    yield Text(printable(" ".join(job.command)), style="bold")
    num_real = len(evidence.kept("real"))
    device = printable(job.device_name or job.device)
    ranks = f" · {job.world_size} processes" if job.world_size > 1 else ""
    figures = f"{device}{ranks} · step {show_seconds(evidence.step_s)}"
    figures += (
        f" (mean of {num_real} {'step' if num_real == 1 else 'steps'}, {len(evidence.steps)} observed)"
        if num_real
        else ""
    )
    yield Text(figures)
    early = ended_early(job)
    if early is not None:
        yield Text(printable(early), style="red")


def _phase_bar(evidence: Evidence, *, width: int) -> Iterator[Text]:
    shares = phase_shares(evidence)
    bar = Text()
    total, drawn_to = 0.0, 0
    for phase, share in shares.items():
        glyph, colour = LOOKS[phase]
        total += share
        # Cut at running totals, so that rounding never makes the bar longer or shorter than the step.
        bar.append(glyph * (round(total * width) - drawn_to), style=colour)
        drawn_to = round(total * width)
    yield bar
    yield from _legend(shares, width=width)


def _legend(shares: dict[str, float], *, width: int) -> Iterator[Text]:
    """Wrap between phases: rich would break a line inside one."""
    line = Text()
    for phase, share in shares.items():
        glyph, colour = LOOKS[phase]
        words = f" {phase} {show_share(share)}"
        if line and len(line) + len(glyph + words) + 2 > width:
            yield line
            line = Text()
        line.append("  " if line else "").append(glyph, style=colour).append(words)
    yield line


def _readings(evidence: Evidence) -> Iterator[RenderableType]:
    found = read_arms(evidence)
    if found:
        yield ""
    for reading in found:
        line = Text(f"{reading.label}: ")
        line.append(reading.figure, style="bold").append(f" — {reading.words}")
        yield line


def _map(diagnosis: Diagnosis, *, width: int) -> Iterator[RenderableType]:
    """Draw the causal map as a list of bars: the filled part is what the step would save."""
    costly = [
        (depth, block) for depth, block in flat(diagnosis.map, brief=True) if block.freed_share >= LEAST_SHOWN
    ]
    most = sorted(costly, key=lambda entry: (entry[1].is_noise, -entry[1].freed_share))[:MOST_BLOCKS]
    listed = [entry for entry in costly if entry in most]
    if not listed:
        return
    yield ""
    step = show_seconds(diagnosis.evidence.step_s)
    yield Text(f"Your code, by block: what a step of {step} takes without it")
    names = [printable(f"{'  ' * depth}{block.where}") for depth, block in listed]
    figures = [f"{show_seconds(block.step_s):>8}  {block.gain}" for _depth, block in listed]
    room = width - max(map(len, figures)) - 3
    longest = min(max(map(len, names)), max(room - SHORTEST_BAR, 1))
    bar = min(LONGEST_BAR, room - longest)
    for name, figure, (_depth, block) in zip(names, figures, listed, strict=True):
        filled = 0 if block.is_noise else round(min(block.freed_share, 1.0) * bar)
        line = Text(f"{name[-longest:]:<{longest}} ", style="cyan")
        line.append("█" * filled, style="red").append("░" * (bar - filled), style="bright_black")
        yield line.append(f" {figure}", style="not cyan")


def _table(findings: tuple[Finding, ...], *, width: int) -> Table:
    table = plain_table()
    # Widths are set here: rich lets a table with minimum widths run over the edge and cuts its text.
    fixed = len("share") + len("9.99× measured") + 3 * 2
    longest = max(max(len(f"{item.code} {item.name}"), len(_place(item))) for item in findings)
    fix = max(width - fixed - longest, min(22, (width - fixed) // 2))
    table.add_column("finding", overflow="fold", width=width - fixed - fix)
    table.add_column("share", justify="right", width=len("share"))
    table.add_column("ceiling", width=len("9.99× measured"))
    table.add_column("fix", overflow="fold", width=fix)
    for finding in findings:
        what = Text(finding.code, style="bold red").append(f" {finding.name}", style="not bold default")
        what.append(f"\n{_place(finding)}", style="not bold cyan")
        table.add_row(what, show_share(finding.share), _ceiling(finding), Text(printable(finding.fix)))
    return table


def _ceiling(finding: Finding) -> str:
    """Show `1.80× measured`, with its interval below it."""
    ceiling = finding.ceiling
    if ceiling is None:
        return UNKNOWN
    if is_of_the_job(ceiling):
        return f"{show_ratio(ceiling.job_speedup)} {ceiling.source}\nfor the job"
    interval = show_interval(ceiling.speedup_low, ceiling.speedup_high)
    if ceiling.job_speedup is not None and ceiling.job_speedup * LEAST_DIFFERENT < ceiling.speedup:
        interval += f"\njob {show_ratio(ceiling.job_speedup)}"
    return f"{show_ratio(ceiling.speedup)} {ceiling.source}" + (f"\n{interval}" if interval else "")


def _place(finding: Finding) -> str:
    return printable(str(finding.place)) if finding.place else UNKNOWN


def _details(finding: Finding, *, number: int) -> Iterator[RenderableType]:
    yield Text(f"{number}. {finding.code} {finding.name}  {_place(finding)}", style="bold")
    yield Padding(Text(printable(finding.message)), (0, 0, 0, 3))
    for line in (*finding.evidence, *proof_words(finding)):
        yield bullet(line, indent=3)
    yield Padding(
        Text(f"safety of the fix: {finding.safety}, {SAFETY[finding.safety]}", style="dim"), (0, 0, 0, 3)
    )


def _nothing_found(evidence: Evidence) -> Iterator[RenderableType]:
    taken = instruments(evidence)
    if not taken:
        yield Text("Nothing could be examined.")
        return
    if (little := too_little(evidence)) is not None:
        yield Text(little, style="yellow")
        return
    left, undecided_words = unexplained(evidence), undecided(evidence)
    where = "in what was measured" if evidence.missing else "here"
    if left is None and undecided_words is not None:
        yield Text(f"No findings, but {undecided_words}", style="yellow")
    elif left is None:
        yield Text(
            f"No findings: {len(all_rules())} rules found nothing that costs time {where}.", style="green"
        )
    else:
        yield Text(f"No findings: none of {len(all_rules())} rules names a line, but {left}")
    yield Text(f"checked: {', '.join(taken)}")
    if (short := short_of_time(evidence)) is not None:
        yield Text(short)


def _ranks(evidence: Evidence) -> Iterator[RenderableType]:
    phases = list(LOOKS)
    titles = ["optim." if title == "optimizer" else title for title in ("rank", "step", *phases)]
    table = plain_table(*titles, right=titles, whole=titles)
    by_work = sorted(evidence.ranks, key=own_work_s, reverse=True)
    shown = evidence.ranks if len(by_work) <= MOST_RANKS else by_work[:MOST_RANKS]
    for rank in shown:
        seconds = (show_seconds(rank.phases_s.get(phase)) for phase in phases)
        table.add_row(str(rank.rank), show_seconds(rank.step_s), *seconds)
    yield table
    if len(shown) < len(evidence.ranks):
        yield Text(f"Of {len(evidence.ranks)} ranks, these do the most work on their own; --html lists all.")
    yield Text(straggler_words(evidence.ranks))
