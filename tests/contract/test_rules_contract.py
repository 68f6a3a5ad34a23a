"""What every rule of this package owes; the contract itself stands in flatout.testing.rules."""

from __future__ import annotations

from pathlib import Path

import flatout.doctor.rules
from flatout.doctor.examine import examine
from flatout.doctor.rule import all_rules
from flatout.testing.rules import RuleContract, check
from flatout.tuner.patches.patch import all_patches
from flatout.tuner.treatment import all_treatments
from tests.support.sick_job import SICK

FILES = [path for path in Path(flatout.doctor.rules.__path__[0]).rglob("*.py") if path.stem != "__init__"]


class TestRules(RuleContract):
    rules = all_rules()
    evidence = SICK


def test_every_file_is_a_rule():
    assert len(all_rules()) == len(FILES) >= 12


def test_a_job_with_many_faults_makes_the_rules_speak():
    assert sum(bool(rule.detect(SICK)) for rule in all_rules()) >= 12
    by_code = {rule.code: rule for rule in all_rules()}
    for finding in examine(SICK):
        check(finding, by_code[finding.code])


def test_what_tune_can_try_is_a_treatment_or_a_patch_that_answers():
    known = {**all_treatments(), **all_patches()}
    named = {(rule.code, name) for rule in all_rules() for name in rule.tune}
    assert {name for _code, name in named} <= set(known)
    assert {(code, patch.name) for patch in all_patches().values() for code in patch.answers} <= named
    assert "many-parameter-groups" in all_treatments()["merged-groups"].rules
