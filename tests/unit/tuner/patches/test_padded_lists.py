"""Whether the reader of sequences pads and stacks them, in the ways people write that."""

from __future__ import annotations

import libcst as cst
import pytest

from flatout.tuner.patches.padded_lists import find_consumer
from flatout.tuner.patches.source import SourceFile

PADDING = """
for b in x:
    out.append(b)
longest = max(s.shape[0] for s in out)
padded = []
for s in out:
    if s.shape[0] < longest:
        zeros = torch.zeros((longest - s.shape[0], s.shape[1]))
        s = torch.cat((s, zeros))
    padded.append(s)
y = torch.stack(padded)
"""


def consumer(text: str) -> tuple[str | None, int, tuple[str, ...]]:
    source = SourceFile(text)
    loop = next(each for each in source.module.body if isinstance(each, cst.For))
    found = find_consumer(source, loop, "out")
    whole = None if found.whole is None else source.code(found.whole)
    return whole, len(found.removed), found.lengths


def test_a_loop_that_pads_with_zeros_is_seen() -> None:
    assert consumer(PADDING) == ("torch.stack(padded)", 3, ())
    assert consumer(PADDING + "print(longest)\n") == ("torch.stack(padded)", 3, ("longest",))
    plain = "for b in x:\n    out.append(b)\n"
    assert consumer(plain + "y = torch.stack(out) * 2\n")[0] == "torch.stack(out)"
    assert consumer(plain + "y = pad_sequence(out, batch_first=True)\n")[0] is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.zeros(", "torch.ones("),
        ("longest - s.shape[0], s", "longest - s.shape[1], s"),
        ("y = torch.stack(padded)", "y = torch.stack(padded, 1)"),
        ("y = torch.stack(padded)", "y = torch.stack(padded), padded"),
        ("    padded.append(s)", "    padded.append(s * 2)"),
        ("max(", "min("),
        ("s = torch.cat((s, zeros))", "s = torch.cat((zeros, s))"),
    ],
)
def test_other_readers_are_not_taken_for_it(old: str, new: str) -> None:
    assert old in PADDING
    assert consumer(PADDING.replace(old, new))[0] is None
    left = "for b in x:\n    out.append(b)\ny = pad_sequence(out)\n"
    assert consumer(left)[0] is None
