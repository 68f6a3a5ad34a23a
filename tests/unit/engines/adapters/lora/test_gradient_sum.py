"""Gradients of several batches are added in the order of the batches, and written where they came from."""

from __future__ import annotations

import torch

from flatout.engines.adapters.lora.gradient_sum import GradientSum

CPU = torch.device("cpu")


def test_batches_are_put_aside_and_added_in_their_order() -> None:
    gradients = [torch.empty(2), torch.empty(1, 1)]
    batches = [[1e8, 1.0, 3.0], [1.0, 2.0, 4.0], [-1e8, 3.0, 5.0]]
    found = GradientSum()
    for number, (first, second, third) in enumerate(batches):
        gradients[0].copy_(torch.tensor([first, second]))
        gradients[1].fill_(third)
        found.add(gradients, last=number == 2)
        if number < 2:
            assert not any(each.any() for each in gradients)
    assert gradients[0].tolist() == [0.0, 6.0]  # float32: 1e8 + 1 is 1e8
    assert gradients[1].tolist() == [[12.0]]
    found.add(gradients, last=True)  # the next update begins at nothing
    assert gradients[1].tolist() == [[12.0]]
    found.add(gradients[:1], last=True)  # a task has ended
    assert gradients[0].tolist() == [0.0, 6.0]


def test_one_batch_and_a_gpu_alone_need_no_sum() -> None:
    gpu = torch.device("cuda", 0)
    assert GradientSum.where_needed(accumulation=1, device=CPU, total=None) is None
    assert GradientSum.where_needed(accumulation=4, device=gpu, total=None) is None
    assert GradientSum.where_needed(accumulation=4, device=CPU, total=None) is not None
    assert GradientSum.where_needed(accumulation=1, device=gpu, total=lambda parts: parts[0]) is not None
