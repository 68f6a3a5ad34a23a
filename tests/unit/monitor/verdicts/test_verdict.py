"""The seed's own cases, from played samples: a starved loader, an OOM about to happen, an idle second GPU,
a healthy run; and what must not be concluded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.doctor.rule import all_rules
from flatout.monitor.past.compare import compare
from flatout.monitor.past.outline import read_outline
from flatout.monitor.past.summary import last_loss, summarise
from flatout.monitor.sample import HostSample, JobSample, ProcessSample, Sample
from flatout.monitor.verdicts import alarms
from flatout.monitor.verdicts import verdict as verdicts_module
from flatout.monitor.verdicts.verdict import verdict, verdicts
from flatout.monitor.web.run_stream import RunStream
from tests.support.monitor import START_S, kept_run
from tests.support.monitor_played import GIB, Played, PlayedJob, played_gpu, set_memory


def with_job(played: Played, *gpus: Any, **options: Any) -> Played:
    played.gpus = list(gpus)
    played.job = PlayedJob(played.root, played.clock, **options)
    return played


def test_a_starved_loader_is_named_by_the_gpus_own_events(played: Played) -> None:
    with_job(played, played_gpu(played.clock, busy=35, sm=20))
    job = played.job
    assert job is not None

    def second(number: int) -> None:
        job.advance(steps=10, wait=0.6, rest=0.4, device={"wait": 0.58, "rest": 0.42})

    found = verdict(played.run(played.sampler(), second))
    assert found.bound == "data"
    assert "58 %" in found.sentence
    assert "FO101" in found.rules
    assert any("60 %" in line for line in found.evidence)
    assert any("2.38×" in line for line in found.evidence)


def test_a_host_that_waits_while_the_gpu_still_computes_is_not_starved(played: Played) -> None:
    """The host ran ahead: it waits for most of its time, and the GPU never stands still."""
    with_job(played, played_gpu(played.clock, busy=99, sm=80))
    job = played.job
    assert job is not None
    found = verdict(
        played.run(
            played.sampler(), lambda n: job.advance(wait=0.7, rest=0.3, device={"wait": 0.01, "rest": 0.99})
        )
    )
    assert found.bound == "healthy"


def of_another_maker(played: Played) -> PlayedJob:
    """A job on a GPU that NVML does not know; its torch tells the name and the memory."""
    job = with_job(played).job
    assert job is not None
    job.device_name = b"AMD Instinct MI300X"
    job.scalars |= {"device_used_bytes": 100 * GIB, "device_total_bytes": 192 * GIB}
    return job


def test_a_starved_loader_of_another_makers_gpu(played: Played) -> None:
    job = of_another_maker(played)
    samples = played.run(
        played.sampler(), lambda n: job.advance(wait=0.6, rest=0.4, device={"wait": 0.58, "rest": 0.42})
    )
    assert samples[-1].gpus[0].name == "AMD Instinct MI300X"
    assert samples[-1].missing == {}
    assert verdict(samples).bound == "data"


def test_another_makers_gpu_that_computes_is_not_taken_for_the_cpu(played: Played) -> None:
    job = of_another_maker(played)
    samples = played.run(
        played.sampler(), lambda n: job.advance(wait=0.01, rest=0.99, device={"wait": 0.01, "rest": 0.99})
    )
    found = verdict(samples)
    assert found.bound == "unknown"
    assert "through the job's torch" in found.sentence


def test_memory_of_another_makers_gpu_runs_out(played: Played) -> None:
    job = of_another_maker(played)

    def second(number: int) -> None:
        grown = number * GIB
        job.scalars |= {"device_used_bytes": 100 * GIB + grown, "allocated_bytes": 90 * GIB + grown}
        job.advance(wait=0.01, rest=0.99)

    assert verdict(played.run(played.sampler(), second)).bound == "memory"


def test_a_gpu_that_is_idle_until_the_first_step_is_not_held_against_the_job(played: Played) -> None:
    gpu = played_gpu(played.clock, busy=0, sm=0)
    with_job(played, gpu)
    job = played.job
    assert job is not None
    working = played_gpu(played.clock, busy=99, sm=80)

    def second(number: int) -> None:
        if number == 25:
            gpu.answers, gpu.gpm = working.answers, working.gpm
        if number >= 25:
            job.advance(wait=0.01, rest=0.99, device={"wait": 0.01, "rest": 0.99})

    found = verdict(played.run(played.sampler(), second))
    assert found.bound == "healthy"
    assert any("99 %" in line for line in found.evidence)


def test_without_events_a_wait_counts_only_while_no_kernel_ran(played: Played) -> None:
    with_job(played, played_gpu(played.clock, busy=95, sm=80))
    job = played.job
    assert job is not None
    assert verdict(played.run(played.sampler(), lambda n: job.advance(wait=0.7, rest=0.3))).bound == "healthy"


def test_memory_that_tensors_hold_runs_out(played: Played) -> None:
    gpu = played_gpu(played.clock, used=100 * GIB)
    with_job(played, gpu)
    job = played.job
    assert job is not None

    def second(number: int) -> None:
        allocated = (90 + number * 0.25) * GIB
        set_memory(gpu, (100 + number * 0.25) * GIB)
        job.scalars |= {"allocated_bytes": allocated, "reserved_bytes": allocated + GIB}
        job.scalars["peak_allocated_bytes"] = allocated
        job.advance(wait=0.01, rest=0.99, device={"wait": 0.0, "rest": 1.0})

    found = verdict(played.run(played.sampler(), second))
    assert found.bound == "memory"
    assert found.rules == ("FO501",)
    # 140 GiB, of which 109.75 are used; 1 GiB of the cache is free too: 31.25 GiB at 0.25 GiB/s.
    assert "runs out in about 125 s" in found.sentence


def test_a_cache_that_grew_and_stays_is_no_leak(played: Played) -> None:
    gpu = played_gpu(played.clock)
    with_job(played, gpu)
    job = played.job
    assert job is not None

    def second(number: int) -> None:
        set_memory(gpu, (40 + 40 * (number > 5) + 20 * (number > 12)) * GIB)
        job.advance(wait=0.01, rest=0.99, device={"wait": 0.0, "rest": 1.0})

    assert verdict(played.run(played.sampler(), second)).bound == "healthy"


def test_an_idle_second_gpu_is_pointed_out(played: Played) -> None:
    gpus = [played_gpu(played.clock), played_gpu(played.clock, number=1, busy=0, sm=0, used=GIB)]
    with_job(played, *gpus)
    job = played.job
    assert job is not None
    job.gpu_id = b"00000000-bb37-74c5-28e6-909b2c7e2234"
    samples = played.run(
        played.sampler(), lambda n: job.advance(wait=0.02, rest=0.98, device={"wait": 0.01, "rest": 0.99})
    )
    assert [found.bound for found in verdicts(samples)] == ["idle-gpu", "healthy"]
    assert "GPU 1 of 2" in verdict(samples).sentence


def test_a_gpu_that_is_hidden_from_the_job_is_not_idle(played: Played) -> None:
    gpus = [played_gpu(played.clock), played_gpu(played.clock, number=1, busy=0, sm=0, used=GIB)]
    with_job(played, *gpus, visible_devices="0")
    job = played.job
    assert job is not None
    samples = played.run(
        played.sampler(), lambda n: job.advance(wait=0.02, rest=0.98, device={"wait": 0.01, "rest": 0.99})
    )
    assert [found.bound for found in verdicts(samples)] == ["healthy"]


def test_a_healthy_run_says_what_it_rests_on(played: Played) -> None:
    with_job(played, played_gpu(played.clock, busy=97, sm=81))
    job = played.job
    assert job is not None
    found = verdict(
        played.run(
            played.sampler(), lambda n: job.advance(wait=0.02, rest=0.98, device={"wait": 0.01, "rest": 0.99})
        )
    )
    assert found.bound == "healthy"
    assert any("97 %" in line for line in found.evidence)
    assert any("81 %" in line for line in found.evidence)
    assert found.missing == ()


@pytest.mark.parametrize(("busy", "sm", "word"), [(30, 10, "too slow"), (98, 8, "too small")])
def test_a_gpu_that_has_its_data_and_yet_idles_waits_for_the_host(
    played: Played, busy: float, sm: float, word: str
) -> None:
    with_job(played, played_gpu(played.clock, busy=busy, sm=sm))
    job = played.job
    assert job is not None
    found = verdict(
        played.run(
            played.sampler(), lambda n: job.advance(wait=0.02, rest=0.98, device={"wait": 0.01, "rest": 0.99})
        )
    )
    assert (found.bound, word in found.sentence) == ("host", True)


@pytest.mark.parametrize("busy", [0, 5, 50, 100])
def test_utilisation_alone_concludes_nothing(played: Played, busy: float) -> None:
    played.gpus = [played_gpu(played.clock, busy=busy, sm=busy)]
    found = verdict(played.run(played.sampler(), lambda n: None))
    assert found.bound == "unknown"
    assert found.missing


def test_a_job_that_does_not_time_its_waits_is_told_how(played: Played) -> None:
    with_job(played, played_gpu(played.clock, busy=20, sm=5))
    job = played.job
    assert job is not None
    job.scalars["sees_data"] = 0.0
    found = verdict(played.run(played.sampler(), lambda n: job.advance(rest=1.0)))
    assert found.bound == "unknown"
    assert "flatout.watch(loader)" in str(found)


def test_a_gpu_that_does_not_answer_is_not_idle_and_not_at_zero(played: Played) -> None:
    gpu = played_gpu(played.clock)
    gpu.answers.pop("nvmlDeviceGetUtilizationRates")
    gpu.answers.pop("nvmlDeviceGetSamples")
    with_job(played, gpu)
    job = played.job
    assert job is not None
    samples = played.run(played.sampler(), lambda n: job.advance(wait=0.5, rest=0.5))
    assert samples[-1].gpus[0].utilisation_share is None
    assert verdict(samples).bound == "unknown"


def test_heat_is_the_drivers_word_and_needs_no_job(played: Played) -> None:
    gpu = played_gpu(played.clock)
    gpu.answers |= {
        "nvmlDeviceGetCurrentClocksEventReasons": 0x40,
        "nvmlDeviceGetClockInfo": lambda kind: 990,
    }
    played.gpus = [gpu]
    found = verdict(played.run(played.sampler(), lambda n: None))
    assert found.bound == "throttled"
    assert "50 %" in found.sentence


def test_a_power_cap_at_full_clock_is_a_gpu_at_work(played: Played) -> None:
    gpu = played_gpu(played.clock)
    gpu.answers["nvmlDeviceGetCurrentClocksEventReasons"] = 0x4
    with_job(played, gpu)
    job = played.job
    assert job is not None
    samples = played.run(
        played.sampler(), lambda n: job.advance(wait=0.01, rest=0.99, device={"wait": 0.0, "rest": 1.0})
    )
    assert verdict(samples).bound == "healthy"


def test_a_job_without_steps_for_long_is_stalled(played: Played) -> None:
    with_job(played, played_gpu(played.clock))
    job = played.job
    assert job is not None

    def second(number: int) -> None:
        if number < 5:
            job.advance(wait=0.01, rest=0.99)

    found = verdict(played.run(played.sampler(), second, seconds=50))
    assert found.bound == "stalled"
    assert "45.0 s" in found.sentence


def test_a_job_on_a_cpu_is_bound_by_its_data_or_by_its_work(played: Played) -> None:
    with_job(played)
    job = played.job
    assert job is not None
    sampler = played.sampler()
    assert verdict(played.run(sampler, lambda n: job.advance(wait=0.5, rest=0.5))).bound == "data"
    samples = played.run(sampler, lambda n: job.advance(rest=1.0), seconds=70)
    busy, idle = (
        verdict(
            [
                replace(each, processes=(ProcessSample(pid=1, of_job=True, cpu_cores=cores),))
                for each in samples
            ]
        )
        for cores in (1.9, 0.07)
    )
    assert busy.bound == "compute" and "1.9 cores" in " ".join(busy.evidence)
    assert idle.bound == "unknown" and "0.07 cores" in idle.sentence  # it sleeps, whatever it waits for


@pytest.mark.parametrize(("cores", "wait"), [(0.04, 0.01), (1.9, 0.01), (0.04, 0.6)])
def test_terminal_page_and_report_say_the_same_on_a_host_that_others_keep_busy(
    tmp_path: Path, cores: float, wait: float
) -> None:
    job = JobSample(pid=1, steps=1, step_s=0.1, phases={"wait": wait, "rest": 1 - wait})
    samples = [
        Sample(
            time_s=START_S + second,
            span_s=1.0,
            host=HostSample(cpu_share=0.99, cores=8.0),
            processes=(ProcessSample(pid=1, of_job=True, cpu_cores=cores),),
            job=replace(job, steps=second + 1),
        )
        for second in range(60)
    ]
    terminal = verdict(samples)
    assert terminal.bound == ("data" if wait > 0.5 else "compute" if cores > 1 else "unknown")
    sent = RunStream("r", samples).whole().decode().split("data: ", 1)[1]
    assert json.loads(sent)["verdicts"][0]["sentence"] == terminal.sentence
    summary = summarise(read_outline(kept_run(tmp_path, samples)))
    reported = [each.sentence for each in summary.bounds]
    assert reported == ([] if terminal.bound == "unknown" else [terminal.sentence])


def test_the_cpu_of_others_is_not_booked_to_a_job_whose_own_is_not_known() -> None:
    job = JobSample(pid=1, steps=1, phases={"wait": 0.01, "rest": 0.99})
    host = HostSample(cpu_share=0.99, cores=8.0)
    found = verdict([Sample(time_s=START_S + second, span_s=1.0, host=host, job=job) for second in range(9)])
    assert found.bound == "unknown"
    assert "how many cores it keeps busy is not known" in found.sentence


@pytest.mark.parametrize(("loss", "shown"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_a_lost_loss_is_an_alarm_on_terminal_page_report_and_in_a_comparison(
    tmp_path: Path, played: Played, loss: float, shown: str
) -> None:
    with_job(played)
    job = played.job
    assert job is not None

    def second(number: int) -> None:
        is_lost = number >= 20
        job.scalars |= {"loss": loss if is_lost else 0.3, "loss_is_nan": float(is_lost and loss != loss)}
        job.advance(wait=0.3, rest=0.7)

    samples = played.run(played.sampler(), second)
    found = verdict(samples)
    assert found.bound == "diverged"
    assert f"the loss is {shown}" in found.sentence
    assert "0.3" in found.evidence[0]
    assert [each.bound for each in verdicts(samples)][:2] == ["diverged", "data"]
    assert verdict(samples[-1:]).bound == "diverged"  # one sample is enough
    sent = json.loads(RunStream("r", samples).whole().decode().split("data: ", 1)[1])
    assert sent["verdicts"][0]["bound"] == "diverged"
    assert sent["sample"]["job"]["loss"] == str(loss)
    written = json.loads(json.dumps(samples[-1].to_json(), allow_nan=False))
    assert (written["job"]["loss"], written["job"]["loss_is_finite"]) == (None, False)
    recorded = read_outline(kept_run(tmp_path / "kept", samples))
    summary = summarise(recorded)
    assert "diverged" in [each.bound for each in summary.bounds]
    assert last_loss(summary) == f"{shown} since 0:22, 0.3 before"
    assert f"the loss of run 2 is {shown} since 0:22, 0.3 before" in compare(recorded, recorded).caveats


def test_an_ended_job_has_no_bound(played: Played) -> None:
    with_job(played, played_gpu(played.clock))
    job = played.job
    assert job is not None

    def second(number: int) -> None:
        job.scalars["ended"] = float(number > 20)
        job.advance(wait=0.5, rest=0.5)

    assert "has ended" in verdict(played.run(played.sampler(), second)).sentence


def test_few_samples_are_no_evidence() -> None:
    found = verdict([Sample(time_s=1.0)])
    assert (found.bound, found.action) == ("unknown", "keep watching for a few seconds")
    assert found.to_json()["format"] == "flatout-verdict"


def test_a_containers_memory_that_fills_up_is_urgent() -> None:
    samples = [
        Sample(
            time_s=float(second),
            host=HostSample(
                memory_used_bytes=int((10 + second * 0.1) * GIB),
                memory_total_bytes=16 * GIB,
                memory_limited_by="the control group",
            ),
        )
        for second in range(40)
    ]
    found = verdict(samples)
    assert found.bound == "memory"
    assert "the container's memory" in found.sentence
    assert "runs out in about 21.0 s" in found.sentence


def test_every_code_is_one_of_the_doctors() -> None:
    known = {rule.code for rule in all_rules()}
    named = [
        code
        for module in (alarms, verdicts_module)
        for name, codes in vars(module).items()
        if name.endswith("_RULES")
        for code in codes
    ]
    assert len(named) > 10
    assert set(named) <= known
