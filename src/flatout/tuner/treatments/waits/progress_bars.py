"""Redraw tqdm's progress bars once a second, instead of whenever the script sets their text."""

from __future__ import annotations

import sys
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value

SECONDS = 1


def propose(case: Case) -> list[Value]:
    """Propose it if the script draws one."""
    return [SECONDS] if "tqdm" in case.source else []


def install(patches: Patches, value: Value) -> None:
    """Act when the script imports tqdm: it may be missing, or another version may be imported later."""
    from flatout.ground.script.main import after_import

    def change(_module: Any) -> None:
        bar: Any = sys.modules["tqdm.std"].tqdm
        real_init, real_postfix, real_description = bar.__init__, bar.set_postfix, bar.set_description

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            real_init(
                self, *args, **{**kwargs, "mininterval": max(float(value), kwargs.get("mininterval", 0.1))}
            )

        def set_postfix(self: Any, ordered_dict: Any = None, refresh: bool = True, **kwargs: Any) -> None:
            real_postfix(self, ordered_dict, False, **kwargs)

        def set_description(self: Any, desc: Any = None, refresh: bool = True) -> None:
            real_description(self, desc, False)

        patches.replace(bar, "__init__", init)
        patches.replace(bar, "set_postfix", set_postfix)
        patches.replace(bar, "set_description", set_description)

    after_import("tqdm", change)


TREATMENT = Treatment(propose, install, "draw progress bars once a second", safety="exact")
