"""Several processes of one job: the ranks agree on the plan and speak with one voice."""

from __future__ import annotations

import subprocess
from pathlib import Path

from flatout.measure.evidence import Evidence
from flatout.measure.evidence_file import load_evidence
from tests.support.cli import BRIEFLY, SCRIPTS
from tests.support.measure import BRIEF, flatout
from tests.support.warm_python import warm


def torchrun(*arguments: str, save: Path) -> tuple[subprocess.CompletedProcess[str], Evidence]:
    launch = ("torchrun", "--standalone", "--nproc-per-node", "2", "--no-python")
    done = warm().run(*launch, *flatout(BRIEF), *BRIEFLY, "--save", save, *arguments, cwd=SCRIPTS)
    assert done.returncode == 0, done.stderr
    return done, load_evidence(save)


def test_two_ranks_become_one_evidence_and_the_slower_one_is_named(tmp_path: Path) -> None:
    done, evidence = torchrun("ranks.py", "slow", "1", save=tmp_path / "evidence.json")
    assert evidence.job.world_size == 2
    assert [rank.rank for rank in evidence.ranks] == [0, 1]
    assert [rank.ended for rank in evidence.ranks] == ["measured", "measured"]
    assert evidence.job.rank == 1
    assert {step.arm for step in evidence.steps} >= {"real", "count", "kernels", "cached", "half"}
    rest_s = [rank.phases_s["rest"] for rank in evidence.ranks]
    assert rest_s[1] > rest_s[0]
    assert "Rank 1 is the straggler" in done.stdout
    # the one voice: rank 0's
    assert done.stdout.count("Evidence:") == 1
    assert done.stderr.count("flatout: count: ") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["evidence.json"]
    # both ranks left at the same step
    ended = sorted(line for line in done.stdout.splitlines() if " ended at step " in line)
    assert [line.split()[:2] for line in ended] == [["rank", "0"], ["rank", "1"]]
    assert ended[0].split()[2:] == ended[1].split()[2:]


def test_ranks_that_fail_on_half_a_batch_meet_again_without_it(tmp_path: Path) -> None:
    done, evidence = torchrun("ranks.py", "half", "both", save=tmp_path / "evidence.json")
    assert [rank.ended for rank in evidence.ranks] == ["measured", "measured"]
    assert {step.arm for step in evidence.steps} >= {"real", "cached"}
    assert evidence.counterfactual("half") is None
    (reason,) = [arm.reason for arm in evidence.arms_not_run if arm.label == "half"]
    assert reason.startswith("the script failed under it: RuntimeError: ")
    assert "Traceback" not in done.stderr
