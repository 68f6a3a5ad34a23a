from __future__ import annotations

from types import ModuleType

import pytest

from flatout.doctor.rule import SECTIONS, all_rules, read_rule, rule_by_code, title_of
from flatout.ground.errors import BadInput


def module(docstring: str | None, *, name: str = "flatout.doctor.rules.slow_thing") -> ModuleType:
    made = ModuleType(name, docstring)
    made.detect = lambda evidence: []
    return made


BODY = "".join(
    f"\n{head}\nSays of {head}. And\nmore.\n\n```python\nx = 1\n    y = 2\n```\n" for head in SECTIONS
)


def test_a_rule_is_read_from_its_module():
    rule = read_rule(module(f"FO999 slow-thing\n{BODY}"))
    assert (rule.code, rule.name) == ("FO999", "slow-thing")
    assert tuple(rule.sections) == SECTIONS
    assert rule.summary == "Says of What it does."


def test_code_in_a_section_keeps_its_lines():
    rule = read_rule(module(f"FO999 slow-thing\n{BODY}"))
    assert "```python\nx = 1\n    y = 2\n```" in rule.sections["Fix"]


def test_a_summary_is_one_line_though_the_sentence_is_wrapped():
    rule = read_rule(module(f"FO999 slow-thing\n{BODY}".replace("Says of What", "Says\nof What")))
    assert rule.summary == "Says of What it does."


@pytest.mark.parametrize(
    "docstring",
    [
        None,
        "slow-thing\n" + BODY,
        "FO99 slow-thing\n" + BODY,
        "FO999\n" + BODY,
        "FO999 fast-thing\n" + BODY,
        "FO999 slow-thing\n" + BODY.replace("\nEvidence\n", "\nProof\n"),
        "FO999 slow-thing\n" + BODY + "\nFix\nTwice.\n",
        "FO999 slow-thing\n" + BODY.partition("Says of Fix safety")[0],
    ],
)
def test_a_docstring_that_breaks_the_grammar_is_refused(docstring):
    with pytest.raises(BadInput, match="docstring"):
        read_rule(module(docstring))


def test_a_module_without_detect_is_refused():
    with pytest.raises(BadInput, match=r"no detect\(evidence\)"):
        read_rule(ModuleType("my_package.slow_thing", f"FO999 slow-thing\n{BODY}"))


def test_the_title_holds_code_and_name():
    title = title_of("FO301 tensor-created-in-loop\n\nMore.", arms=("knock-out",))
    assert (title.code, title.name, title.arms) == ("FO301", "tensor-created-in-loop", ("knock-out",))


@pytest.mark.parametrize(
    ("stated", "safety"),
    [("Exact: the same.", "exact"), ("Reordered if masked.", "reordered"), ("Depends.", "lossy")],
)
def test_a_finding_is_as_safe_as_the_docstring_says_unless_told(stated, safety):
    title = title_of(f"FO301 tensor-created-in-loop\n\nFix safety\n{stated}\n")
    assert title.finding(None, "slow", figures=()).safety == safety
    assert title.finding(None, "slow", figures=(), safety="lossy").safety == "lossy"


@pytest.mark.parametrize(
    ("stated", "fix"),
    [
        ("Take all `rows` at once:\n\n```diff\n-x\n+y\n```", "take all rows at once"),
        ("Read it\nrarely. Or never.", "read it rarely"),
        ("Join them first: `np.stack(x)`.", "join them first: np.stack(x)"),
        ("`F.pad(x, size)`:", "F.pad(x, size)"),
        ("```diff\n-x\n+y\n```", ""),
    ],
)
def test_a_finding_says_the_first_sentence_of_fix_unless_told(stated, fix):
    title = title_of(f"FO301 tensor-created-in-loop\n\nFix\n{stated}\n\nFix safety\nExact.\n")
    assert title.finding(None, "slow", figures=()).fix == fix
    assert title.finding(None, "slow", figures=(), fix="stop").fix == "stop"


def test_rules_are_found_by_code_in_any_case_and_by_name():
    rule = all_rules()[0]
    assert rule_by_code(rule.code) is rule_by_code(rule.code.lower()) is rule_by_code(rule.name) is rule


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(BadInput, match="'FO000'") as refused:
        rule_by_code("FO000")
    assert all(rule.code in refused.value.hint for rule in all_rules())


def test_every_rule_of_time_names_what_proves_it():
    """Others cost memory or accuracy, or no arm can take their cause away: counts and shares tell them."""
    without = {rule.name for rule in all_rules() if not rule.arms and not rule.code.startswith("FO9")}
    of_memory = {"graph-retained-across-steps", "near-out-of-memory", "allocator-fragmentation"}
    assert without == of_memory | {
        *("full-vocabulary-logits", "half-without-scaler", "graph-breaks", "straggler-rank"),
        *("hidden-library-sync", "sequential-variants", "slow-network"),
    }
    assert not without & {rule.name for rule in all_rules() if rule.needs_proof}


def test_every_fix_is_shown_before_and_after():
    for rule in all_rules():
        marks = {line[:1] for line in rule.example}
        assert {"-", "+"} <= marks <= {"-", "+", " ", ""}, rule.code
