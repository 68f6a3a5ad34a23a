from __future__ import annotations

import itertools
import re

from flatout.doctor.rule import SECTIONS, all_rules
from flatout.doctor.rules_page import anchor, markdown, sections_markdown


def test_every_rule_has_a_row_and_a_chapter():
    page = markdown()
    for rule in all_rules():
        assert f"| [{rule.code}](#{anchor(rule)}) | {rule.name} | {rule.summary} |" in page
        assert f"## {rule.code} {rule.name} {{#{anchor(rule)}}}\n\n{sections_markdown(rule)}" in page


def test_headings_do_not_skip_a_level():
    page = re.sub(r"```.*?```", "", markdown(), flags=re.DOTALL)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", page, flags=re.MULTILINE)]
    assert levels[0] == 1
    assert levels.count(2) == len(all_rules())
    assert levels.count(3) == len(all_rules()) * len(SECTIONS)
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_code_blocks_are_closed():
    assert markdown().count("```") % 2 == 0
