"""The process that runs the script, which replaces it as `__main__`.

Treatments are installed when the script imports torch.  In a trial the meter counts steps, ends the script
when it has enough, and writes what it saw; the script's own files go to a folder of the trial.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from flatout.ground.codec import decode
from flatout.ground.script.command import ScriptCommand
from flatout.ground.script.main import after_import, run_as_main, show_error
from flatout.measure.patches import Patches
from flatout.tuner.treatment import Dose, install

MODULE = "flatout.tuner.child"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOptions:
    """How a trial measures."""

    result: str  # the file for the meter's result
    scratch: str  # the folder for the script's writes
    warmup: int  # steps before the first block
    blocks: int
    block_steps: int
    checked: tuple[int, ...]  # steps, from 1, whose gradients and parameters are hashed
    first_step: str | None = None  # a file for the gradients and changes of the first step
    all_batches: bool = False  # hash every batch, if times do not count
    same_random: bool = False  # compiled code draws the random numbers of eager code
    fixed_samples: bool = False  # a dataset draws the same numbers for a sample in any process
    plain: bool = False  # without dropout, to compare gradients
    double: bool = False  # in 64 bits, to get the true gradients
    nudge: bool = False  # change the weights in their last bit, to see what rounding alone does
    counts: bool = False  # count launches, waits and bytes of the first block's steps
    seed: int = 0  # added to every seed that the script sets
    arms: tuple[Dose, ...] = ()  # switched in blocks of this run, instead of `blocks`
    seconds: float = 0.0  # for those blocks, at most
    most_block_steps: int = 0  # a short block may grow so far, if only times count
    turn: tuple[int, int] | None = None  # files to write to and to read from after the first step


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildOptions(ScriptCommand):
    """What the process does."""

    doses: tuple[Dose, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)  # file -> the file of its patched text
    trial: TrialOptions | None = None
    parent: int | None = None


def main(at_start: Collection[str]) -> None:
    options = decode(ChildOptions, json.loads(sys.argv[1]))
    if options.trial is not None:
        _run_trial(options, options.trial, at_start)
    after_import("torch", lambda _torch: install(options.doses, Patches()))
    try:
        run_as_main(options.command, module=options.module, at_start=at_start)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            show_error(error)
            sys.excepthook = lambda *_: None
        raise


def _run_trial(options: ChildOptions, trial: TrialOptions, at_start: Collection[str]) -> NoReturn:
    from flatout.measure.run.lineage import end_with

    end_with(options.parent)
    from flatout.measure.process.redirect import redirect_torch, redirect_writes
    from flatout.tuner.patches.serve import serve
    from flatout.tuner.trial.meter import Meter

    patches = Patches()
    serve({path: Path(text).read_text(encoding="utf-8") for path, text in options.texts.items()}, patches)
    meter = Meter(trial, patches)
    mirror = redirect_writes(patches, Path(trial.scratch))

    def begin(_torch: ModuleType) -> None:
        redirect_torch(patches, mirror)
        meter.prepare()
        install(options.doses, patches)
        meter.install()

    after_import("torch", begin)
    meter.run(lambda: run_as_main(options.command, module=options.module, at_start=at_start))
