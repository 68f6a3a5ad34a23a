"""The figures of darkroom.md, made from the result files of the benchmark (`tables`).

Behind `<!-- darkroom: NAME -->` in the page stands the figure of that name, made from the latest
result of each kind of hardware.  What was not measured is said to be so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import fill

from flatout.ground.units import show_ratio, show_seconds, show_share

RESULTS = Path(__file__).parents[1] / "benchmarks" / "darkroom" / "results"
# A picture knows nothing of the page it is shown in, only whether the reader prefers a dark one.
READABLE = "svg{color:#555}@media(prefers-color-scheme:dark){svg{color:#bbb}}"
COLOURS = ("#757575", "#1e88e5", "#f4511e", "#43a047", "#8e24aa")
WORDS = {
    "as_written": "as written",
    "seeds_fix": "the author's fix",
    "gather": "flat arrays, one gather",
    "causal": "+ attention told it is causal",
    "answer_row": "+ last layer where it is read",
    "fused": "+ fused AdamW",
    "graph": "+ CUDA graph",
    "compile": "+ torch.compile",
    "bf16": "+ bf16",
}

Result = dict[str, Any]


def with_tables(markdown: str, *, folder: Path = RESULTS) -> str:
    figures: dict[str, Callable[[Path], str]] = {
        "ladder": ladder,
        "feeding": feeding,
        "curves": curves,
        "rollout": rollout,
    }
    return fill(markdown, figures, owner="darkroom", folder=folder)


def latest(folder: Path, pattern: str) -> list[Result]:
    """The latest result of each subject and hardware; names end in the date, so order is age."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(pattern)):
        found[path.stem.rsplit("_", 1)[0]] = path
    return [json.loads(path.read_text()) for path in found.values()]


