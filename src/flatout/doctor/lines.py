"""What one line of the user's code does per step, all its operations taken together.

Evidence counts by operation; people edit lines.  `torch.zeros(n).to(x) + torch.ones(n)` is one line with
two creations, and gets one finding.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatout.ground.units import show_seconds
from flatout.measure.evidence import Evidence, Place, Site, SiteKind

# Fetching samples one by one is what a dataset is for; its cost belongs to the rules of the loader.
_FETCHING = ("__getitem__", "__getitems__", "__iter__", "__next__")


# Operators have no name in the source.
_WRITTEN = {
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
    host_s: float | None  # per step under attribution; None when no site knows it
    backward_s: float | None
    derived_s: float | None  # what is computed from these tensors and parameters alone
    bytes_per_step: float
    requires_grad: bool

    @property
    def total_s(self) -> float | None:
        """The calls themselves, forward and backward together."""
        return _sum_of_known([self.host_s, self.backward_s])


def lines_of(sites: list[Site]) -> list[CodeLine]:
    """`sites` summed by line, the busiest line first."""
    by_line: dict[tuple[str, int], list[Site]] = {}
    for site in sorted(sites, key=lambda site: -site.calls_per_step):
        by_line.setdefault((site.place.file, site.place.line), []).append(site)
    lines = [
        CodeLine(
            place=here[0].place,
            ops=tuple(dict.fromkeys(site.op for site in here)),
            calls_per_step=sum(site.calls_per_step for site in here),
            host_s=_sum_of_known([site.host_s for site in here]),
            backward_s=_sum_of_known([site.backward_s for site in here]),
            derived_s=_sum_of_known([site.derived_s for site in here]),
            bytes_per_step=sum(site.bytes_per_step or 0.0 for site in here),
            requires_grad=any(site.requires_grad for site in here),
        )
        for here in by_line.values()
    ]
    return sorted(lines, key=lambda line: -line.calls_per_step)


def direct_lines(evidence: Evidence, kind: SiteKind) -> list[CodeLine]:
    """Lines that do `kind` themselves, outside the code that fetches and collates samples."""
    return lines_of(
        [
            site
            for site in evidence.sites
            if site.kind == kind and site.via is None and not _fetches(evidence, site.place)
        ]
    )


def show_calls(calls: float) -> str:
    """A mean number of calls: 1536, 64, 2.5."""
    return f"{calls:.0f}" if calls >= 10 or calls == int(calls) else f"{calls:.1f}"


def show_ops(line: CodeLine) -> str:
    """A line's operations as they are written: `x[...]`, `item`, `tensor`."""
    return ", ".join(_WRITTEN.get(op, op) for op in line.ops)


def timing(evidence: Evidence, line: CodeLine) -> str:
    """The seconds a line's calls take, beside the step they were taken from."""
    step = show_seconds(evidence.attributed_step_s)
    return f"{show_seconds(line.total_s)} of a step of {step} while calls were timed"


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
