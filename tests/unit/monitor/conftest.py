"""What the tests of the monitor share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.monitor_played import Played


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(root=tmp_path)
