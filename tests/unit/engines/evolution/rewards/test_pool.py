"""A pool scores everything that can be scored, whatever the reward does to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from flatout.engines.evolution.rewards import pool as pool_module
from flatout.engines.evolution.rewards.bleu import Bleu
from flatout.engines.evolution.rewards.kinds import AnsweredRow, ExactMatch, Reward
from flatout.engines.evolution.rewards.pool import MOST_ROWS, START_LIMIT_S, RewardPool, RewardScores
from flatout.ground.errors import BadInput, ChildDied

TIMEOUT_S = 60.0  # never reached: everything but a hang takes microseconds


def misbehaves(completion: str, answer: Mapping[str, str], /) -> float:
    """Does what the completion says."""
    match completion:
        case "raise":
            raise ValueError("as asked")
        case "hang":
            while True:
                pass
        case "block":
            threading.Event().wait()
        case "exit":
            os._exit(3)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "nan":
            return float("nan")
        case "print":
            print("printed by a reward")
        case "pid":
            return os.getpid()
    return float(answer["value"])


class Together:
    """Scores rows together, unless one of them says what to do instead."""

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        return misbehaves(completion, answer)

    def score_rows(self, rows: list[AnsweredRow]) -> list[float]:
        return [misbehaves(*row) + 100.0 for row in rows]


class Unloadable:
    """A reward whose module cannot be imported in another process."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return float, ("not a number",)

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        return 0.0


class CheapPid:
    """Says in which process it runs."""

    cheap: ClassVar[bool] = True

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        return os.getpid()


def rows_of(*completions: str) -> list[AnsweredRow]:
    return [(completion, {"value": str(index)}) for index, completion in enumerate(completions)]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(misbehaves, workers=2, timeout_s=TIMEOUT_S) as shared:
        yield shared
        processes = reward_processes()
        assert processes
    assert not [process for process in processes if process.is_running()]


def reward_processes() -> list[psutil.Process]:
    own = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [process for process in own if "spawn_main" in " ".join(process.cmdline())]


def check(scores: RewardScores, kinds: dict[int, str], *, num_rows: int) -> None:
    assert {failure.index: failure.kind for failure in scores.failures} == kinds
    expected = tuple(None if index in kinds else float(index) for index in range(num_rows))
    assert scores.values == expected


def test_scores_come_back_in_the_order_of_their_rows(pool: RewardPool) -> None:
    num_rows = 3 * MOST_ROWS * 16 + 5
    check(pool.score(rows_of(*["fine"] * num_rows)), {}, num_rows=num_rows)
    check(pool.score(rows_of("fine")), {}, num_rows=1)
    assert pool.score([]) == RewardScores(values=(), failures=())


def test_work_is_done_elsewhere_and_by_processes_that_stay(pool: RewardPool) -> None:
    processes = [set(pool.score(rows_of(*["pid"] * 64)).values) for _ in range(2)]
    assert os.getpid() not in processes[0] | processes[1]
    assert len(processes[0] | processes[1]) <= 2


def test_a_reward_that_raises_costs_its_row(pool: RewardPool) -> None:
    scores = pool.score(rows_of("fine", "raise", "fine", "nan", "raise"))
    check(scores, {1: "raised", 3: "invalid", 4: "raised"}, num_rows=5)
    assert scores.summary() == (
        f"3 of 5 rewards failed (2 raised, 1 invalid); row 1 raised: {scores.failures[0].message}"
    )
    assert "ValueError: as asked" in scores.failures[0].message


@pytest.mark.parametrize("end", ["exit", "segfault"])
def test_a_reward_that_ends_its_process_costs_its_row(pool: RewardPool, end: str) -> None:
    num_rows = 100
    completions = ["fine"] * num_rows
    completions[40] = end
    completions[41] = "raise"
    scores = pool.score(rows_of(*completions))
    check(scores, {40: "died", 41: "raised"}, num_rows=num_rows)
    code = {"exit": "3", "segfault": "-11"}[end]
    assert scores.failures[0].message == f"its process ended with code {code}"
    check(pool.score(rows_of(*["fine"] * num_rows)), {}, num_rows=num_rows)


def test_a_process_that_takes_too_long_to_start_is_told_by_the_limit_of_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "START_LIMIT_S", 0.0)
    said = pytest.raises(ChildDied, match="did not start: no answer within 0 s")
    with RewardPool(misbehaves, workers=1, timeout_s=TIMEOUT_S) as own, said:
        own.score(rows_of("fine"))


@pytest.mark.timeout(START_LIMIT_S / 2)  # the limit of a call is not that of a start
def test_a_reward_that_hangs_costs_its_row() -> None:
    num_rows = 60
    completions = ["fine"] * num_rows
    completions[1], completions[50] = "hang", "block"
    with RewardPool(misbehaves, workers=2, timeout_s=2.0) as impatient:
        scores = impatient.score(rows_of(*completions))
        check(scores, {1: "timeout", 50: "timeout"}, num_rows=num_rows)
        assert scores.failures[0].message == "no score after 2 s"
        check(impatient.score(rows_of(*["fine"] * num_rows)), {}, num_rows=num_rows)


