"""A diagnosis as one HTML page: the findings, what they rest on, and every observed step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.doctor.causal_map import causal_map, flat
from flatout.doctor.finding import Finding
from flatout.doctor.report.charts import arm_band, arm_keys, bars, cut_off, timeline, whiskers
from flatout.doctor.report.source_view import dedented, source_view
from flatout.doctor.rule import all_rules
from flatout.doctor.sentences import (
    SAFETY,
    ended_early,
    instruments,
    is_of_the_job,
    node_name,
    phase_means,
    phase_shares,
    proof_words,
    read_arms,
    say_bound,
    short_of_time,
    show_ceiling,
    straggler_words,
    too_little,
    undecided,
)
from flatout.doctor.unexplained import unexplained
from flatout.ground.units import UNKNOWN, show_bytes, show_interval, show_ratio, show_seconds, show_share
from flatout.measure import PHASES
from flatout.measure.evidence import Evidence, Kernels, Loader, Memory, Place
from flatout.page.charts import RowChart, stacked_row
from flatout.page.document import document
from flatout.page.inline import inline, legend
from flatout.page.markup import Html, code, facts, join, known, listing, section, table, tag

CONTEXT_LINES = 4  # of source above and below a guilty line
CHANGED = {"-": "removed", "+": "added"}  # lines of an example


def page(evidence: Evidence, findings: Sequence[Finding]) -> str:
    """Render the whole document."""
    job = evidence.job
    return document(
        " ".join(job.command),
        (
            _summary(evidence, findings),
            _step(evidence),
            _causal_map(evidence),
            _what_if(evidence),
            _timeline(evidence),
            *(_finding(finding, number=i, evidence=evidence) for i, finding in enumerate(findings, start=1)),
            *(_loader(loader) for loader in sorted(evidence.loaders, key=lambda loader: not loader.trains)),
            _kernels(evidence.kernels, device=job.device),
            _memory(evidence.memory),
            _ranks(evidence),
            listing("Not measured", evidence.not_measured),
        ),
        kind="Diagnosis of a training job",
        heading=code(" ".join(job.command)),
        where=(job.device_name or job.device, job.started_at.replace("T", " ", 1)),
        verdict=say_bound(evidence),
        warning=ended_early(job),
        figures=_figures(evidence, findings),
        footer=_what_it_ran_on(evidence),
        version=job.flatout,
    )


def _figures(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[tuple[str, str | None]]:
    num_real = len(evidence.kept("real"))
    yield "step", show_seconds(evidence.step_s)
    yield "steps in the mean", f"{num_real} of {len(evidence.steps)}" if num_real else UNKNOWN
    yield "findings", str(len(findings))
    kernels, memory = evidence.kernels, evidence.memory
    yield "GPU busy", known(kernels.busy_share if kernels else None, show_share)
    yield "peak memory", known(memory.peak_bytes if memory else None, show_bytes)


def _summary(evidence: Evidence, findings: Sequence[Finding]) -> Html:
    if not findings:
        if (little := too_little(evidence)) is not None:
            return section("Findings", tag("p", little), anchor="findings")
        checked = ", ".join(instruments(evidence)) or "nothing: no step could be measured"
        left = unexplained(evidence)
        open_words = undecided(evidence)
        none = "None." if open_words is None else f"None, but {open_words}"
        none = none if left is None else f"No rule names a line, but {left}"
        short = short_of_time(evidence)
        return section(
            "Findings",
            tag("p", none),
            tag("p", f"Checked: {checked}."),
            Html() if short is None else tag("p", short),
            anchor="findings",
        )
    rows = [
        (
            join(
                (tag("a", f"{finding.code} {finding.name}", href=f"#finding-{number}"), code(finding.place))
            ),
            show_share(finding.share),
            show_ceiling(finding.ceiling),
        )
        for number, finding in enumerate(findings, start=1)
    ]
    listed = table(("finding", "share", "ceiling"), rows, numbers=(1,))
    note = (
        "Share: the part of the step spent on this cause. "
        "Ceiling: how much faster the step gets without it, measured."
    )
    short = short_of_time(evidence)
    more = () if short is None else (tag("p", short),)
    return section("Findings", listed, *more, note=note, anchor="findings")


def _step(evidence: Evidence) -> Html | None:
    host, stream = phase_means(evidence), phase_means(evidence, device=True)
    if not host:
        return None
    shares, stream_shares = phase_shares(evidence), phase_shares(evidence, device=True)
    drawn = [stacked_row("host", shares)]
    heads, numbers = ["phase", "host", "share"], [1, 2]
    rows = [
        [
            join((tag("i", style=f"--c: var(--{phase})"), phase)),
            show_seconds(host[phase]),
            show_share(shares[phase]),
        ]
        for phase in PHASES
    ]
    if stream:
        drawn.append(stacked_row("GPU stream", stream_shares))
        heads += ["GPU stream", "share"]
        numbers += [3, 4]
        for row, phase in zip(rows, PHASES, strict=True):
            row += [show_seconds(stream[phase]), show_share(stream_shares[phase])]
    whole = inline(RowChart(rows=tuple(drawn)))
    return section("Where the time of a step goes", whole, table(heads, rows, numbers=numbers), anchor="step")


def _causal_map(evidence: Evidence) -> Html | None:
    blocks = causal_map(evidence)
    if not blocks:
        return None
    note = (
        "Each block was left out of some steps, interleaved with ordinary ones, together with its backward "
        "and the waiting that it causes. A bar is the share of the step that would be saved."
    )
    listed = table(
        ("block", "in", "step without it", "speed-up"),
        [
            (
                join(("\u2003" * depth, code(block.where))),
                block.place.function or "",
                show_seconds(block.step_s),
                block.gain,
            )
            for depth, block in flat(blocks)
        ],
        numbers=(2,),
    )
    drawn = source_view(blocks, evidence.sources)
    return section("What each block of your code costs", listed, drawn, note=note, anchor="map")


def _what_if(evidence: Evidence) -> Html | None:
    found = read_arms(evidence)
    if not found:
        return None
    blocks = min(counterfactual.num_blocks for counterfactual in evidence.counterfactuals)
    note = (
        f"Measured in {blocks} or more blocks, interleaved with the steps they are compared with. "
        "The dot is the step's time as a fraction of the full one, the line its 95 % interval."
    )
    return section("What changes when a cause is removed", inline(whiskers(found)), note=note)


def _timeline(evidence: Evidence) -> Html | None:
    steps = evidence.steps
    if not steps:
        return None
    drawn = bars(steps)
    notes = ["Pale steps count in no mean: the first of a block, an epoch's start, or an outlier."]
    widest = max(bar.num_steps for bar in drawn)
    if widest > 1:
        notes.append(f"Each bar is the mean of up to {widest} steps that ran in a row.")
    long = cut_off(drawn)
    notes += [f"Cut off: {bar.label}, {show_seconds(bar.length_s)}." for bar in long[:3]]
    if len(long) > 3:
        notes.append(f"{len(long) - 3} more are cut off.")
    return section(
        "Every step",
        inline(timeline(drawn)),
        arm_band(drawn),
        legend(arm_keys(steps)),
        note=" ".join(notes),
        anchor="timeline",
    )


def _finding(finding: Finding, *, number: int, evidence: Evidence) -> Html:
    ceiling = finding.ceiling
    worth = Html()
    if ceiling is not None:
        of_job = is_of_the_job(ceiling)
        words = "of the job" if of_job else show_interval(ceiling.speedup_low, ceiling.speedup_high)
        figure = show_ratio(ceiling.job_speedup if of_job else ceiling.speedup)
        worth = tag("p", tag("b", figure), f" {words} {ceiling.source}", class_="worth")
    share = f" · {show_share(finding.share)} of the step" if finding.share is not None else ""
    figures = (*finding.evidence, *proof_words(finding))
    safety = f"Safety: {finding.safety}, {SAFETY[finding.safety]}."
    return tag(
        "article",
        tag("header", tag("h2", tag("span", finding.code), f" {finding.name}"), worth),
        tag("p", code(finding.place), share, class_="where"),
        tag("p", finding.message),
        _excerpt(finding.place, evidence.sources) or Html(),
        tag("ul", *(tag("li", line) for line in figures), class_="evidence"),
        tag("p", tag("b", "Fix. "), finding.fix, " ", tag("span", safety, class_="note")),
        _example(finding.code) or Html(),
        class_="finding",
        id=f"finding-{number}",
    )


def _example(code: str) -> Html | None:
    """Show the fix on other code, before and after."""
    lines = next((rule.example for rule in all_rules() if rule.code == code), ())
    if not lines:
        return None
    rows = [
        tag("tr", tag("th", line[:1], scope="row"), tag("td", line[1:]), class_=CHANGED.get(line[:1]))
        for line in lines
    ]
    caption = tag("caption", f"{code}: an example of the fix, before and after")
    shown = tag("div", tag("table", caption, tag("tbody", *rows)), class_="source scroll")
    return join((tag("p", "Such a fix in other code, before and after:", class_="note"), shown))


def _excerpt(place: Place | None, sources: dict[str, dict[str, str]]) -> Html | None:
    """Show the guilty line between its neighbours, without their common indentation."""
    known = sources.get(place.file, {}) if place else {}
    if place is None or str(place.line) not in known:
        return None
    near = range(place.line - CONTEXT_LINES, place.line + CONTEXT_LINES + 1)
    numbers = [line for line in near if str(line) in known]
    rows = [
        tag(
            "tr",
            tag("th", str(line), scope="row"),
            tag("td", text),
            class_="guilty" if line == place.line else None,
        )
        for line, text in zip(numbers, dedented(numbers, known), strict=True)
    ]
    caption = tag("caption", place.file + (f", in {place.function}" if place.function else ""))
    return tag("div", tag("table", caption, tag("tbody", *rows)), class_="source scroll")


# What was measured; a section is omitted if its instrument did not run


def _loader(loader: Loader) -> Html:
    def spread(name: str) -> str:
        found = getattr(loader, name)
        return f"{show_seconds(found.mean_s)} (p95 {show_seconds(found.p95_s)})" if found else UNKNOWN

    figures = [
        ("constructed at", str(loader.place) if loader.place else UNKNOWN),
        ("workers", str(loader.num_workers)),
        ("batch size", str(loader.batch_size) if loader.batch_size else UNKNOWN),
        ("pinned memory", "yes" if loader.pin_memory else "no"),
        ("workers persist", "yes" if loader.persistent_workers else "no"),
        ("wait per batch", spread("wait_s")),
        ("fetch per batch", spread("fetch_s")),
        ("collate per batch", spread("collate_s")),
    ]
    if loader.epochs:
        start = max(loader.epochs, key=lambda epoch: epoch.iter_s + epoch.first_wait_s)
        figures.append(("costliest epoch start", show_seconds(start.iter_s + start.first_wait_s)))
    if loader.lengths:
        figures.append(("padding", show_share(loader.lengths.padded_share)))
        figures.append(("padding if sorted by length", show_share(loader.lengths.bucketed_share)))
    rows = [
        (
            str(worker.worker),
            str(worker.num_batches),
            *map(show_seconds, (worker.fetch_s, worker.collate_s, worker.queue_age_s)),
        )
        for worker in loader.workers
    ]
    heads = ("worker", "batches", "fetch", "collate", "queue age")
    title = f"Loader of {loader.dataset}" + ("" if loader.trains else ", which is not trained on")
    return section(title, facts(figures), table(heads, rows, numbers=range(1, 5)))


def _kernels(kernels: Kernels | None, *, device: str) -> Html | None:
    if kernels is None:
        return None
    kind = "operator" if device == "cpu" else "kernel"
    figures = [(f"{kind}s per step", _count(kernels.num_kernels))]
    if kernels.busy_share is not None:
        figures += [
            ("GPU busy", show_share(kernels.busy_share)),
            ("median kernel", show_seconds(kernels.median_kernel_s)),
            ("idle per step", show_seconds(kernels.gap_s)),
            ("waits of the host per step", _count(kernels.num_syncs)),
        ]
    if kernels.optimizer:
        figures.append(("optimizer", kernels.optimizer))
    rows = [
        (
            code(item.name),
            item.category,
            item.dtype or UNKNOWN,
            _count(item.calls_per_step),
            show_seconds(item.total_s),
        )
        for item in kernels.top
    ]
    rows += [
        (
            code(f"copy {copy.kind}"),
            "copy",
            show_bytes(copy.bytes_per_step),
            _count(copy.calls_per_step),
            show_seconds(copy.total_s),
        )
        for copy in kernels.copies
    ]
    heads = (kind, "category", "dtype or bytes", "calls per step", "time per step")
    length = show_seconds(kernels.step_s)
    note = f"From {kernels.num_steps} profiled steps of {length}, the profiler's own cost included."
    title = "Operators" if device == "cpu" else "Kernels"
    return section(title, facts(figures), table(heads, rows, numbers=(3, 4)), note=note)


def _memory(memory: Memory | None) -> Html | None:
    if memory is None:
        return None
    figures = [
        ("peak", show_bytes(memory.peak_bytes)),
        ("growth per step", show_bytes(memory.growth_bytes_per_step)),
        ("steps", str(memory.num_steps)),
    ]
    rows = [
        (
            code(growth.place),
            growth.holder or UNKNOWN,
            code(growth.holder_place),
            show_bytes(growth.bytes_per_step),
            _count(growth.tensors_per_step),
            "yes" if growth.with_graph else "no",
        )
        for growth in memory.growth
    ]
    heads = ("made at", "held by", "put there at", "bytes per step", "tensors per step", "with graph")
    graphs = [
        tag(
            "p",
            f"Graph held by {graph.holder or UNKNOWN}: {_count(graph.nodes_per_step)} more nodes every step.",
        )
        for graph in memory.graphs
    ]
    return section("Memory", facts(figures), table(heads, rows, numbers=(3, 4)), *graphs)


def _ranks(evidence: Evidence) -> Html | None:
    if len(evidence.ranks) < 2:
        return None
    rows = [
        (
            str(rank.rank),
            node_name(rank, evidence.ranks) or rank.host or UNKNOWN,
            show_seconds(rank.step_s),
            *(show_seconds(rank.phases_s.get(phase)) for phase in PHASES),
            rank.ended,
        )
        for rank in evidence.ranks
    ]
    heads = ("rank", "host", "step", *PHASES, "ended")
    return section(
        "Ranks", table(heads, rows, numbers=range(2, 9)), tag("p", straggler_words(evidence.ranks))
    )


def _what_it_ran_on(evidence: Evidence) -> Iterator[tuple[str, str | None]]:
    """Yield the end of the page: versions, machine and settings."""
    job, host, gpu, precision = evidence.job, evidence.host, evidence.gpu, evidence.precision
    yield "flatout", job.flatout
    yield "torch", job.torch
    yield "python", job.python
    yield "cores", known(host.cores, "{:g}".format) or UNKNOWN
    yield "host memory", show_bytes(host.memory_bytes)
    yield "processor", host.cpu_model or UNKNOWN
    none = "none" if job.device == "cpu" else UNKNOWN
    yield "GPU", f"{gpu.name}, {show_bytes(gpu.memory_bytes)}" if gpu else none
    yield "a step ends at", job.anchor or UNKNOWN
    yield "warm-up", job.warmup_reason or UNKNOWN
    if precision is not None:
        yield "parameters", ", ".join(precision.parameter_dtypes) or UNKNOWN
        yield "autocast", precision.autocast or "off"


def _count(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
