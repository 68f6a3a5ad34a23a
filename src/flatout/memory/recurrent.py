"""Recurrent layers as cuDNN runs them: one call per layer stack, with a reserve kept for the backward."""

from __future__ import annotations

import torch


def install(library: torch.library.Library) -> None:
    """Nothing yet."""
