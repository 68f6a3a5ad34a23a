"""The page of rules in the documentation, made from the rules' own docstrings."""

from __future__ import annotations

from flatout.doctor.rule import Rule, all_rules, families

_INTRODUCTION = """# Rules

A rule reads the evidence of one job and answers with findings: a place, the figures it rests on, a
ceiling, and a fix. `flatout rules` prints the table, `flatout rules FO301` one entry. The first digit of
a code says where the time goes.

The ceiling is what one of the rule's arms measured: steps that ran differently, interleaved with ordinary
ones. Where no arm could run there is none, and the finding says why; where the arm showed no gain there is
no finding. Rules marked *only if proven* advise another way to do the same work, and whether that is faster
only an arm can tell: they are silent unless the lower end of its interval is above 1.03×.

Some times are measured where they pass, without an arm: *outside* the steps, at *epoch starts*, in
*compilation*, in *pauses* of the garbage collector, and by the GPU's own *kernels*."""


_LEFT_OUT = {
    "`@torch.jit.script` under `torch.compile`": "[graph-breaks](#fo602), at the line that calls it",
    "evaluation without `torch.no_grad()`": "[evaluation-dominates](#fo801), the patch `no-grad-evaluation` "
    "of `flatout tune`; inside a step [grad-enabled-inference](#fo405)",
    "`cudnn.benchmark` off": "an algorithm that was chosen for a shape stays chosen, so that steps with and "
    "without cannot take turns; `flatout tune` tries it in runs of its own",
    "`cudnn.benchmark` on, with shapes that change": "the search is in steps that are left out of the mean, "
    "and listed as time outside the step",
    "memory that lies idle": "costs nothing by itself: [launch-bound-step](#fo305) says where a larger batch "
    "is free, `flatout plan` which one fits",
    "logits of positions that no loss reads": "[full-vocabulary-logits](#fo506) names the tensor, where it "
    "is large; which positions a loss skips only its labels tell, and they change with the batch",
    "a vocabulary that is no multiple of 64": "what padding gains depends on the kernel that is chosen, and "
    "no arm can change the shape of a weight under way",
}


def markdown() -> str:
    """The whole page: a table of all rules, then one chapter each."""
    rules = all_rules()
    table = ["| Code | Name | What it does | Proved by | Speaks |", "|---|---|---|---|---|"]
    for family, members in families(rules).items():
        table.append(f"| **{family.partition(' ')[0]}** | **{family.partition(' ')[2]}** | | | |")
        table += [
            f"| [{rule.code}](#{anchor(rule)}) | {rule.name} | {rule.summary} | {', '.join(rule.arms)} "
            f"| {speaks(rule)} |"
            for rule in members
        ]
    chapters = [
        f"## {rule.code} {rule.name} {{#{anchor(rule)}}}\n\n{sections_markdown(rule)}" for rule in rules
    ]
    return "\n\n".join([_INTRODUCTION, "\n".join(table), _without_a_rule(), *chapters]) + "\n"


def _without_a_rule() -> str:
    head = "Causes that people report and that have no rule of their own:\n"
    return "\n".join(
        [
            head,
            "| cause | who speaks of it, or why nobody |",
            "|---|---|",
            *(f"| {cause} | {why} |" for cause, why in _LEFT_OUT.items()),
        ]
    )


def sections_markdown(rule: Rule, *, level: int = 3) -> str:
    """The sections of one rule, each under a heading of `level`."""
    return "\n\n".join(f"{'#' * level} {head}\n\n{text}" for head, text in rule.sections.items())


def speaks(rule: Rule) -> str:
    """When a rule speaks of what it sees, in words."""
    if rule.needs_proof:
        return "only if proven"
    return "unless refuted" if rule.arms else "where it is seen"


def anchor(rule: Rule) -> str:
    """The part of the page's address that leads to one rule: rules/#fo301."""
    return rule.code.lower()