@pytest.mark.timeout(START_LIMIT_S / 2)  # the limit of a call is not that of a start
def test_rows_scored_together_that_hang_are_scored_one_by_one() -> None:
    with RewardPool(Together(), workers=1, timeout_s=1.0) as impatient:
        scores = impatient.score([*rows_of("fine"), ("hang", {})])
    assert [failure.kind for failure in scores.failures] == ["timeout"]
    assert scores.values[1] is None and scores.values[0] in (0.0, 100.0)


def test_every_row_may_fail(pool: RewardPool) -> None:
    scores = pool.score(rows_of(*["exit"] * 6))
    check(scores, dict.fromkeys(range(6), "died"), num_rows=6)


def test_a_worker_that_is_killed_between_lists_is_replaced(pool: RewardPool) -> None:
    pool.score(rows_of(*["fine"] * 64))
    for process in reward_processes():
        process.kill()
        process.wait()
    check(pool.score(rows_of(*["fine"] * 64)), {}, num_rows=64)


def test_what_a_reward_prints_stays_out_of_the_results(capfd: pytest.CaptureFixture[str]) -> None:
    with RewardPool(misbehaves, workers=1, timeout_s=TIMEOUT_S) as own:
        check(own.score(rows_of("print")), {}, num_rows=1)
    captured = capfd.readouterr()
    assert "printed" not in captured.out and "printed by a reward" in captured.err


def test_rows_scored_together() -> None:
    """A chunk that raises is scored row by row, so that the other rows keep their scores."""
    with RewardPool(Together(), workers=1, timeout_s=TIMEOUT_S) as together:
        assert together.score(rows_of("fine", "fine")).values == (100.0, 101.0)
        completions = ["fine"] * 32  # chunks of four
        completions[0], completions[5], completions[30] = "exit", "raise", "nan"
        scores = together.score(rows_of(*completions))
    assert {f.index: f.kind for f in scores.failures} == {0: "died", 5: "raised", 30: "invalid"}
    bad_chunks = {0, 1}
    for index, value in enumerate(scores.values):
        if completions[index] == "fine":
            assert value == index + (0.0 if index // 4 in bad_chunks else 100.0)


def test_bleu_in_processes_equals_bleu_here() -> None:
    rows = [(f"the cat number {i % 7} sat", {"target": f"the cat number {i % 5} sat"}) for i in range(300)]
    with RewardPool(Bleu(), workers=2, timeout_s=60.0) as bleu:
        scores = bleu.score(rows)
    assert scores.values == pytest.approx(Bleu().score_rows(rows), abs=1e-12)
    assert len(set(scores.values)) > 1


def test_a_cheap_reward_is_called_here_and_starts_no_process() -> None:
    before = len(reward_processes())
    with RewardPool(CheapPid(), workers=2, timeout_s=TIMEOUT_S) as cheap:
        cheap.start()
        assert set(cheap.score(rows_of("a", "b")).values) == {float(os.getpid())}
        assert len(reward_processes()) == before
    with RewardPool(ExactMatch(), workers=1, timeout_s=TIMEOUT_S) as exact:
        scores = exact.score([("a", {"answer": "a"}), ("a", {}), ("b", {"answer": "a"})])
    assert scores.values == (1.0, None, 0.0)
    assert scores.failures[0].index == 1 and "no 'answer'" in scores.failures[0].message


@pytest.mark.parametrize(("workers", "timeout_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_pool_that_could_never_score_is_refused(workers: int, timeout_s: float) -> None:
    with pytest.raises(BadInput):
        RewardPool(ExactMatch(), workers=workers, timeout_s=timeout_s)


def test_a_reward_that_cannot_travel_is_refused_at_once() -> None:
    def local(completion: str, answer: Mapping[str, str], /) -> float:
        return 0.0

    with pytest.raises(BadInput, match=r"package\.module:function"):
        RewardPool(local, workers=1, timeout_s=TIMEOUT_S)


def test_a_reward_that_does_not_arrive_is_an_error_of_the_set_up() -> None:
    reward: Reward = Unloadable()
    with (
        RewardPool(reward, workers=2, timeout_s=TIMEOUT_S) as pool,
        pytest.raises(ChildDied, match="could not convert string to float"),
    ):
        pool.score(rows_of("a"))


# The life and death of a whole run

RUN = """
import os, subprocess, sys
sys.path[:0] = {path!r}
from flatout.engines.evolution.rewards.pool import RewardPool

def never(completion, answer):
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print(os.getpid(), child.pid, file=sys.stderr, flush=True)
    child.wait()

if __name__ == "__main__":
    with RewardPool(never, workers=2, timeout_s=600.0) as pool:
        pool.score([("", {{}})] * 2)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path: Path, end: signal.Signals) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN.format(path=sys.path))
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stderr is not None
        processes = [psutil.Process(int(pid)) for _ in range(2) for pid in run.stderr.readline().split()]
        assert len(processes) == 4
        os.killpg(run.pid, end)  # as a terminal does it: to everything in the foreground
        errors = run.stderr.read()  # until the last process that could write is gone
    _gone, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    if end == signal.SIGINT:
        assert "KeyboardInterrupt" in errors and errors.count("Traceback") == 1
