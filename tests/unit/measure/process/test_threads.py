from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flatout.measure.patches import Patches
from flatout.measure.process.threads import ThreadsWatch
from flatout.measure.user_code import UserCode
from tests.support.measure import line_of


@pytest.fixture
def watch() -> Iterator[ThreadsWatch]:
    patches, before = Patches(), torch.get_num_threads()
    watch = ThreadsWatch(UserCode(str(Path(__file__).parent)))
    watch.install(patches)
    yield watch
    patches.undo()
    torch.set_num_threads(before)


def test_the_line_that_sets_the_number_is_known(watch: ThreadsWatch) -> None:
    found = watch.evidence()
    assert found is not None and found.place is None
    torch.set_num_threads(3)  # at: here
    found = watch.evidence()
    assert found is not None and found.num == 3
    assert found.place is not None and found.place.line == line_of(Path(__file__), "here")


def test_what_an_arm_sets_is_not_the_jobs(watch: ThreadsWatch) -> None:
    watch.held = 5
    torch.set_num_threads(2)
    found = watch.evidence()
    assert found is not None and (found.num, found.place) == (5, None)
