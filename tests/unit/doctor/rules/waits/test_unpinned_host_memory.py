from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.waits.unpinned_host_memory import detect
from flatout.measure.evidence import Copy

MIB = 2**20


def copy_site(made, *, line=50, num_bytes=8 * MIB, pinned=False, device="cuda"):
    return made.site(
        "copy", line=line, op="to", bytes_per_step=float(num_bytes), pinned=pinned, device=device
    )


def copying(made, *sites, device="cuda", total_s=0.02, kind="HtoD pageable", loaders=None):
    copies = (Copy(kind=kind, calls_per_step=2.0, total_s=total_s),)
    return made.evidence(
        device=device,
        sites=sites or (copy_site(made),),
        kernels=made.kernels(copies=copies),
        loaders=(made.loader(),) if loaders is None else loaders,
    )


def test_fires_at_the_copy_and_names_the_loader(made):
    (finding,) = detect(copying(made))
    assert (finding.code, finding.name) == ("FO201", "unpinned-host-memory")
    assert finding.place.line == 50
    assert finding.share == pytest.approx(0.2)
    assert finding.ceiling is None
    assert "train.py:10" in finding.fix
    assert "pin_memory=True" in finding.fix


@pytest.mark.parametrize(("speedup", "fires"), [(1.7, True), (1.0, False)])
def test_steps_from_page_locked_memory_decide(made, speedup, fires):
    staged = made.counterfactual("staged", speedup)
    findings = detect(dataclasses.replace(copying(made), counterfactuals=(staged,)))
    assert [finding.ceiling.speedup for finding in findings] == ([pytest.approx(1.7)] if fires else [])


@pytest.mark.parametrize(("num_bytes", "fires"), [(MIB, True), (MIB - 1, False)])
def test_small_copies_are_left_alone(made, num_bytes, fires):
    assert bool(detect(copying(made, copy_site(made, num_bytes=num_bytes)))) == fires


@pytest.mark.parametrize(("total_s", "fires"), [(0.0031, True), (0.0029, False)])
def test_the_copies_must_matter(made, total_s, fires):
    assert bool(detect(copying(made, total_s=total_s))) == fires


def test_lines_share_the_time_by_their_bytes(made):
    job = copying(
        made,
        copy_site(made, line=50, num_bytes=6 * MIB),
        copy_site(made, line=51, num_bytes=2 * MIB),
        copy_site(made, line=52, num_bytes=100),
    )
    shares = {finding.place.line: finding.share for finding in detect(job)}
    assert shares == {50: pytest.approx(0.15, rel=1e-3), 51: pytest.approx(0.05, rel=1e-3)}


def test_look_alikes(made):
    assert detect(copying(made, device="cpu")) == []
    assert detect(copying(made, copy_site(made, pinned=True))) == []
    assert detect(copying(made, copy_site(made, pinned=None))) == []
    assert detect(copying(made, copy_site(made, device="cpu"))) == []
    assert detect(copying(made, kind="HtoD pinned")) == []
    assert detect(made.evidence(device="cuda", sites=(copy_site(made),))) == []


def test_a_tensor_from_elsewhere_is_not_blamed_on_the_loader(made):
    (finding,) = detect(copying(made, loaders=(made.loader(pin_memory=True),)))
    assert "train.py:10" not in finding.fix
    assert "allocated once" in finding.fix
