from __future__ import annotations

import pytest

from flatout.doctor.rules.waits.blocking_copy import detect
from flatout.measure.evidence import Copy


def job(made, *arms, device="cuda", copies_s=0.02, **changes):
    copy = {"pinned": True, "blocking": True, "bytes_per_step": 2.0**24, "device": "cuda", **changes}
    copies = (Copy(kind="HtoD pinned", calls_per_step=2.0, total_s=copies_s),)
    return made.evidence(
        device=device,
        sites=(made.site("copy", op="to", **copy),),
        kernels=made.kernels(copies=copies),
        counterfactuals=arms,
    )


def test_a_page_locked_copy_that_is_waited_for_is_found(made):
    (finding,) = detect(job(made, made.counterfactual("staged", 1.2)))
    assert (finding.code, finding.place.line, finding.ceiling.speedup) == ("FO206", 30, 1.2)
    assert finding.share == pytest.approx(0.2)


def test_look_alikes(made):
    assert detect(job(made, blocking=False)) == []
    assert detect(job(made, pinned=False)) == []
    assert detect(job(made, bytes_per_step=1000.0)) == []
    assert detect(job(made, copies_s=0.001)) == []
    assert detect(job(made, device="cpu")) == []
    assert detect(job(made, made.counterfactual("staged", 1.0))) == []
