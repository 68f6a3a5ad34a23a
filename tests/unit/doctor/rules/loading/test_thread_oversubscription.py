from __future__ import annotations

import pytest

from flatout.doctor.rules.loading.thread_oversubscription import detect
from flatout.measure.evidence import Threads


def job(made, speedup, *, threads=16):
    arm = made.counterfactual("threads", speedup, value=2.0)
    return made.evidence(threads=Threads(num=threads, place=made.place(5)), counterfactuals=(arm,))


def test_more_threads_than_cores_are_found_where_fewer_are_faster(made):
    (finding,) = detect(job(made, 1.8))
    assert (finding.code, finding.place, finding.ceiling.speedup) == ("FO109", made.place(5), 1.8)
    assert finding.message == "operators use 16 threads on 4 cores"


@pytest.mark.parametrize(("speedup", "threads"), [(1.02, 16), (1.8, 4)])
def test_look_alikes(made, speedup, threads):
    assert detect(job(made, speedup, threads=threads)) == []
