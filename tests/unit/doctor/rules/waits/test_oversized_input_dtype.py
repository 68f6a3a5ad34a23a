from __future__ import annotations

import pytest

from flatout.doctor.rules.waits.oversized_input_dtype import detect
from flatout.measure.evidence import Copy, Precision


def job(made, *arms, wide=2.0**24, dtype="float32"):
    sites = [
        made.site("copy", op="to", line=line, bytes_per_step=2.0**24, device="cuda", wide_bytes_per_step=own)
        for line, own in ((30, wide), (31, 0.0))
    ]
    copies = (Copy(kind="HtoD pageable", calls_per_step=2.0, total_s=0.08),)
    return made.evidence(
        device="cuda",
        sites=tuple(sites),
        kernels=made.kernels(copies=copies),
        counterfactuals=arms,
        precision=Precision(parameter_dtypes=(dtype,), autocast=None, tf32_matmul=False, bf16_supported=True),
    )


def test_half_of_what_the_line_copies_is_promised_at_most(made):
    (finding,) = detect(job(made, made.counterfactual("staged-on-device", 1.6)))
    assert (finding.code, finding.place.line) == ("FO209", 30)
    assert finding.share == pytest.approx(0.2)  # half of the line's half of 0.08 s in 0.1 s
    assert finding.ceiling.speedup == pytest.approx(1 / 0.8)


def test_look_alikes(made):
    assert detect(job(made, wide=1000.0)) == []
    assert detect(job(made, dtype="float64")) == []
    assert detect(job(made, made.counterfactual("staged-on-device", 1.0))) == []
    assert detect(made.evidence()) == []
