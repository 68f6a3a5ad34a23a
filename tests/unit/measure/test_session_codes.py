from __future__ import annotations

from flatout.measure import session_codes


def test_the_codes_differ_from_each_other_and_from_those_scripts_end_with() -> None:
    codes = [value for name, value in vars(session_codes).items() if name.isupper()]
    assert len(codes) == len(set(codes)) == 2
    # 0 clean, 1 a traceback, 2 a usage error, 128 and above a signal
    assert all(2 < code < 128 for code in codes)
