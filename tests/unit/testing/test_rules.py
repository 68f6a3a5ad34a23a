"""The contract holds a good rule and catches mistakes; a package adds a rule without editing ours."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

from flatout.doctor.finding import Finding
from flatout.doctor.rule import GROUP, read_rule
from flatout.measure.evidence_file import save_evidence
from flatout.testing.rules import RuleContract
from tests.support.sick_job import SICK

ROOT = Path(__file__).resolve().parents[3]
SLOW_PRINT = '''"""XY101 slow-print

What it does
Finds a job that prints in every step, which nobody reads.

Why it costs
A terminal takes milliseconds for a line.

Evidence
The rest of the step is at least a tenth of it.

Fix
Print every hundredth step.

Fix safety
Exact: the numbers stay the same.
"""

from flatout.doctor.ceilings import share_of
from flatout.doctor.rule import title_of

RULE = title_of(__doc__)


def detect(evidence):
    share = share_of(evidence.phase_s("forward"), evidence.step_s)
    if share is None or share < 0.1:
        return []
    figures = [f"{share:.0%} of the step"]
    fix = "print every hundredth step"
    return RULE.proven(
        evidence, None, "it prints", arms=("cached",), figures=figures, share=share, fix=fix, safety="exact"
    )
'''


def slow_print(source: str = SLOW_PRINT) -> ModuleType:
    module = ModuleType("my_package.slow_print")
    exec(compile(source, "slow_print.py", "exec"), module.__dict__)
    return module


class TestSlowPrint(RuleContract):
    rules = (read_rule(slow_print()),)
    evidence = SICK
    num_examples = 50


def test_the_sick_job_makes_it_speak() -> None:
    (finding,) = TestSlowPrint.rules[0].detect(SICK)
    assert finding.share == pytest.approx(0.5, abs=0.02)
    assert finding.ceiling is not None and finding.ceiling.speedup == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "caught_by"),
    [
        (SLOW_PRINT.replace("Finds a job", "Looks for a job"), "test_the_documentation_is_whole"),
        (SLOW_PRINT.replace("Exact: the", "The"), "test_the_documentation_is_whole"),
        (
            SLOW_PRINT.replace("share is None or share < 0.1", "share is not None and share < 0.1").replace(
                "{share:.0%}", "some"
            ),
            "test_an_empty_job_has_no_findings",
        ),
        (
            SLOW_PRINT.replace('"it prints"', '""'),
            "test_a_job_that_has_the_fault_makes_the_rule_speak",
        ),
    ],
)
def test_a_mistake_is_caught(wrong: str, caught_by: str) -> None:
    class Wrong(RuleContract):
        rules = (read_rule(slow_print(wrong)),)
        evidence = SICK

    with pytest.raises((AssertionError, TypeError)):
        getattr(Wrong(), caught_by)()


@pytest.fixture
def not_made_small() -> Iterator[None]:
    """Let hypothesis end with the first counterexample that it finds."""
    usual = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("found", hypothesis.settings(phases=[hypothesis.Phase.generate]))
    hypothesis.settings.load_profile("found")
    yield
    hypothesis.settings.load_profile(usual)


@pytest.mark.usefixtures("not_made_small")
def test_a_rule_that_breaks_on_odd_evidence_is_caught() -> None:
    def breaks(evidence: Any) -> list[Finding]:
        return [] if evidence.step_s else [1 / evidence.step_s for _ in evidence.sites]

    class Wrong(RuleContract):
        rules = (dataclasses.replace(TestSlowPrint.rules[0], detect=breaks),)
        evidence = SICK

    with pytest.raises((ZeroDivisionError, TypeError)):
        Wrong().test_any_evidence_gives_findings_that_can_be_shown_and_saved()


def test_a_slow_machine_fails_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    settings = hypothesis.settings

    def note(**options: Any) -> hypothesis.settings:
        asked.update(options)
        return settings(**{**options, "max_examples": 1})

    monkeypatch.setattr(hypothesis, "settings", note)
    TestSlowPrint().test_any_evidence_gives_findings_that_can_be_shown_and_saved()
    assert asked["deadline"] is None
    assert hypothesis.HealthCheck.too_slow in asked["suppress_health_check"]


def test_a_package_adds_a_rule_by_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "my_rules").mkdir()
    (tmp_path / "my_rules" / "__init__.py").write_text("")
    (tmp_path / "my_rules" / "slow_print.py").write_text(SLOW_PRINT)
    metadata = tmp_path / "my_rules-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-rules\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nslow-print = my_rules.slow_print\n")
    save_evidence(SICK, tmp_path / "sick.json")
    for name in ("planted", "clean"):  # nothing is marked as guilty: what the rules say of this job is wrong
        script = tmp_path / "planted" / "slow_print" / f"{name}.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("print('no step')\n")
    script.with_name("evidence").mkdir()
    save_evidence(replace(SICK, sources={}), script.with_name("evidence") / "planted_cpu.json.gz")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from pathlib import Path\n"
        "from flatout.doctor.examine import examine\n"
        "from flatout.measure.evidence_file import load_evidence\n"
        f"found = examine(load_evidence(Path({str(tmp_path / 'sick.json')!r})))\n"
        "print('XY101' in [finding.code for finding in found])\n"
        f"sys.path.insert(0, {str(ROOT / 'tests' / 'planted')!r})\n"
        "import score\n"
        f"score.main(['--replay', '--planted', {str(tmp_path / 'planted')!r}])\n"
        "sys.argv = ['flatout', 'rules']\n"
        "from flatout.cli.app import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("True\n"), done.stderr
    assert "wrong" in done.stdout and "slow-print at line None" in done.stdout
    assert "XY101" in done.stdout and "XY of another package" in done.stdout and "FO301" in done.stdout

    (tmp_path / "my_rules" / "slow_print.py").write_text(SLOW_PRINT.replace("XY101", "FO301"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "has the code FO301 of tensor-created-in-loop" in done.stderr
