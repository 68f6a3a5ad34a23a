from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flatout.measure.lines.attention_calls import NAMES, AttentionCalls
from flatout.measure.user_code import UserCode


class Seen(TorchFunctionMode):
    """Hands calls on as the counting mode does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        code = UserCode(str(Path(__file__).parent))
        self.calls = AttentionCalls(code, lambda op, where, device: self.found.append(op))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in NAMES:
            self.calls.see(name, args, result, sys._getframe(1))
        return result


def test_attention_is_found_from_product_to_product() -> None:
    q = torch.randn(2, 4, 16, 8)
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)
    with Seen() as seen:
        scores = (q @ q.transpose(-2, -1)) * 0.3
        weights = functional.dropout(functional.softmax(scores.masked_fill(mask, -1e9), dim=-1), 0.1)
        torch.matmul(weights, q)
    assert seen.found == ["attention product", "attention"]


def test_a_softmax_of_a_layer_and_a_product_without_one_are_none() -> None:
    x = torch.randn(2, 16, 32)
    with Seen() as seen:
        functional.softmax(functional.linear(x, torch.randn(32, 32)), dim=-1) @ torch.randn(32, 4)
        (x @ x.transpose(1, 2)) @ x
    assert seen.found == []
