from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from flatout.measure.evidence import Copy
from flatout.tuner.trial.counts import Counter, Counts, copied_bytes


def counted(*, reads: int = 0, rows: int = 8) -> Counts:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD([{"params": [each]} for each in model.parameters()], lr=0.1)
    counter = Counter(cuda=False)
    counter.groups[id(optimizer)] = len(optimizer.param_groups)
    counter.start()
    for _ in range(2):
        loss = model(torch.randn(rows, 64)).sum()
        for _ in range(reads):
            loss.item()
        loss.backward()
        optimizer.step()
    found = counter.stop(2)
    assert found is not None
    return found


def test_a_job_with_a_profiler_of_its_own_is_left_alone() -> None:
    counter = Counter(cuda=False)
    with torch.autograd.profiler.profile(use_kineto=True):
        counter.start()
        assert counter.stop(1) is None


def test_copies_of_unknown_size_are_not_nothing() -> None:
    known = [
        Copy(kind=kind, calls_per_step=1, total_s=1e-6, bytes_per_step=size)
        for kind, size in (("HtoD pageable", 64.0), ("DtoH pinned", 8.0), ("DtoD", 512.0))
    ]
    assert copied_bytes(known) == 72.0 and copied_bytes([]) == 0.0
    assert copied_bytes([*known, replace(known[0], bytes_per_step=None)]) is None


def test_counts_repeat_and_see_reads_launches_groups_and_memory() -> None:
    counted()  # first allocations
    plain = counted()
    assert plain == counted()
    reading = counted(reads=3)
    assert reading.waits == plain.waits + 3 and reading.launches == plain.launches + 3
    larger = counted(rows=4096)
    assert larger.peak_bytes > plain.peak_bytes + 4096 * 64 * 4
    assert plain.parameter_groups == 2 and plain.copied_bytes is None
