"""Compile the model with torch.compile; give up if it recompiles again and again."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.first_call import on_first_call
from flatout.tuner.step_hooks import around_steps
from flatout.tuner.treatment import Case, Treatment, Value

BUSY = 0.9  # of the step: graphs save launches, and a busy GPU does not wait for those
MOST_RECOMPILATIONS = 6  # training and evaluation, a last batch, and one surprise need a few


def propose(case: Case) -> list[Value]:
    """Propose it if a compiler is installed: dynamic if shapes vary, and with CUDA graphs on an idle GPU."""
    evidence = case.evidence
    ragged = any(loader.lengths is not None for loader in evidence.loaders)
    if evidence.compilation is not None or (evidence.job.device == "cpu" and shutil.which("g++") is None):
        return []
    if ragged:
        return ["dynamic"]
    busy = evidence.kernels.busy_share if evidence.kernels is not None else None
    idles = evidence.job.device == "cuda" and (busy is None or busy < BUSY)
    return ["default", "reduce-overhead"] if idles else ["default"]


def install(patches: Patches, value: Value) -> None:
    options = {"dynamic": True} if value == "dynamic" else {} if value == "default" else {"mode": str(value)}
    compiled: list[Any] = []
    num_before = num_recompilations()

    def begin(module: Any) -> None:
        module.compile(**options)
        compiled.append(module)

    def after_step(_optimizer: Any) -> None:
        if value == "reduce-overhead":
            import torch

            torch.compiler.cudagraph_mark_step_begin()  # the last step's outputs may be overwritten
        if compiled and num_recompilations() - num_before > MOST_RECOMPILATIONS:
            for module in compiled:
                module._compiled_call_impl = None
            compiled.clear()
            print("flatout: giving up on compile: shapes or values change too often", file=sys.stderr)

    on_first_call(patches, begin)
    around_steps(patches, after=after_step)


def num_recompilations() -> int:
    """Return how often a function was recompiled, by dynamo's own records."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    return sum(record.recompile_reason is not None for record in dynamo._compilation_metrics)


TREATMENT = Treatment(
    propose, install, "compile the model with torch.compile", safety="reordered", likely=1.1
)
