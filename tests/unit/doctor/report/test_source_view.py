"""The source with bars: every line of a block, and nothing far from one."""

from __future__ import annotations

import re

import pytest

from flatout.doctor.causal_map import causal_map
from flatout.doctor.report.source_view import source_view
from tests.support import doctor as builders


def numbers(html: str) -> list[int]:
    return [int(number) for number in re.findall(r'<th scope="row">(\d+)</th>', html)]


def test_lines_of_blocks_and_their_neighbours_are_shown_with_bars() -> None:
    evidence = builders.with_map()
    html = source_view(causal_map(evidence), evidence.sources)
    assert numbers(html) == [*range(56, 63), 54, 55, 56]  # the model's, then the loop's
    assert len(re.findall(r'<i style="width', html)) == 7  # six lines of the model and one of the loop
    assert re.findall(r'class="number">([^<]+)<', html) == ["43.0×", "8.60×", "1.23×"]
    assert "<td>rows = []</td>" in html  # without the indentation that all lines share


@pytest.mark.parametrize("step_s", [8.55, 8.0])
def test_what_frees_next_to_nothing_or_is_noise_is_not_drawn(step_s: float) -> None:
    cheap = builders.knocked_out(builders.SYNC_LINE, last_line=55, step_s=step_s)
    evidence = builders.evidence(counterfactuals=(cheap,))
    assert source_view(causal_map(evidence), evidence.sources) == ""


def test_without_sources_there_is_nothing_to_draw() -> None:
    assert source_view(causal_map(builders.with_map()), {}) == ""
