"""The causal map over the source: each line with a bar of what the step would save without its block."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from flatout.doctor.causal_map import MapBlock, flat
from flatout.ground.units import show_ratio, show_seconds
from flatout.page.markup import NOTHING, Html, tag

CONTEXT_LINES = 1  # of source above and below a block
MOST_LINES = 60  # of one block
LEAST_SHOWN = 0.02  # of the step, freed by a block

Numbered = Mapping[str, str]


def source_view(blocks: Sequence[MapBlock], sources: Mapping[str, Numbered]) -> Html:
    """Render one table of lines for each file that holds blocks; nothing if no source was kept."""
    listed = [
        block for _depth, block in flat(blocks) if block.freed_share >= LEAST_SHOWN and not block.is_noise
    ]
    files = dict.fromkeys(block.place.file for block in listed if block.place.file in sources)
    tables = [
        _file(file, [block for block in listed if block.place.file == file], sources[file]) for file in files
    ]
    return tag("div", *tables) if tables else NOTHING


def dedented(lines: Sequence[int], numbered: Numbered) -> list[str]:
    """Return the texts of lines without their common indentation."""
    # Line by line: a hostile line may hold characters that split it.
    texts = [" ".join(numbered[str(line)].expandtabs(4).splitlines()).rstrip() for line in lines]
    return textwrap.dedent("\n".join(texts)).split("\n")


def _file(file: str, blocks: Sequence[MapBlock], numbered: Numbered) -> Html:
    rows = []
    lines = list(_lines(blocks, numbered))
    for before, line, text in zip([None, *lines], lines, dedented(lines, numbered), strict=False):
        if before is not None and line != before + 1:
            rows.append(tag("tr", tag("th"), tag("td"), tag("td"), tag("td", "⋯", class_="gap")))
        rows.append(_line(line, text, blocks))
    heading = tag("p", tag("code", file), class_="where")
    return tag("div", heading, tag("div", tag("table", tag("tbody", *rows)), class_="source map scroll"))


def _lines(blocks: Sequence[MapBlock], numbered: Numbered) -> Iterator[int]:
    near = {
        line
        for block in blocks
        for line in range(
            block.place.line - CONTEXT_LINES,
            min(block.last_line, block.place.line + MOST_LINES) + CONTEXT_LINES + 1,
        )
    }
    return iter(sorted(line for line in near if str(line) in numbered))


def _line(line: int, text: str, blocks: Sequence[MapBlock]) -> Html:
    around = [block for block in blocks if block.place.line <= line <= block.last_line]
    inner = min(around, key=lambda block: (block.last_line - block.place.line, block.step_s), default=None)
    first = next((block for block in around if block.place.line == line), None)
    return tag(
        "tr",
        tag("th", str(line), scope="row"),
        tag("td", _bar(inner) if inner else NOTHING, class_="bar"),
        tag("td", show_ratio(first.speedup) if first else "", class_="number"),
        tag("td", text),
        class_="guilty" if first is not None else None,
    )


def _bar(block: MapBlock) -> Html:
    words = f"without {block.where}: {show_seconds(block.step_s)}, {block.gain}"
    return tag("i", style=f"width: {100 * min(block.freed_share, 1.0):.1f}%", title=words)
