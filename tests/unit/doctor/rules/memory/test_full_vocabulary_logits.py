from __future__ import annotations

import pytest

from flatout.doctor.rules.memory.full_vocabulary_logits import detect
from flatout.measure.evidence import LargeTensor, Memory


def job(made, *, words=32000, dtype="float32", peak=3 * 2**30, ops=("mm", "_log_softmax")):
    largest = tuple(
        LargeTensor(place=made.place(30 + n), op=op, shape=(8192, words), dtype=dtype, num_bytes=2**30)
        for n, op in enumerate(ops)
    )
    return made.evidence(
        memory=Memory(num_steps=4, peak_bytes=peak, growth_bytes_per_step=0.0, largest=largest)
    )


def test_fires_at_the_line_that_makes_the_logits(made):
    (finding,) = detect(job(made))
    assert (finding.code, finding.place.line, finding.ceiling) == ("FO506", 30, None)
    assert "32000 words" in finding.message and "67 %" in finding.message


@pytest.mark.parametrize(
    "change", [{"words": 1000}, {"dtype": "bfloat16"}, {"peak": 8 * 2**30}, {"ops": ("mm",)}, {"peak": None}]
)
def test_look_alikes(made, change):
    assert detect(job(made, **change)) == []
