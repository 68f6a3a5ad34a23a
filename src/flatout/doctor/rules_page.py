"""The page of rules in the documentation, made from the rules' own docstrings."""

from __future__ import annotations

from flatout.doctor.rule import Rule, all_rules

_INTRODUCTION = """# Rules

A rule reads the evidence of one job and answers with findings: a place, the figures it rests on, a
ceiling, and a fix. `flatout rules` prints the table, `flatout rules FO301` one entry. The first digit of
a code says where the time goes: 1 loading, 2 transfers and waits, 3 Python loops, 4 arithmetic, 5 memory,
6 compilation, 7 ranks, 8 outside the step, 9 training itself: what costs no time and is wrong all the same.

The ceiling is what one of the rule's arms measured: steps that ran differently, interleaved with ordinary
ones. Where no arm could run there is none, and the finding says why; where the arm showed no gain there is
no finding. Some times are measured where they pass, without an arm: *outside* the steps, at *epoch starts*,
in *compilation*, in *pauses* of the garbage collector, and by the GPU's own *kernels*."""


def markdown() -> str:
    """The whole page: a table of all rules, then one chapter each."""
    rules = all_rules()
    table = ["| Code | Name | What it does | Proved by |", "|---|---|---|---|"]
    table += [
        f"| [{rule.code}](#{anchor(rule)}) | {rule.name} | {rule.summary} | {', '.join(rule.arms)} |"
        for rule in rules
    ]
    chapters = [
        f"## {rule.code} {rule.name} {{#{anchor(rule)}}}\n\n{sections_markdown(rule)}" for rule in rules
    ]
    return "\n\n".join([_INTRODUCTION, "\n".join(table), *chapters]) + "\n"


def sections_markdown(rule: Rule, *, level: int = 3) -> str:
    """The sections of one rule, each under a heading of `level`."""
    return "\n\n".join(f"{'#' * level} {head}\n\n{text}" for head, text in rule.sections.items())


def anchor(rule: Rule) -> str:
    """The part of the page's address that leads to one rule: rules/#fo301."""
    return rule.code.lower()
