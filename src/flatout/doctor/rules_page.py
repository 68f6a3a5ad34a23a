"""The page of rules in the documentation, generated from the rules' own docstrings."""

from __future__ import annotations

from flatout.doctor.rule import Rule, all_rules, families

_INTRODUCTION = """# Rules

A rule reads the evidence of one job and reports findings: a place, the figures behind it, a ceiling, and a
fix. `flatout rules` prints the table, `flatout rules FO301` one entry. The first digit of a code says where
the time goes.

One of the rule's arms measures the ceiling: steps that ran differently, interleaved with ordinary ones. If
no arm could run, there is no ceiling, and the finding says why; if the arm showed no gain, there is no
finding. Rules marked *only if proven* suggest another way to do the same work, and only an arm can tell
whether it is faster: they report nothing unless the lower end of its interval is above 1.03×.

Some times are measured directly, without an arm: *outside* the steps, at *epoch starts*, in *compilation*,
in *pauses* of the garbage collector, and in the GPU's own *kernels*."""


_LEFT_OUT = {
    "too few workers": "[loader-bound](#fo105) names the number that was measured to be faster, or how many "
    "the cores allow",
    "tokenising, or decoding images at full size, for every sample": "[slow-samples](#fo106) at the line; in "
    "the training loop [costly-block](#fo207). Only the job knows how large an image it needs",
    "a slow first batch, large shuffle buffers": "[epoch-start-stall](#fo803) and "
    "[respawned-workers](#fo102), if it recurs every epoch; one-off costs are in no share",
    "large Python lists in workers": "they cost host memory, which processes share page by page and which "
    "therefore cannot be counted reliably; no arm can remove them",
    "`@torch.jit.script` under `torch.compile`": "[graph-breaks](#fo602), at the line that calls it",
    "evaluation without `torch.no_grad()`": "[evaluation-dominates](#fo801), the patch `no-grad-evaluation` "
    "of `flatout tune`; inside a step [grad-enabled-inference](#fo405)",
    "`cudnn.benchmark` off": "once chosen for a shape, an algorithm stays chosen, so steps with and without "
    "cannot take turns; `flatout tune` tries it in separate runs",
    "`cudnn.benchmark` on, with shapes that change": "the search happens in steps that are left out of the "
    "mean and listed as time outside the step",
    "unused memory": "costs nothing by itself: [launch-bound-step](#fo305) says whether a larger batch is "
    "free, and `flatout plan` which one fits",
    "logits of positions that no loss reads": "[full-vocabulary-logits](#fo506) names the tensor if it is "
    "large; only the labels say which positions a loss skips, and they change with the batch",
    "evaluations that keep logits on the device": "memory is measured between training steps",
    "a vocabulary that is not a multiple of 64": "[misaligned-dimensions](#fo409), if padding gains time",
    "a GPU that nothing uses": "a diagnosis sees the processes of one job; `flatout watch` sees the machine",
    "ranks that read the same samples": "ranks would have to compare the samples they read, and equal "
    "batches can be intended; a diagnosis compares only their times",
    "gradients exchanged after every micro-batch": "[exposed-communication](#fo702), whose fix says how to "
    "exchange them less often; `flatout tune` tries it as `no-sync`",
    "`find_unused_parameters` without need": "a few dozen steps cannot show that every parameter is always "
    "used, and without the flag the first exception ends the job",
    "a sharded model that would fit on one GPU": "[exposed-communication](#fo702) shows what sharding costs, "
    "and `flatout plan` what fits",
    "a per-batch schedule that is stepped once per epoch": "a diagnosis does not know how many epochs will "
    "follow",
    "models that read padding": "the effect of padding would have to be distinguished from dropout and "
    "rounding",
}


def markdown() -> str:
    """Render the whole page: a table of all rules, then one chapter each."""
    rules = all_rules()
    table = ["| Code | Name | What it does | Proved by | Reported |", "|---|---|---|---|---|"]
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
    head = "Causes that people report but that have no rule of their own:\n"
    return "\n".join(
        [
            head,
            "| cause | which rule reports it, or why none does |",
            "|---|---|",
            *(f"| {cause} | {why} |" for cause, why in _LEFT_OUT.items()),
        ]
    )


def sections_markdown(rule: Rule, *, level: int = 3) -> str:
    """Render the sections of one rule, each under a heading of `level`."""
    return "\n\n".join(f"{'#' * level} {head}\n\n{text}" for head, text in rule.sections.items())


def speaks(rule: Rule) -> str:
    """Say when a rule reports what it sees."""
    if rule.needs_proof:
        return "only if proven"
    return "unless refuted" if rule.arms else "when seen"


def anchor(rule: Rule) -> str:
    """Return the page anchor of one rule: rules/#fo301."""
    return rule.code.lower()
