"""The end of the page: the loader, the kernels, the memory, the ranks, what is missing, what it ran on.

A section is left out where its instrument was not run; the list of what was not measured says why.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.doctor.readings import straggler_words
from flatout.measure import PHASES
from flatout.measure.evidence import Evidence, Kernels, Loader, Memory
from flatout.page.markup import Html, code, facts, known, section, table, tag
from flatout.units import UNKNOWN, show_bytes, show_seconds, show_share


def loader_section(loader: Loader) -> Html:
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
    return section(f"Loader of {loader.dataset}", facts(figures), table(heads, rows, numbers=range(1, 5)))


def kernels_section(kernels: Kernels | None, *, device: str) -> Html | None:
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


def memory_section(memory: Memory | None) -> Html | None:
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


def ranks_section(evidence: Evidence) -> Html | None:
    if len(evidence.ranks) < 2:
        return None
    rows = [
        (
            str(rank.rank),
            rank.host or UNKNOWN,
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


def what_it_ran_on(evidence: Evidence) -> Iterator[tuple[str, str | None]]:
    """The end of the page: versions, machine and settings."""
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
