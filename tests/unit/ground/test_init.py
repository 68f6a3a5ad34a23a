from __future__ import annotations

from flatout.ground import OnCount, OnProgress, ignore


def test_what_is_ignored_may_be_words_or_counts() -> None:
    say: OnProgress = ignore
    count: OnCount = ignore
    say("tracing")
    count(1, 2)
