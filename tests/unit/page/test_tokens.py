"""Colours by name."""

from __future__ import annotations

import re

from flatout.page.tokens import LIGHT


def test_every_token_is_a_colour() -> None:
    assert len(LIGHT) > 20
    assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) for colour in LIGHT.values())
    assert {"paper", "ink", "soft", "line", "accent", "wait", "rest"} <= set(LIGHT)
