"""Every rule has its page, whole and harmless."""

from __future__ import annotations

import re

from flatout.doctor.rule import Rule, all_rules
from flatout.monitor.web.rule_page import rule_page


def test_every_rule_has_a_page_with_its_sections_and_code() -> None:
    rules = all_rules()
    assert len(rules) >= 12
    for rule in rules:
        page = rule_page(rule)
        assert f"<title>{rule.code} {rule.name}</title>" in page
        assert page.count("<h2>") == len(rule.sections)
        assert "```" not in page
        assert page.count("<pre>") == sum(text.count("```") // 2 for text in rule.sections.values())
        assert not re.search(r'(?:src|href)="(?!\.\./)', page)


def test_text_never_becomes_markup() -> None:
    rule = Rule(
        code="FO999",
        name="x",
        sections={"Fix": "a `<b>`\n\n```python\nif a < b:\n    pass\n```\n\n<script>"},
        detect=lambda evidence: [],
    )
    page = rule_page(rule)
    assert "<code>&lt;b&gt;</code>" in page
    assert "<pre><code>if a &lt; b:\n    pass</code></pre>" in page
    assert "<p>&lt;script&gt;</p>" in page
