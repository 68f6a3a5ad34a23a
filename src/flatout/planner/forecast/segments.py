"""How the allocator of a planned job is set: segments of fixed size, or ones that grow.

PyTorch reads the setting from the environment of the job: `PYTORCH_ALLOC_CONF`, or where that is not set
`PYTORCH_CUDA_ALLOC_CONF`.  A plan takes it from where it is made, unless it is told otherwise, and says which
it took: the job may run elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from flatout.decisions import Decision
from flatout.errors import BadInput
from flatout.memory.predict.allocator import expandable_segments_of

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first that is set counts


def find_segments(
    wanted: bool | None = None, *, profile: bool = False, environment: Mapping[str, str] | None = None
) -> Decision[bool]:
    """Whether segments are expandable: what is `wanted`, else what the environment says.

    A probe runs under the environment's setting, so that it cannot measure another.
    """
    found = _of_environment(os.environ if environment is None else environment)
    if wanted is None:
        return found
    flag = "--expandable-segments" if wanted else "--no-expandable-segments"
    if profile and wanted != found.value:
        raise BadInput(
            f"{flag} cannot be measured with --profile: the probe runs under {found.reason}",
            hint=f"set {VARIABLES[0]}=expandable_segments:{wanted} instead of the flag",
        )
    return Decision(value=wanted, reason=f"{flag} was given", source="assumed")


def _of_environment(environment: Mapping[str, str]) -> Decision[bool]:
    for name in VARIABLES:
        if name in environment:
            value = expandable_segments_of(environment[name])
            return Decision(value=value, reason=f"{name} as it is set here", source="assumed")
    return Decision(value=False, reason="PyTorch's default, as nothing is set here", source="assumed")
