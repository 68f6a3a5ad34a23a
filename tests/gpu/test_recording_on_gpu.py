"""A recording that breaks off leaves the process as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.engines.adapters.lora.recorder import capture

pytestmark = pytest.mark.gpu


def asking_step(batches: Sequence[Any]) -> Tensor:
    drawn = F.dropout(torch.ones(8, device="cuda"))
    return drawn * drawn.sum().item()  # cannot be recorded


def test_random_numbers_go_on_where_they_were() -> None:
    torch.cuda.manual_seed(3)
    F.dropout(torch.ones(8, device="cuda"))
    before = torch.cuda.get_rng_state()
    expected = F.dropout(torch.ones(64, device="cuda"))
    torch.cuda.set_rng_state(before)
    with pytest.raises(RuntimeError):
        capture(asking_step, [], device=torch.device("cuda"), pool=torch.cuda.graph_pool_handle(), kept=None)
    assert torch.equal(F.dropout(torch.ones(64, device="cuda")), expected)
    assert not torch.cuda.is_current_stream_capturing()
