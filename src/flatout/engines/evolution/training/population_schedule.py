"""Which members run together, and where: a population cut into chunks.

A chunk is some whole pairs of members times all prompts: one call of the generator, whose slots are refilled
from the chunk's requests.  What a row computes may depend, in the last bits, on the shape of its batch; so
the cut is a function of the config and never of the number of processes where results must agree bit for bit
(on a CPU).  There a chunk is as many members as fill the rows once, and chunks are dealt to the ranks in
turn.  On a GPU, speed decides: one long queue per rank, cut only where its factors would not fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput, BatchDoesNotFit
from flatout.ground.units import round_up, show_bytes

if TYPE_CHECKING:
    from flatout.multiplex.models.decoder import Decoder

CPU_ROWS = 64  # beyond it a product on a CPU is no faster per row
GPU_ROWS = 2048  # beyond it a decode step is bound by the cache, not by the weights
ROWS_STEP = 64
USABLE_SHARE = 0.8  # of the free memory: activations of a prefill, graphs and fragments take the rest
FACTORS_SHARE = 0.3  # of what is usable


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Bytes of the parts whose size is chosen here."""

    row_bytes: int  # cache and logits of one row
    variant_bytes: int  # factors of one variant over all targets
    free_bytes: int | None  # None: not a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class PopulationSchedule:
    """Chunks of members, in order, and the rows that run at once."""

    chunks: tuple[range, ...]
    rows: Decision[int]
    chunk_members: Decision[int]

    def of_rank(self, rank: int, *, num_ranks: int) -> tuple[range, ...]:
        """Return the chunks that one rank runs."""
        return self.chunks[rank::num_ranks]


def schedule(
    *,
    population: int,
    prompts: int,
    antithetic: bool,
    needs: Needs,
    rows: int | None = None,
    chunk_members: int | None = None,
    num_ranks: int = 1,
) -> PopulationSchedule:
    """Cut `population` members, each with `prompts` rows, into chunks."""
    chosen_rows = _rows(population * prompts, needs=needs, asked=rows)
    step = 2 if antithetic else 1
    chosen_members = _chunk_members(
        population,
        step=step,
        wave=round_up(math.ceil(chosen_rows.value / prompts), step),
        needs=needs,
        asked=chunk_members,
        num_ranks=num_ranks,
    )
    size = chosen_members.value
    chunks = tuple(range(start, min(start + size, population)) for start in range(0, population, size))
    return PopulationSchedule(chunks=chunks, rows=chosen_rows, chunk_members=chosen_members)


def halve_rows(found: PopulationSchedule) -> PopulationSchedule:
    """Return the same chunks with half as many rows at once."""
    rows = found.rows.value
    if rows < 2:
        raise BatchDoesNotFit(
            "not even one row fits into memory",
            hint="use fewer new tokens, shorter prompts or a smaller rank",
        )
    # Pairs stay side by side: an even number of rows where there are as many.
    fewer = rows // 2 if rows < 4 else rows // 4 * 2
    reason = f"{rows} did not fit into memory"
    return replace(found, rows=Decision(value=fewer, reason=reason, source="measured"))


def _rows(total: int, *, needs: Needs, asked: int | None) -> Decision[int]:
    if asked is not None:
        if asked < 1:
            raise BadInput(f"rows={asked} is below 1", hint="give at least 1")
        return Decision(value=min(asked, total), reason="as asked", source="assumed")
    if needs.free_bytes is None:
        reason = f"a product on a CPU is no faster per row beyond {CPU_ROWS} rows"
        return Decision(value=min(CPU_ROWS, total), reason=reason, source="assumed")
    usable_bytes = int(needs.free_bytes * USABLE_SHARE * (1 - FACTORS_SHARE))
    fitting = usable_bytes // needs.row_bytes
    if fitting < 1:
        raise BatchDoesNotFit(
            f"one row takes {show_bytes(needs.row_bytes)} of cache; {show_bytes(usable_bytes)} are usable",
            hint="use fewer new tokens or shorter prompts",
        )
    most = min(fitting, GPU_ROWS, total)
    value = most // ROWS_STEP * ROWS_STEP if ROWS_STEP <= most < total else most
    reason = f"{show_bytes(needs.row_bytes)} per row, {show_bytes(usable_bytes)} usable; at most {GPU_ROWS}"
    return Decision(value=value, reason=reason, source="computed")


def _chunk_members(
    population: int, *, step: int, wave: int, needs: Needs, asked: int | None, num_ranks: int
) -> Decision[int]:
    if asked is not None:
        if asked < 1 or asked % step:
            raise BadInput(f"chunk_members={asked} does not hold whole pairs", hint="give an even number")
        return Decision(value=min(asked, population), reason="as asked", source="assumed")
    if needs.free_bytes is None:
        reason = "one wave of rows, whatever the number of ranks: the same batches, the same bits"
        return Decision(value=min(wave, population), reason=reason, source="computed")
    fitting = int(needs.free_bytes * USABLE_SHARE * FACTORS_SHARE) // needs.variant_bytes * step
    if fitting < step:
        raise BatchDoesNotFit(
            f"the factors of one variant do not fit: they take {show_bytes(needs.variant_bytes)}",
            hint="use a smaller rank or fewer targets",
        )
    share = round_up(math.ceil(population / num_ranks), step)
    # Chunks of equal size: a last small one would leave its rows empty.
    num_chunks = math.ceil(share / fitting)
    value = min(round_up(math.ceil(share / num_chunks), step), population)
    reason = f"{num_chunks} per rank: factors take {show_bytes(needs.variant_bytes)} per variant"
    return Decision(value=value, reason=reason, source="computed")


def needs_of(
    decoder: Decoder,
    *,
    max_tokens: int,
    rank: int,
    noise: Literal["int8", "normal"],
    targets: tuple[str, ...],
) -> Needs:
    """Return the bytes that a decoder's rows and variants take."""
    import torch

    attentions = [block.attention for block in decoder.blocks]
    element_bytes = decoder.embedding.element_size()
    cache_bytes = (
        sum(2 * each.num_kv_heads * each.head_width for each in attentions) * max_tokens * element_bytes
    )
    logits_bytes = 3 * 4 * decoder.vocabulary  # in fp32, sorted and as probabilities where rows are sampled
    projections = decoder.projections()
    widths = sum(sum(projections[name].weight.shape) for name in targets)
    free_bytes = None
    if decoder.device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(decoder.device)[0]
    return Needs(
        row_bytes=cache_bytes + logits_bytes,
        variant_bytes=widths * rank * (1 if noise == "int8" else element_bytes),
        free_bytes=free_bytes,
    )
