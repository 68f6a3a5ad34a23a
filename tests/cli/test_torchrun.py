"""Several processes of one job: the ranks agree on the plan and speak with one voice."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest

from flatout.measure.evidence import Evidence
from flatout.measure.evidence_file import load_evidence
from tests.support import slow_link
from tests.support.cli import BRIEFLY, SCRIPTS
from tests.support.measure import BRIEF, flatout
from tests.support.warm_python import warm


def two_agents(*arguments: str, folder: Path) -> tuple[str, Evidence]:
    """Two agents of torchrun here, as on two machines that share no folder; all output, and the evidence."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = []
    for node in ("a", "b"):
        (folder / node).mkdir()
        launch = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--no-python", "--rdzv-id", "nodes"]
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        program, *rest = [*launch, *flatout(BRIEF), *BRIEFLY, "--save", str(folder / node / "evidence.json")]
        agents.append(
            subprocess.Popen(
                [str(warm().bin / program), *rest, *arguments],
                cwd=SCRIPTS,
                env=warm().environment(TMPDIR=str(folder / node)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [agent.communicate()[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    (path,) = folder.glob("*/evidence.json")
    return "".join(said), load_evidence(path)


def torchrun(*arguments: str, save: Path) -> tuple[subprocess.CompletedProcess[str], Evidence]:
    launch = ("torchrun", "--standalone", "--nproc-per-node", "2", "--no-python")
    done = warm().run(*launch, *flatout(BRIEF), *BRIEFLY, "--save", save, *arguments, cwd=SCRIPTS)
    assert done.returncode == 0, done.stderr
    return done, load_evidence(save)


def test_two_nodes_become_one_evidence_and_the_slower_one_is_named(tmp_path: Path) -> None:
    said, evidence = two_agents("ranks.py", "slow", "1", folder=tmp_path)
    assert evidence.job.world_size == 2
    assert [rank.rank for rank in evidence.ranks] == [0, 1]
    assert [rank.ended for rank in evidence.ranks] == ["measured", "measured"]
    assert evidence.job.rank == 1
    assert {step.arm for step in evidence.steps} >= {"real", "count", "kernels", "cached", "half"}
    host = socket.gethostname()
    assert [(rank.host, rank.node) for rank in evidence.ranks] == [(host, 0), (host, 1)]
    assert evidence.network is not None and evidence.network.num_ranks == 2
    assert all(rank.exposed_share is not None for rank in evidence.ranks)
    rest_s = [rank.phases_s["rest"] for rank in evidence.ranks]
    assert rest_s[1] > rest_s[0]
    assert f"Rank 1 on {host} (node 1) is the straggler" in " ".join(said.split())
    # what they exchange is much, and nothing hides it
    without = evidence.counterfactual("unsynchronised")
    assert without is not None and without.speedup > 1
    assert "FO702" in said
    # the one voice: rank 0's
    assert said.count("Evidence:") == 1
    assert said.count("flatout: count: ") == 1
    assert [path.name for path in tmp_path.glob("*/*flatout*")] == []
    # both ranks left at the same step
    ended = sorted(line for line in said.splitlines() if " ended at step " in line)
    assert [line.split()[:2] for line in ended] == [["rank", "0"], ["rank", "1"]]
    assert ended[0].split()[2:] == ended[1].split()[2:]


@pytest.mark.skipif(not slow_link.may_have_cable(), reason="needs root, for a network of namespaces")
def test_a_link_slower_than_its_cards_is_measured_and_named(tmp_path: Path) -> None:
    """A cable of 100 Mb/s between cards of 10 Gb/s: an all-reduce cannot be faster than the cable."""
    command = ["--no-python", *flatout(BRIEF), *BRIEFLY, "--save", str(tmp_path / "evidence.json")]
    done = slow_link.two_agents(
        *command, str(SCRIPTS / "ranks.py"), folder=tmp_path, rate="100mbit", card_megabits=10_000
    )
    assert done.returncode == 0, done.stdout
    evidence = load_evidence(tmp_path / "evidence.json")
    assert [(rank.host, rank.link) for rank in evidence.ranks] == [("node-1", "eth1"), ("node-2", "eth1")]
    assert evidence.network is not None and evidence.network.bus_bytes_per_s is not None
    assert 0 < evidence.network.bus_bytes_per_s < 1.1 * 100e6 / 8
    said = " ".join(done.stdout.split())
    assert "FO703 slow-network" in said
    assert re.search(r"an all-reduce over 2 nodes reaches [01]\.\d % of the speed of their links", said)


def test_ranks_that_fail_on_half_a_batch_meet_again_without_it(tmp_path: Path) -> None:
    done, evidence = torchrun("ranks.py", "half", "both", save=tmp_path / "evidence.json")
    assert [rank.ended for rank in evidence.ranks] == ["measured", "measured"]
    assert {step.arm for step in evidence.steps} >= {"real", "cached"}
    assert evidence.counterfactual("half") is None
    (reason,) = [arm.reason for arm in evidence.arms_not_run if arm.label == "half"]
    assert reason.startswith("the script failed under it: RuntimeError: ")
    assert "Traceback" not in done.stderr
