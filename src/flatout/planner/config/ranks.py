"""How many processes train together, and whether they share one model between them.

The effective batch counts all of them.  A plan is made for DDP, in which each holds the whole model: where a
config shards it, a process needs less than is planned, and that is said.
"""

from __future__ import annotations

from flatout.decisions import Decision
from flatout.planner.config.documents import plain_value
from flatout.planner.config.job_config import Found, Stage
from flatout.planner.config.knobs import Mapped

DEVICES, NODES = "trainer.devices", "trainer.num_nodes"
STRATEGIES = ("trainer.strategy", "trainer.strategy.class_path", "fsdp", "deepspeed")
SHARDING = ("fsdp", "deepspeed", "full_shard", "shard_grad_op", "hybrid_shard")


def find_ranks(stage: Stage, mapped: Mapped, *, given: int | None) -> Decision[int]:
    """As the command line says, the mapping file, or the devices and nodes of a Lightning config."""
    if given is not None:
        return Decision(value=given, reason="given on the command line", source="assumed")
    if mapped.ranks is not None:
        return Decision(value=mapped.ranks, reason="the mapping file says so", source="assumed")
    listed = [key for key in stage.values if key.startswith(f"{DEVICES}.")]
    devices, nodes = stage.find(DEVICES), stage.find(NODES)
    count = len(listed) or (None if devices is None else _count(devices))
    num_nodes = None if nodes is None else _count(nodes)
    if count is not None:
        where = devices.where if devices is not None else DEVICES
        times = f", on each of {num_nodes} nodes" if num_nodes is not None and num_nodes > 1 else ""
        return Decision(value=count * (num_nodes or 1), reason=f"from {where}{times}", source="computed")
    reason = "the config names no number of processes"
    if devices is not None and devices.value is not None:
        reason = f"{devices.where} is {devices.value!r}, which names no number: give it with --ranks"
    return Decision(value=1, reason=reason, source="assumed")


def _count(found: Found) -> int | None:
    """As Lightning reads it: 2 and "2" are two of them, "0,3" is a list, -1 and "auto" are what there is."""
    value = found.value
    if isinstance(value, str) and "," in value:
        return len([word for word in value.split(",") if word.strip()]) or None
    number = plain_value(value) if isinstance(value, str) else value
    return number if type(number) is int and number >= 1 else None


def sharding_note(stage: Stage) -> str | None:
    """That the config spreads the model over its processes, which no plan does."""
    for key in STRATEGIES:
        found = stage.values.get(key)
        words = "" if found is None or not found.value else f"{key}={found.value}".casefold()
        if found is not None and any(word in words for word in SHARDING):
            return (
                f"{found.where} shards the model; a plan holds all of it in every process, as DDP does, so "
                "that less may be needed (flatout.plan(..., parallel='fsdp2') estimates one process)"
            )
    return None
