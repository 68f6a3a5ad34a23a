from __future__ import annotations

import flatout
from flatout.api import diagnose
from flatout.doctor.examine import Diagnosis


def test_the_package_hands_these_out() -> None:
    assert flatout.diagnose is diagnose
    assert flatout.Diagnosis is Diagnosis
