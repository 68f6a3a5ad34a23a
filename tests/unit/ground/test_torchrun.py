"""The launcher's variables are read in one place, and without them a process is alone."""

from __future__ import annotations

import pytest

from flatout.ground.torchrun import Launch, read_launch


def test_without_a_launcher_a_process_is_the_first_of_one() -> None:
    assert read_launch({}) == Launch()
    assert Launch().is_first and not Launch().is_launched


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
STORE = {"MASTER_ADDR": "one", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,12]",
}


def test_torchruns_variables_are_read() -> None:
    found = read_launch({**SLURM, **TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert found == Launch(
        rank=3, num_ranks=8, local_rank=1, num_local_ranks=2, node=1, restarts=1, is_launched=True
    )
    assert not found.is_first
    joined = read_launch({**TORCHRUN, **STORE, "TORCHELASTIC_RUN_ID": "sums"})
    assert (joined.job, joined.meets_at) == ("sums", ("one", 29500))
    assert read_launch({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).job is None


def test_slurms_variables_mean_the_same_where_torchruns_are_absent() -> None:
    found = read_launch(SLURM)
    assert found == Launch(
        rank=5,
        num_ranks=9,
        local_rank=1,
        num_local_ranks=4,
        node=1,
        is_launched=True,
        job="slurm-4711",
        meets_at=("gpu07", 61_440 + 4711 % 4096),
    )
    assert read_launch({**SLURM, "SLURM_NODEID": "2"}).num_local_ranks == 1
    assert read_launch({**SLURM, "SLURM_RESTART_COUNT": "2"}).restarts == 2
    chosen = read_launch({**SLURM, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "5000"})
    assert chosen.meets_at == ("10.0.0.7", 5000)


def test_a_batch_script_of_slurm_is_alone() -> None:
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert read_launch({**batch, "SLURM_PROCID": "0"}) == Launch()


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a,b", "a"), ("n[1,3]", "n1"), ("r1-[003-4]-ib,x[1-2]", "r1-003-ib")]
)
def test_the_first_node_of_a_list_is_where_ranks_meet(nodes: str, first: str) -> None:
    meets_at = read_launch({**SLURM, "SLURM_STEP_NODELIST": nodes}).meets_at
    assert meets_at is not None and meets_at[0] == first


@pytest.mark.parametrize("text", ["", "one", "-1"])
def test_what_is_not_a_number_counts_as_not_set(text: str) -> None:
    assert read_launch({"RANK": text, "WORLD_SIZE": text}) == Launch()
