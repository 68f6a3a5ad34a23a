"""The output of a verb: messages on stderr, and on stdout either a JSON document or plain tables."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FINDINGS = 1  # the exit code of a verb that found something


def say(message: str) -> None:
    typer.echo(f"flatout: {message}", err=True)


def say_written(*paths: object) -> None:
    for path in paths:
        if path is not None:
            say(f"wrote {path}")


def print_document(name: str, value: object = None, **parts: object) -> None:
    """Print one versioned JSON document: the fields of `value`, then `parts`."""
    from flatout.ground.codec import encode

    fields = {} if value is None else encode(value)
    print_json({"format": name, "version": 1, **fields, **{key: encode(part) for key, part in parts.items()}})


def print_json(document: dict[str, Any], *, default: Callable[[Any], Any] | None = None) -> None:
    """Print JSON; NaN and infinity, which JSON lacks, become null."""
    from flatout.ground.codec import map_floats

    finite = map_floats(document, lambda number: number if math.isfinite(number) else None)
    sys.stdout.write(json.dumps(finite, indent=2, allow_nan=False, default=default) + "\n")


def plain_console() -> Console:
    """Make a console for text from jobs and drivers, whose brackets are not markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False)


def plain_table(*columns: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """Make a table without lines; cells of the `whole` columns stay on one line."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column in whole,
            overflow="fold",
        )
    return table


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Make a table of names and values, without a head."""
    from rich.text import Text

    from flatout.page.printable import printable

    table = plain_table("name", "value", whole=("name",))
    table.show_header = False
    for name, value in facts:
        table.add_row(Text(printable(name), style="dim"), Text(printable(value)))
    return table


def render_lines(console: Console, parts: Any) -> str:
    """Print rich parts into one text without trailing spaces."""
    from rich.text import Text

    with console.capture() as capture:
        for part in parts:
            # A line of a diff is never wrapped: console.print ignores the no_wrap of a Text.
            whole = isinstance(part, Text) and part.no_wrap is True
            if whole:
                console.print(part, highlight=False, no_wrap=True, overflow="ignore", crop=False)
            else:
                console.print(part, highlight=False)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def bullet(text: str, *, indent: int = 0) -> Any:
    """Make an item of a list, its lines aligned behind the dash."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from flatout.page.printable import printable

    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=1)
    grid.add_column(overflow="fold")
    grid.add_row("-", Text(printable(text)))
    return Padding(grid, (0, 0, 0, indent))
