from __future__ import annotations

import torch
from torch import nn

from flatout.tuner.trial.counts import Counter, Counts


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


def test_counts_repeat_and_see_reads_launches_groups_and_memory() -> None:
    counted()  # first allocations
    plain = counted()
    assert plain == counted()
    reading = counted(reads=3)
    assert reading.waits == plain.waits + 3 and reading.launches == plain.launches + 3
    larger = counted(rows=4096)
    assert larger.peak_bytes > plain.peak_bytes + 4096 * 64 * 4
    assert plain.parameter_groups == 2 and plain.copied_bytes is None