def ladder(folder: Path) -> str:
    """Each change added up, and each alone."""
    parts = []
    for result in latest(folder, "darkroom-*.json"):
        lines = [
            heading(result),
            "",
            "| | step | × as written | × the author's fix | alone |",
            "|---|--:|--:|--:|--:|",
        ]
        alone: dict[str, str] = result.get("alone", {})
        for rung in ["as_written", "seeds_fix", *result.get("ladder", [])]:
            last = rung.split("+")[-1]
            row = result["arms"].get(rung, {})
            own = result["arms"].get(alone.get(last, ""), {}) if "+" in rung else {}
            gained = (
                own and result["arms"].get("gather") and result["arms"]["gather"]["step_s"] / own["step_s"]
            )
            cells = [
                WORDS[last],
                show_seconds(row.get("step_s")),
                with_interval(row.get("speedup_over_as_written")),
                with_interval(row.get("speedup_over_seeds_fix")),
                show_ratio(gained) if gained else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "*Not measured yet.*"


def feeding(folder: Path) -> str:
    """What the loader costs, and how busy the GPU is."""
    lines = [
        "| hardware | arm | step ÷ step on a cached batch | GPU busy | kernels a step |",
        "|---|---|--:|--:|--:|",
    ]
    for result in latest(folder, "darkroom-*.json"):
        for name, row in result["arms"].items():
            if "step_over_cached" in row:
                kernels = result["kernels"].get(name, {})
                count = f"{kernels['num_kernels']:.0f}" if kernels.get("busy_share") is not None else "n/a"
                ratio = row["step_over_cached"]
                cells = [
                    result["hardware"],
                    name.replace("_", " ").replace("+", " + "),
                    f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
                    show_share(kernels.get("busy_share")),
                    count,
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "*Not measured yet.*"


def curves(folder: Path) -> str:
    """Losses on the same batches from the same weights, and how far apart they and the gradients are."""
    parts = []
    for result in latest(folder, "darkroom-*.json"):
        for reference, curve in result["curves"].items():
            slow = curve[reference]
            gaps = [
                f"{name.replace('+', ' + ')} within {largest_gap(slow, losses):.1e}"
                for name, losses in curve.items()
                if name != reference
            ]
            gradients = result["gradients"].get(reference, {})
            apart = max((gap for name, gap in gradients.items() if name != "largest"), default=None)
            said = "" if apart is None else f" The first gradient differs by at most {apart:.1e} in fp32."
            parts.append(
                f"{heading(result)}: {len(slow)} steps against {WORDS[reference]};"
                f" loss of {', '.join(gaps)}.{said}"
            )
            if len(slow) >= 10:
                name = picture_name("curves", result, reference)
                parts.append(f"![loss by step, against {WORDS[reference]}]({name})")
    return "\n\n".join(parts) or "*Not measured yet.*"


def rollout(folder: Path) -> str:
    """Return by episode in goals never seen."""
    parts = []
    for result in latest(folder, "rollout*_*.json"):
        found, trained = result["held_out"], result["trained_with"]
        model = found["model"]
        how = "80 answers a sequence" if trained.get("every_moment") else "one answer a sequence"
        parts.append(
            f"**{result['hardware']}**, {trained['steps']} steps of {trained['batch_size']} ({how}),"
            f" histories of {trained['history_steps']} steps: from {model['first_episodes']:.2f} in the first"
            f" five episodes to {model['last_episodes']:.2f} in the last five, a rise of {model['rise']:.2f}"
            f" [{model['rise_low']:.2f}, {model['rise_high']:.2f}]; at random"
            f" {found['random']['last_episodes']:.2f}, knowing the goal {found['optimal']:.2f}."
        )
        parts.append(f"![return by episode]({picture_name('rollout', result)})")
    return "\n\n".join(parts) or "*Not measured yet.*"


def pictures(folder: Path = RESULTS) -> dict[str, str]:
    """Draw the charts of the page, by the names that it links."""
    drawn = {}
    for result in latest(folder, "darkroom-*.json"):
        for reference, curve in result["curves"].items():
            if len(curve[reference]) >= 10:
                chart = line_chart(curve, across="step", up="loss")
                drawn[picture_name("curves", result, reference)] = chart
    for result in latest(folder, "rollout*_*.json"):
        found, top = result["held_out"], float(result["episode_steps"])
        series = {agent: found[agent]["mean_by_episode"] for agent in ("random", "learner", "model")}
        drawn[picture_name("rollout", result)] = line_chart(series, across="episode", up="return", top=top)
    return drawn


def picture_name(kind: str, result: Result, reference: str = "") -> str:
    words = f"{kind} {reference} {result['hardware']}".lower()
    return f"images/darkroom/{re.sub('[^a-z0-9]+', '_', words)}.svg"


def heading(result: Result) -> str:
    run = f"batch {result['batch_size']}, {result['rounds']} rounds"
    return f"**{result['hardware']}**, {result['size']} size, {run}"


def largest_gap(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def with_interval(found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    low, high = (show_ratio(found[end]).rstrip("×") for end in ("low", "high"))
    return f"{show_ratio(found['ratio'])} [{low}, {high}]"


def line_chart(
    series: Mapping[str, Sequence[float]], *, across: str, up: str, top: float | None = None
) -> str:
    """Lines over 1, 2, 3, …, as an SVG; later series are drawn thinner, on top."""
    width, left, above, below = 640, 36, 28, 250
    count = max(len(values) for values in series.values())
    top = top or max(max(values) for values in series.values()) * 1.05
    shapes = [f'<text x="{width / 2}" y="{below + 24}" text-anchor="middle">{across} 1 to {count}</text>']
    for value in (0.0, top / 2, top):
        y = below - (below - above) * value / top
        shapes.append(f'<path d="M{left} {y:.1f}H{width}" stroke="currentColor" opacity="0.2"/>')
        shapes.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    legend = [f"<tspan>{up}:</tspan>"]
    for number, (name, values) in enumerate(series.items()):
        colour, stroke = COLOURS[number % len(COLOURS)], 5 - 1.2 * min(number, 3)
        points = " ".join(
            f"{left + (width - left) * i / max(1, count - 1):.1f},{below - (below - above) * v / top:.1f}"
            for i, v in enumerate(values)
        )
        shapes.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{stroke:.1f}"/>'
        )
        last = name.split("+")[-1]
        words = WORDS.get(name) or f"… {WORDS.get(last, last)}"
        legend.append(f'<tspan dx="12" fill="{colour}">{words}</tspan>')
    body = "".join([f'<text x="{left}" y="14">', *legend, "</text>", *shapes])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {below + 30}" role="img"'
        f' aria-label="{up} by {across}" font-family="sans-serif" font-size="12" fill="currentColor">'
        f"<style>{READABLE}</style>{body}</svg>\n"
    )
