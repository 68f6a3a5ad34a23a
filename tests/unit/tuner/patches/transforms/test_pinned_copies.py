"""Loaders that pin and copies that do not wait."""

from __future__ import annotations

import pytest

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.pinned_copies import PATCH
from tests.unit.tuner.patches.test_patch import rewrite

TEXT = """
loader = DataLoader(
    dataset,
    batch_size=4,
)
model.to(device)
for x, y in loader:
    x, y = x.to(device), y.to(device, torch.float32)
"""


def test_loader_and_copies_change_together_and_keep_their_layout() -> None:
    new = rewrite(PATCH, TEXT)
    assert "    batch_size=4,\n    pin_memory=True,\n)" in new and "model.to(device)\n" in new
    assert "x.to(device, non_blocking=True), y.to(device, torch.float32)" in new
    assert rewrite(PATCH, "a = data.DataLoader(d)\n") == "a = data.DataLoader(d, pin_memory=True)\n"
    assert rewrite(PATCH, "DataLoader(\n    d, 4\n)\n") == "DataLoader(\n    d, 4, pin_memory=True\n)\n"


def test_a_file_without_a_loader_is_refused() -> None:
    for text in ("for x in y:\n    x.to(device)\n", "DataLoader(d, pin_memory=False)\n", "DataLoader(*a)\n"):
        with pytest.raises(Refused, match="no DataLoader"):
            PATCH.rewrite(SourceFile(text), ())
