"""Compute attention of Hugging Face models in one kernel (SDPA) instead of step by step."""

from __future__ import annotations

import re
import sys
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.first_call import on_first_call
from flatout.tuner.treatment import Case, Treatment, Value

EAGER = re.compile(r"attn_implementation\W+eager")


def propose(case: Case) -> list[Value]:
    """Propose it if the script asks for eager attention, but not for the weights that only this returns."""
    return ["sdpa"] if EAGER.search(case.source) and "output_attentions" not in case.source else []


def install(patches: Patches, value: Value) -> None:
    def change(module: Any) -> None:
        transformers = sys.modules.get("transformers")
        if transformers is None:
            return
        for each in module.modules():
            if isinstance(each, transformers.PreTrainedModel):
                if each.config._attn_implementation == "eager":
                    each.set_attn_implementation(str(value))
                return  # it passes the setting on to its parts

    on_first_call(patches, change)


TREATMENT = Treatment(
    propose, install, "compute attention of Hugging Face models in one kernel", safety="reordered"
)
