"""Batches copied to the GPU ahead of their use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch

Batch = TypeVar("Batch")


class Prefetched(Generic[Batch]):
    """A loader whose batches lie on a device before they are asked for; made by `prefetch`."""

    def __init__(
        self, loader: Iterable[Batch], device: torch.device | str, *, ahead: int, background: bool
    ) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


def prefetch(
    loader: Iterable[Batch], device: torch.device | str, *, ahead: int = 2, background: bool = False
) -> Prefetched[Batch]:
    """Copy batches to `device` on a stream of their own, `ahead` of their use.

    `background` also loads them on a thread: for loops that wait for the GPU in every step.
    """
    return Prefetched(loader, device, ahead=ahead, background=background)
