from __future__ import annotations

import gc
from pathlib import Path

from torch.optim.lr_scheduler import LRScheduler

from flatout.measure.clock import Clock
from flatout.measure.evidence import Evidence
from flatout.measure.patches import Patches
from flatout.measure.process.watch import ProcessWatch
from flatout.measure.user_code import UserCode


def test_everything_is_a_field_of_evidence_and_is_taken_off_again() -> None:
    patches, made, callbacks = Patches(), LRScheduler.__init__, list(gc.callbacks)
    watch = ProcessWatch(Clock(), UserCode(str(Path(__file__).parent)))
    watch.install(patches)
    watch.step_end("real")
    assert watch.evidence(real_s=1.0).keys() <= Evidence.__dataclass_fields__.keys()
    patches.undo()
    assert LRScheduler.__init__ is made and gc.callbacks == callbacks
