"""`flatout rules`: every rule in a table, or one rule as its docstring explains it."""

from __future__ import annotations

from typing import Annotated

import typer

from flatout.cli import flags
from flatout.cli.output import plain_console, plain_table, print_document


def rules(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE", help="A code (FO301) or a name (tensor-created-in-loop).", show_default=False
        ),
    ] = None,
    json_output: flags.Json = False,
) -> None:
    """List the rules, or explain one.

    \b
    Examples:
      flatout rules
      flatout rules FO301
    """
    from flatout.doctor.rule import all_rules, rule_by_code

    chosen = all_rules() if code is None else (rule_by_code(code),)
    if json_output:
        fields = ("code", "name", "summary", "sections")
        listed = [{field: getattr(rule, field) for field in fields} for rule in chosen]
        print_document("flatout-rules", rules=listed)
        return
    if code is None:
        table = plain_table("Code", "Name", "What it does")
        for rule in chosen:
            table.add_row(rule.code, rule.name, rule.summary.replace("`", ""))
        plain_console().print(table)
        return
    from rich.markdown import Markdown

    from flatout.doctor.rules_page import sections_markdown

    (rule,) = chosen
    plain_console().print(Markdown(f"# {rule.code} {rule.name}\n\n{sections_markdown(rule, level=2)}"))
