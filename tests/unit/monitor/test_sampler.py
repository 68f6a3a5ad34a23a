"""The sampler: no bursts, notes about gaps, energy per step, and listeners that may fail."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput, MissingExtra
from flatout.monitor.meters.host import HostMeter
from flatout.monitor.sample import HostSample, Sample
from flatout.monitor.sampler import Sampler, next_deadline
from tests.support.monitor_played import Played, PlayedJob, played_gpu


def test_a_sample_has_host_gpus_processes_and_job(played: Played) -> None:
    played.gpus = [played_gpu(played.clock)]
    played.job = PlayedJob(played.root, played.clock)
    played.job.gpu_id = b"00000000-bb37-74c5-28e6-909b2c7e2234"
    job = played.job
    samples = played.run(played.sampler(), lambda n: job.advance(steps=5, wait=0.5, rest=0.5), seconds=3)
    last = samples[-1]
    assert last.span_s == 1.0
    assert last.host.memory_total_bytes is not None
    assert last.gpus[0].utilisation_share == 0.95
    assert any(row.of_job for row in last.processes)
    assert last.job is not None
    assert (last.job.steps_per_s, last.job.gpu_index, last.job.visible_gpus) == (5.0, 0, (0,))
    assert last.job.energy_per_step_j == pytest.approx(100.0)  # 500 W, five steps a second
    assert last.job.energy_per_sample_j == pytest.approx(100 / 32)
    assert played.nvml is not None
    assert played.nvml.calls.count("nvmlInit") == 1


def test_a_long_step_pays_for_all_of_its_energy(played: Played) -> None:
    played.gpus = [played_gpu(played.clock)]
    played.job = PlayedJob(played.root, played.clock)
    job = played.job

    def second(number: int) -> None:
        if number % 4 == 3:
            job.advance(rest=4.0)

    samples = played.run(played.sampler(), second, seconds=12)
    paid = [sample.job.energy_per_step_j for sample in samples if sample.job is not None]
    known = [joules for joules in paid if joules is not None]
    assert known[1:] == pytest.approx([2000.0] * len(known[1:]))
    assert len(known) >= 2


def test_a_suspended_machine_leaves_one_note_and_no_burst(played: Played) -> None:
    sampler = played.sampler()
    sampler.take()
    played.clock.now_s += 1.0
    assert sampler.take().notes == ()
    played.clock.now_s += 3600.0
    late = sampler.take()
    assert late.notes == ("no samples for 3600 s: this process or the machine was suspended",)
    assert late.span_s == 3600.0
    played.clock.now_s += 1.0
    assert sampler.take().notes == ()


def test_a_clock_that_is_set_back_is_noted(played: Played) -> None:
    wall = [1000.0]
    sampler = played.sampler()
    sampler._wall_clock = lambda: wall[0]
    sampler.take()
    played.clock.now_s += 1.0
    wall[0] -= 59.0
    assert sampler.take().notes == ("the clock was set back by 60 s",)


@pytest.mark.parametrize(("counts_sleep", "cause"), [(True, "set"), (False, "suspended")])
def test_a_clock_that_is_set_forward_is_no_suspension(
    played: Played, monkeypatch: pytest.MonkeyPatch, counts_sleep: bool, cause: str
) -> None:
    """Where no clock counts while the machine sleeps, the two look the same."""
    monkeypatch.setattr("flatout.monitor.sampler.COUNTS_SLEEP", counts_sleep)
    wall = [1000.0]
    sampler = played.sampler()
    sampler._wall_clock = lambda: wall[0]
    sampler.take()
    played.clock.now_s += 1.0
    wall[0] += 3601.0
    expected = {
        "set": "the clock was set forward by 3600 s",
        "suspended": "no samples for 3601 s: this process or the machine was suspended",
    }
    assert sampler.take().notes == (expected[cause],)


@given(
    due_s=st.floats(0, 1e6),
    late_s=st.floats(0, 1e5),
    period_s=st.sampled_from([0.1, 0.5, 1.0, 10.0]),
)
def test_the_next_deadline_lies_ahead_by_a_period_at_most(
    due_s: float, late_s: float, period_s: float
) -> None:
    now_s = due_s + late_s
    following = next_deadline(due_s, now_s, period_s)
    assert now_s < following + 1e-6
    assert following <= now_s + period_s + 1e-6


def test_gpu_events_become_notes_of_one_sample(played: Played) -> None:
    played.gpus = [played_gpu(played.clock), played_gpu(played.clock, number=1)]
    sampler = played.sampler()
    sampler.take()
    played.gpus[1].lost_after = played.gpus[1].num_asked
    played.clock.now_s += 1.0
    assert "GPU 1 is lost" in sampler.take().notes[0]
    played.clock.now_s += 1.0
    assert sampler.take().notes == ()


def test_a_listener_that_fails_becomes_a_note_and_the_others_still_hear(played: Played) -> None:
    heard: list[Sample] = []

    def full(sample: Sample) -> None:
        raise OSError(28, "No space left on device")

    def absent(sample: Sample) -> None:
        raise MissingExtra("the package 'x' is not installed")

    sampler = played.sampler(listeners=[full, absent, heard.append])
    sampler.take()
    played.clock.now_s += 1.0
    second = sampler.take()
    assert len(heard) == 2
    assert any("No space left" in note for note in second.notes)
    assert any("not installed" in note for note in second.notes)


def test_a_listener_that_raises_anything_is_told_about_once_and_asked_again(played: Played) -> None:
    heard: list[Sample] = []
    told: list[str] = []
    asked: list[Sample] = []

    def broken(sample: Sample) -> None:
        asked.append(sample)
        raise [ValueError("no such\nmetric"), SystemExit(3)][len(asked) % 2]

    sampler = played.sampler(listeners=[broken, heard.append])
    sampler.on_failure = told.append
    for _ in range(6):
        sampler.take()
        played.clock.now_s += 1.0
    assert len(heard) == len(asked) == 6
    assert [note for sample in heard for note in sample.notes] == told
    first, second = told
    assert "broken failed: SystemExit: 3" in first
    assert f"broken failed: ValueError: no such metric ({__file__}:" in second


def test_a_meter_that_fails_costs_its_sample_and_not_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the kernel that no parser knows, on a machine that nobody here has seen."""
    heard: list[Sample] = []
    told: list[str] = []
    enough = threading.Event()
    asked: list[float] = []

    def unknown_format(now_s: float) -> HostSample:
        asked.append(now_s)
        if len(asked) < 3:
            raise ValueError("not sure how to interpret line 'nvme0n1'")
        return HostSample()

    def listener(sample: Sample) -> None:
        heard.append(sample)
        enough.set()

    host = HostMeter()
    sampler = Sampler(hz=10, host=host, listeners=[listener], on_failure=told.append)
    monkeypatch.setattr(host, "read", unknown_format)
    with sampler:
        assert enough.wait(60)
    (failure,) = told
    assert failure.startswith("Sampler failed: ValueError: not sure how to interpret line")
    assert failure in heard[0].notes


