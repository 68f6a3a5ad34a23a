"""`flatout rules`: every rule in a table, or one rule as its docstring explains it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from flatout.doctor.rule import Rule


def rules(
    code: Annotated[
        str | None,
        typer.Argument(help="A code (FO301) or a name (tensor-created-in-loop).", show_default=False),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the rules, or explain one."""
    from flatout.doctor.rule import all_rules, rule_by_code

    chosen = all_rules() if code is None else (rule_by_code(code),)
    if json_output:
        document = {"format": "flatout-rules", "version": 1, "rules": [_entry(rule) for rule in chosen]}
        print(json.dumps(document, indent=2))
        return
    from rich.console import Console
    from rich.markdown import Markdown

    from flatout.doctor.rules_page import sections_markdown

    if code is None:
        Console().print(_table(chosen))
    else:
        (rule,) = chosen
        Console().print(Markdown(f"# {rule.code} {rule.name}\n\n{sections_markdown(rule, level=2)}"))


def _table(chosen: tuple[Rule, ...]) -> Table:
    from rich.table import Table

    table = Table("Code", "Name", "What it does", box=None, pad_edge=False, header_style="bold")
    for rule in chosen:
        table.add_row(rule.code, rule.name, rule.summary.replace("`", ""))
    return table


def _entry(rule: Rule) -> dict[str, Any]:
    return {"code": rule.code, "name": rule.name, "summary": rule.summary, "sections": rule.sections}
