"""Workers that stay, where there are any."""

from __future__ import annotations

import pytest

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.lasting_workers import PATCH
from tests.unit.tuner.patches.test_patch import rewrite


def test_workers_stay_where_there_are_any() -> None:
    plain = "DataLoader(d, num_workers=4)\n"
    assert rewrite(PATCH, plain) == plain.replace("4)", "4, persistent_workers=True)")
    given = "data.DataLoader(d, 8, True, None, None, args.n)\n"
    assert "persistent_workers=args.n > 0)" in rewrite(PATCH, given)


@pytest.mark.parametrize("given", ["", ", num_workers=0", ", num_workers=2, persistent_workers=p", ", **kw"])
def test_a_loader_without_workers_to_keep_is_refused(given: str) -> None:
    with pytest.raises(Refused, match="starts its workers again"):
        PATCH.rewrite(SourceFile(f"DataLoader(d{given})\n"), ())
