"""The model compiled by torch.compile."""

from __future__ import annotations

import shutil

from flatout.measure.patches import Patches
from flatout.tuner.outermost import on_first_call
from flatout.tuner.treatment import Case, Treatment, Value


def propose(case: Case) -> list[Value]:
    """Where a compiler is at hand, and shapes do not change with each batch."""
    evidence = case.evidence
    ragged = any(loader.lengths is not None for loader in evidence.loaders)
    if evidence.job.device == "cpu" and shutil.which("g++") is None:
        return []
    return ["dynamic"] if ragged else ["default"]


def install(patches: Patches, value: Value) -> None:
    options = {"dynamic": True} if value == "dynamic" else {} if value == "default" else {"mode": str(value)}
    on_first_call(patches, lambda module: module.compile(**options))


TREATMENT = Treatment(
    name="compile",
    safety="reordered",
    summary="compile the model with torch.compile",
    propose=propose,
    install=install,
    rules=("launch-bound-step",),
)
