from __future__ import annotations

import pytest

from flatout.doctor.rules.memory.allocator_fragmentation import detect
from flatout.measure.evidence import Memory

GIB = 2**30


def job(made, *, device="cuda", peak=60, reserved=130, retries=0):
    memory = Memory(
        num_steps=4,
        peak_bytes=peak * GIB,
        growth_bytes_per_step=0.0,
        reserved_bytes=reserved * GIB,
        num_alloc_retries=retries,
    )
    return made.evidence(device=device, memory=memory, module_calls=(made.module_call(),))


def test_fires_for_memory_in_pieces_and_for_retries(made):
    (pieces,) = detect(job(made))
    (retried,) = detect(job(made, reserved=70, retries=3))
    assert (pieces.code, pieces.place.line) == ("FO503", 40)
    assert "70.0 GiB are split into pieces" in pieces.message and "retried 3 times" in retried.message


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"reserved": 100}, {"peak": 120}])
def test_look_alikes(made, change):
    assert detect(job(made, **change)) == []
