"""Keep loader workers for the whole run, instead of starting them for every epoch."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.source import Refused, Replacement, SourceFile
from flatout.tuner.patches.syntax import argument, call_of, walk
from flatout.tuner.patches.transforms.pinned_copies import with_argument

NUM_WORKERS_PLACE = 5


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    changes: dict[cst.CSTNode, Replacement] = {}
    for each in walk(source.module):
        if not isinstance(each, cst.Call) or (call_of(each) or "").rpartition(".")[2] != "DataLoader":
            continue
        if any(arg.star for arg in each.args) or (
            lines and not any(source.holds(each, line) for line in lines)
        ):
            continue
        workers = argument(each, "num_workers", NUM_WORKERS_PLACE)
        if workers is None or argument(each, "persistent_workers") is not None:
            continue
        known = isinstance(workers, cst.Integer)
        if known and isinstance(workers, cst.Integer) and workers.value == "0":
            continue
        changes[each] = with_argument(
            each, "persistent_workers", "True" if known else f"{source.code(workers)} > 0"
        )
    if not changes:
        raise Refused("no DataLoader here starts its workers again for every epoch")
    return source.replaced(changes)


PATCH = Patch(rewrite, "keep the loader's workers from epoch to epoch", safety="exact", answers=("FO102",))