def test_a_failure_that_cannot_be_told_harms_nobody(played: Played) -> None:
    def without_stream(failure: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    def full(sample: Sample) -> None:
        raise OSError(28, "No space left on device")

    sampler = played.sampler(listeners=[full])
    sampler.on_failure = without_stream
    assert sampler.take() is sampler.latest


def test_a_listener_that_hangs_does_not_keep_the_job_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.monitor.sampler.STOP_S", 0.0)
    hangs, released = threading.Event(), threading.Event()

    def listener(sample: Sample) -> None:
        hangs.set()
        released.wait()

    sampler = Sampler(hz=10, listeners=[listener]).start()
    assert hangs.wait(60)
    sampler.stop()
    released.set()
    monkeypatch.undo()
    sampler.stop()


def test_a_machine_without_a_driver_has_a_host_and_a_sentence(played: Played) -> None:
    sample = played.sampler().take()
    assert sample.gpus == ()
    assert "gpus" in sample.missing
    assert sample.host.memory_total_bytes


@pytest.mark.parametrize("hz", [0.0, 0.05, 11.0, float("nan")])
def test_a_rate_outside_the_bounds_is_refused(hz: float) -> None:
    with pytest.raises(BadInput, match="samples per second"):
        Sampler(hz=hz)


def test_the_thread_samples_until_it_is_stopped() -> None:
    enough = threading.Event()
    heard: list[Sample] = []

    def listener(sample: Sample) -> None:
        heard.append(sample)
        if len(heard) == 3:
            enough.set()

    with Sampler(hz=10, listeners=[listener]) as sampler:
        assert enough.wait(60)
    number = len(heard)
    assert sampler.latest is heard[-1]
    assert len({sample.time_s for sample in heard}) == number
    sampler.stop()
    assert len(heard) == number


def test_what_is_recent_is_bounded(played: Played) -> None:
    sampler = played.sampler()
    samples = played.run(sampler, lambda n: None, seconds=200)
    assert len(samples) == 120
    assert len(sampler.recent(10.0)) == 11


def test_the_monitor_imports_neither_torch_nor_numpy() -> None:
    import flatout.monitor as room

    modules = sorted(
        ".".join(("flatout.monitor", *path.relative_to(Path(room.__path__[0])).with_suffix("").parts))
        for path in Path(room.__path__[0]).rglob("*.py")
        if path.stem != "__init__"
    )
    assert len(modules) > 20
    drawing = {f"flatout.monitor.terminal.{name}" for name in ("panels", "screen", "follow")}
    drawing.add("flatout.monitor.fleet.table")
    assert drawing <= set(modules)
    for names, heavy in (
        (modules, {"torch", "numpy"}),
        (sorted(set(modules) - drawing), {"torch", "numpy", "rich"}),  # what a job may come to import
    ):
        code = (
            "import sys, importlib\n"
            f"for name in {names!r}: importlib.import_module(name)\n"
            "from flatout.monitor.sampler import Sampler\n"
            "Sampler().take()\n"
            f"print(sorted({heavy!r} & sys.modules.keys()))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "[]", done.stderr
