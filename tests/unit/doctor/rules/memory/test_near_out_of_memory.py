from __future__ import annotations

import pytest

from flatout.doctor.rules.memory.near_out_of_memory import detect
from flatout.measure.evidence import Memory


def job(made, *, device="cuda", full=0.95):
    peak = None if full is None else int(full * 140 * 2**30)
    memory = Memory(num_steps=4, peak_bytes=peak, growth_bytes_per_step=0.0)
    return made.evidence(device=device, memory=memory, module_calls=(made.module_call(),))


def test_fires_at_the_call_of_the_model(made):
    (finding,) = detect(job(made))
    assert (finding.code, finding.place.line, finding.share) == ("FO502", 40, None)
    assert "95 %" in finding.message


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"full": 0.9}, {"full": None}])
def test_look_alikes(made, change):
    assert detect(job(made, **change)) == []
