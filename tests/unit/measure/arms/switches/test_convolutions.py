from __future__ import annotations

from typing import Any

import torch

from flatout.measure.arms.switches.convolutions import ChannelsLast, images, propose
from flatout.measure.evidence import Kernels


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(32, 2))
    return model, torch.optim.Adam(model.parameters())


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3, 4, 4)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_weights_and_their_state_are_turned_and_turned_back() -> None:
    (model, optimizer), (plain, other) = trained(), trained()
    step(model, optimizer), step(plain, other)
    arm = ChannelsLast([optimizer], suspicion=0.3)
    arm.begin()
    assert len(images(optimizer)) == 3
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in images(optimizer))
    assert torch.allclose(step(model, optimizer), step(plain, other))
    arm.end()
    assert all(each.is_contiguous() for each in images(optimizer))
    assert torch.allclose(step(model, optimizer), step(plain, other))


def kernels(seconds: float) -> Kernels:
    return Kernels(
        num_steps=1,
        step_s=1.0,
        busy_share=0.9,
        num_kernels=9.0,
        median_kernel_s=None,
        gap_s=None,
        sync_gap_s=None,
        num_syncs=None,
        by_category_s={"convolution": seconds},
        matmul_s_by_dtype={},
        top=(),
    )


def test_it_is_proposed_for_convolutions_with_channels_first(context: Any) -> None:
    model, optimizer = trained()
    able = {"device": "cuda", "optimizers": (optimizer,)}
    (arm,) = propose(context(kernels=kernels(0.5), **able))
    assert arm.suspicion == 0.15
    assert not list(propose(context(kernels=kernels(0.05), **able)))
    assert not list(propose(context(kernels=kernels(0.5), optimizers=(optimizer,))))
    model.to(memory_format=torch.channels_last)
    assert not list(propose(context(kernels=kernels(0.5), **able)))
