"""FO501 graph-retained-across-steps

What it does
Finds a value that keeps the autograd graphs of earlier steps alive. `losses.append(loss)` and `total =
total + loss` keep not just a number but the graph that computed it, with every activation that graph has
saved; a recurrent state carried over without `detach()` does the same.

Why it costs
Memory grows with every step until the job runs out of it, often after hours. On the way, the allocator has
less and less to reuse, and a backward through a carried state walks a longer graph with every step.

Evidence
Over the watched steps, a graph reachable from a live value grew by whole nodes per step, or tensors that
hold a graph stayed alive in at least every other step and their bytes grew. The reported line puts them
into whatever holds them, if that is known. There is no share and no ceiling: the cost is memory. On a GPU
the finding says in how many steps the memory is full.

Fix
Store `loss.detach()` (or `.item()`, read rarely) and detach a state that is carried over:

```diff
-losses.append(loss)
+losses.append(loss.detach())      # read with .item() when it is printed
-output, state = model(x, state)
+output, state = model(x, tuple(part.detach() for part in state))
```

Fix safety
Exact, as long as no later backward is meant to reach earlier steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatout.doctor.ceilings import on_gpu
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.ground.units import show_bytes
from flatout.measure.evidence import Evidence, Memory, Place

RULE = title_of(__doc__)
LEAST_NODES_PER_STEP = 1.0
LEAST_TENSORS_PER_STEP = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Retained:
    """Graphs and tensors that one line keeps alive."""

    place: Place | None
    holder: str | None
    nodes_per_step: float
    bytes_per_step: float


def detect(evidence: Evidence) -> list[Finding]:
    memory = evidence.memory
    if memory is None:
        return []
    return [_finding(evidence, memory, retained) for retained in _retained(memory)]


def _retained(memory: Memory) -> list[_Retained]:
    """Return one entry per line that holds graphs.

    A retained graph also keeps its activations alive, and they appear as growth at the model's lines:
    victims, without a holder of their own.  So a line that holds a graph always wins; if none is known, the
    largest growth stands for all.
    """
    graphs = [graph for graph in memory.graphs if graph.nodes_per_step >= LEAST_NODES_PER_STEP]
    tensors = [
        growth
        for growth in memory.growth
        if growth.with_graph
        and growth.bytes_per_step > 0
        and growth.tensors_per_step >= LEAST_TENSORS_PER_STEP
    ]
    held: dict[tuple[str, int], _Retained] = {}
    for graph in graphs:
        _add(held, graph.holder_place, holder=graph.holder, nodes_per_step=graph.nodes_per_step)
    for growth in tensors:
        _add(held, growth.holder_place, holder=growth.holder, bytes_per_step=growth.bytes_per_step)
    if held or not (graphs or tensors):
        return list(held.values())
    largest = max(tensors, key=lambda growth: growth.bytes_per_step, default=None)
    holders = [*(graph.holder for graph in graphs), *(growth.holder for growth in tensors)]
    return [
        _Retained(
            place=largest.place if largest else None,
            holder=next((holder for holder in holders if holder is not None), None),
            nodes_per_step=max((graph.nodes_per_step for graph in graphs), default=0.0),
            bytes_per_step=sum(growth.bytes_per_step for growth in tensors),
        )
    ]


def _add(
    held: dict[tuple[str, int], _Retained],
    place: Place | None,
    *,
    holder: str | None,
    nodes_per_step: float = 0.0,
    bytes_per_step: float = 0.0,
) -> None:
    if place is None:
        return
    key = place.at
    before = held.get(key) or _Retained(place=place, holder=None, nodes_per_step=0.0, bytes_per_step=0.0)
    held[key] = _Retained(
        place=place,
        holder=before.holder or holder,
        nodes_per_step=before.nodes_per_step + nodes_per_step,
        bytes_per_step=before.bytes_per_step + bytes_per_step,
    )


def _finding(evidence: Evidence, memory: Memory, retained: _Retained) -> Finding:
    figures = []
    if retained.nodes_per_step:
        figures.append(f"{retained.nodes_per_step:.0f} more autograd nodes are alive after every step")
    if retained.bytes_per_step:
        figures.append(f"tensors held here with their graphs: {show_bytes(retained.bytes_per_step)} per step")
    if memory.growth_bytes_per_step:  # a graph whose tensors its backward has freed shows no growth
        figures.append(
            f"all live tensors grow by {show_bytes(memory.growth_bytes_per_step)} per step "
            f"over {memory.num_steps} steps"
        )
    full = _steps_until_full(evidence, memory)
    if full is not None:
        figures.append(full)
    what = retained.holder or "a value kept here"
    if retained.nodes_per_step:
        how_much = f"{retained.nodes_per_step:.0f} nodes"
    else:
        how_much = show_bytes(retained.bytes_per_step)
    message = f"{what} keeps the autograd graphs of earlier steps alive, {how_much} more per step"
    return RULE.finding(retained.place, message, figures=figures)


def _steps_until_full(evidence: Evidence, memory: Memory) -> str | None:
    gpu = evidence.gpu
    if not on_gpu(evidence) or gpu is None or gpu.memory_bytes is None or memory.peak_bytes is None:
        return None
    if memory.growth_bytes_per_step <= 0:
        return None
    left = max(gpu.memory_bytes - memory.peak_bytes, 0)
    return f"{gpu.name} has {show_bytes(left)} left: full in {left / memory.growth_bytes_per_step:.0f} steps"
