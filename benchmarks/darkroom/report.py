"""The table of a result."""

from __future__ import annotations

from typing import Any

from flatout.ground.units import show_ratio, show_seconds, show_share


def as_table(result: dict[str, Any]) -> str:
    """One line per arm: the slow ones, the ladder, each lever alone."""
    heads = ("arm", "step", "× as written", "× seed's fix", "step / cached", "busy", "kernels")
    lines: list[tuple[str, ...]] = [heads]
    ladder = result.get("ladder", [])
    order = ["as_written", "seeds_fix", *ladder, *result.get("alone", {}).values()]
    lines += [_line(name, result) for name in dict.fromkeys(order)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    text = [f"{result['hardware']}, batch {result['batch_size']}, {result['rounds']} rounds"]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)),
        ]
        text.append("  ".join(cells))
    for dtype, limit in result["limit"].items():
        text.append(f"floor of a step in {dtype}: {show_seconds(limit['step_s'])}")
    for reference, gaps in result["gradients"].items():
        for name, gap in gaps.items():
            text.append(f"gradient, {name} against {reference}: {gap:.2e}")
    text += [f"{name}: {why}" for name, why in result["errors"].items()]
    return "\n".join(text)


def _line(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    row, kernels = result["arms"].get(name, {}), result["kernels"].get(name, {})
    count = kernels.get("num_kernels")
    return (
        name,
        show_seconds(row.get("step_s")),
        _with_interval(row.get("speedup_over_as_written")),
        _with_interval(row.get("speedup_over_seeds_fix")),
        _with_interval(row.get("step_over_cached")),
        show_share(kernels.get("busy_share")),
        "n/a" if count is None else f"{count:.0f}",
    )


def _with_interval(found: dict[str, float] | None) -> str:
    if found is None:
        return "n/a"
    low, high = (show_ratio(found[end]).rstrip("×") for end in ("low", "high"))
    return f"{show_ratio(found['ratio'])} [{low}, {high}]"
