from __future__ import annotations

from flatout.doctor.rules.training.loss_not_finite import detect
from flatout.measure.evidence import Losses, Precision, Training


def job(made, *, num, num_not_finite, **changes):
    losses = Losses(num=num, num_not_finite=num_not_finite, place=made.place(60))
    return made.evidence(training=Training(losses=losses), **changes)


def test_a_loss_that_stays_nan_is_found_at_the_backward_call(made):
    (finding,) = detect(job(made, num=6, num_not_finite=4))
    assert (finding.code, finding.place, finding.ceiling) == ("FO901", made.place(60), None)


def test_look_alikes(made):
    assert detect(job(made, num=6, num_not_finite=0)) == []
    assert detect(job(made, num=1, num_not_finite=1)) == []
    assert detect(job(made, num=10, num_not_finite=3)) == []
    fp16 = Precision(parameter_dtypes=(), autocast="float16", tf32_matmul=None, bf16_supported=None)
    assert detect(job(made, num=6, num_not_finite=4, precision=fp16)) == []
    assert detect(made.evidence()) == []
