from __future__ import annotations

import pytest

from flatout.errors import BadInput
from flatout.planner.forecast.segments import VARIABLES, find_segments

ON = "max_split_size_mb:128,expandable_segments:True"


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_environment_decides_and_is_named(variable: str) -> None:
    found = find_segments(environment={variable: ON})
    assert found.value and found.reason.startswith(f"{variable} ")


def test_the_older_variable_counts_only_where_the_other_is_not_set() -> None:
    both = {VARIABLES[0]: "expandable_segments:False", VARIABLES[1]: ON}
    assert not find_segments(environment=both).value


def test_without_a_setting_it_is_the_default() -> None:
    found = find_segments(environment={})
    assert (found.value, "default" in found.reason) == (False, True)


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_asked_for_counts_first(wanted: bool) -> None:
    found = find_segments(wanted, environment={VARIABLES[0]: ON})
    assert found.value is wanted and "expandable-segments was given" in found.reason


def test_a_probe_cannot_run_under_another_setting() -> None:
    assert find_segments(True, profile=True, environment={VARIABLES[1]: ON}).value
    with pytest.raises(BadInput, match="--expandable-segments cannot be measured"):
        find_segments(True, profile=True, environment={})


def test_the_environment_of_this_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not find_segments().value
    monkeypatch.setenv(VARIABLES[1], ON)
    assert find_segments().value
