"""Log-probabilities of many continuations that grow from few prompts, in one forward.

Trials of one question read the same prompt and differ from its last token on.  So a row of the batch is not a
trial but a prompt: its *trunk* is computed once, and the tokens of every trial lie behind it as *branches*,
each with its own steering.  A mask lets a branch see the trunk and itself; positions count along the branch.
The trunk's keys and values are read once for all trials instead of being copied to each.

    columns   | trunk ........ | branch 0 | branch 1 | branch 2 | padding |

Shapes: n rows, T branch tokens of a row, S columns (trunk and branches), D width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flatout.engines.steering.settings import Turn
from flatout.engines.steering.trials.steering import Steering, SteeringTables, TurnTable
from flatout.engines.steering.trials.trial_engine import TokenBranch
from flatout.ground.errors import BadInput
from flatout.multiplex.decode import forward
from flatout.multiplex.decode.cache import Cache, Prefixes, bucket_of
from flatout.multiplex.rows import Rows

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.multiplex.models.decoder import Attention, Decoder, DecoderBlock
    from flatout.multiplex.rows import RowTables

ROW_TOKENS = 256  # branch tokens behind one trunk; the mask grows with their square
TARGETS = 1024  # positions whose logits exist at once
TRUNK, PADDING, VOID = -1, -2, -3  # what a column holds, where it is no branch


@dataclass(frozen=True, slots=True)
class _Trunk:
    """A trunk and some of its branches; `numbers` says which of the caller's."""

    trunk: tuple[int, ...]
    numbers: list[int]
    num_tokens: int


class BranchScorer:
    """Scores branches in batches of at most `batch_tokens` tokens, and keeps trunks for the next call."""

    def __init__(self, decoder: Decoder, *, batch_tokens: int = 8192, trunk_tokens: int = 65536) -> None:
        if batch_tokens < 1:
            raise BadInput(f"batch_tokens={batch_tokens} is below 1", hint="give at least 1")
        self._decoder = decoder
        self.batch_tokens = batch_tokens
        self._trunks = Prefixes(max_tokens=trunk_tokens)

    def weights_changed(self) -> None:
        """Forget the trunks that were computed with other weights."""
        self._trunks.forget()

    @torch.no_grad()
    def log_probabilities(self, branches: Sequence[TokenBranch]) -> Iterator[tuple[int, list[float]]]:
        """Yield (number of a branch, the log-probabilities of its targets), batch by batch.

        A batch that does not fit the device's memory is halved, and so are the batches after it.
        """
        self._check(branches)
        waiting = _rows_of(branches)
        while waiting:
            batch = waiting[: _num_fitting([row.num_tokens for row in waiting], self.batch_tokens)]
            try:
                scored = self._run(branches, batch)
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                self.batch_tokens = max(1, len(batch) * batch[-1].num_tokens // 2)
                self._trunks.forget()
                continue
            del waiting[: len(batch)]
            yield from scored

    def _check(self, branches: Sequence[TokenBranch]) -> None:
        decoder = self._decoder
        for number, one in enumerate(branches):
            length = len(one.trunk) + len(one.tokens)
            if not one.tokens or length > decoder.max_positions:
                raise BadInput(
                    f"branch {number} has {len(one.trunk)} + {len(one.tokens)} tokens",
                    hint=f"it needs 1 of its own, and the model has {decoder.max_positions} positions",
                )
            used = (*one.trunk, *one.tokens, *(token for _, token in one.targets))
            if min(used) < 0 or max(used) >= decoder.vocabulary:
                raise BadInput(
                    f"branch {number} has tokens outside the vocabulary of {decoder.vocabulary}",
                    hint="encode it with this model's tokenizer",
                )
            if one.steering is not None:
                one.steering.check_model(num_layers=len(decoder.blocks), width=decoder.width)

    def _run(self, branches: Sequence[TokenBranch], batch: Sequence[_Trunk]) -> list[tuple[int, list[float]]]:
        decoder = self._decoder
        layout = _Layout(branches, batch, device=decoder.device)
        cache = Cache.empty(decoder, slots=len(batch), max_tokens=layout.num_columns - 1)
        self._fill_trunks([row.trunk for row in batch], cache)
        steered = _SteeredTokens(branches, layout, decoder)
        x = forward.embed(decoder, layout.tokens, layout.positions)
        plain = forward.deltas_of(decoder, {})
        tables = Rows.plain(len(batch)).tables(decoder.device)
        places = layout.places(decoder)
        x = forward.run_blocks(decoder, x, cache, places, tables, plain, run=steered.run_block)
        return self._read(x, branches, layout)

    def _fill_trunks(self, trunks: Sequence[tuple[int, ...]], cache: Cache) -> None:
        """Put every trunk's keys and values into its row, computing those that are not held."""
        rows_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for row, trunk in enumerate(trunks):
            if trunk:
                rows_of[trunk].append(row)
        held = {trunk: found for trunk in rows_of if (found := self._trunks.find(trunk)) is not None}
        absent = sorted(rows_of.keys() - held.keys(), key=len)
        while absent:
            count = _num_fitting([len(trunk) for trunk in absent], self.batch_tokens)
            held.update(self._compute_trunks(absent[:count]))
            del absent[:count]
        for trunk, rows in rows_of.items():
            cache.put(torch.tensor(rows, device=cache.storage.device), held[trunk])
            self._trunks.keep(trunk, held[trunk])

    def _compute_trunks(self, trunks: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Tensor]:
        """Compute the keys and values of trunks, [L, 2, K, length, E] each, by one plain forward."""
        decoder = self._decoder
        longest = max(len(trunk) for trunk in trunks)
        cache = Cache.empty(decoder, slots=len(trunks), max_tokens=longest)
        padded = [[*trunk, *[0] * (longest - len(trunk))] for trunk in trunks]
        steps = torch.arange(longest, device=decoder.device)[None]
        x = forward.embed(decoder, torch.tensor(padded, device=decoder.device), steps)
        slots = torch.arange(len(trunks), device=decoder.device)
        places = forward.fresh_places(decoder, slots=slots, num_tokens=longest)
        tables = Rows.plain(len(trunks)).tables(decoder.device)
        forward.run_blocks(decoder, x, cache, places, tables, forward.deltas_of(decoder, {}))
        return {trunk: cache.take(row, length=len(trunk)) for row, trunk in enumerate(trunks)}

    def _read(
        self, x: Tensor, branches: Sequence[TokenBranch], layout: _Layout
    ) -> list[tuple[int, list[float]]]:
        """Read the targets' log-probabilities; logits exist at wanted positions alone, never all at once."""
        owners, rows, columns, tokens = [], [], [], []
        for number, (row, first) in layout.starts.items():
            for index, token in branches[number].targets:
                owners.append(number)
                rows.append(row)
                columns.append(first + index)
                tokens.append(token)
        values: list[float] = []
        for start in range(0, len(tokens), TARGETS):
            part = slice(start, start + TARGETS)
            hidden = x[rows[part], columns[part]]
            wanted = torch.tensor(tokens[part], device=x.device)
            scores = forward.logits_of(self._decoder, hidden).float().log_softmax(-1)
            values += scores.gather(1, wanted[:, None])[:, 0].tolist()
        found: dict[int, list[float]] = {number: [] for number in layout.starts}
        for owner, value in zip(owners, values, strict=True):
            found[owner].append(value)
        return list(found.items())


class _Layout:
    """Where every branch token of a batch lies."""

    def __init__(
        self, branches: Sequence[TokenBranch], batch: Sequence[_Trunk], *, device: torch.device
    ) -> None:
        n, longest = len(batch), max(row.num_tokens for row in batch)
        self.num_trunk = max(len(row.trunk) for row in batch)
        self.end = self.num_trunk + longest
        self.num_columns = bucket_of(self.end)  # few shapes, and aligned ones: attention kernels ask for them
        tokens, positions = (
            torch.zeros(n, longest, dtype=torch.int64),
            torch.zeros(n, longest, dtype=torch.int64),
        )
        holders = torch.full((n, self.num_columns), VOID)
        holders[:, self.num_trunk : self.end] = PADDING
        places = torch.zeros(n, self.num_columns, dtype=torch.int64)
        self.starts: dict[int, tuple[int, int]] = {}  # number of a branch -> (row, its first token there)
        for row, one in enumerate(batch):
            length, first = len(one.trunk), 0
            holders[row, :length] = TRUNK
            places[row, :length] = torch.arange(length)
            for number in one.numbers:
                own = branches[number].tokens
                here = slice(first, first + len(own))
                tokens[row, here] = torch.tensor(own)
                positions[row, here] = torch.arange(length, length + len(own))
                holders[row, self.num_trunk + first : self.num_trunk + first + len(own)] = number
                self.starts[number] = (row, first)
                first += len(own)
        places[:, self.num_trunk : self.end] = positions
        self.tokens, self.positions = tokens.to(device), positions.to(device)
        self._holders, self._places = holders.to(device), places.to(device)

    def places(self, decoder: Decoder) -> tuple[forward.RowPlaces, ...]:
        """Place the branch tokens behind the trunks."""
        write = torch.arange(self.num_trunk, self.end, device=self.tokens.device)
        return forward.places_of(
            decoder,
            slots=None,
            write=write.expand(len(self.tokens), -1),
            positions=self.positions,
            mask=self._visible,
        )

    def _visible(self, attention: Attention) -> Tensor:
        """Return the mask [n, T, S]: a token sees its trunk and its own branch, up to its own position.

        Padding sees padding: a softmax over nothing would be NaN, and 0 times NaN is NaN.
        """
        own = self._holders[:, self.num_trunk : self.end, None]
        held, places = self._holders[:, None], self._places[:, None]
        here = self.positions[:, :, None]
        seen = ((held == own) | (held == TRUNK)) & (places <= here)
        return seen if attention.window is None else seen & (places > here - attention.window)


class _SteeredTokens:
    """Which entry of the tables changes each branch token, and at which layers."""

    def __init__(self, branches: Sequence[TokenBranch], layout: _Layout, decoder: Decoder) -> None:
        steerings = {
            id(one): one for number in layout.starts if (one := branches[number].steering) is not None
        }
        entry_of = {name: entry for entry, name in enumerate(steerings)}
        nothing = len(steerings)  # the last entry adds nothing
        parts = [(entry, part) for entry, one in enumerate(steerings.values()) for part in one.parts]
        adding = {part.layer for _, part in parts if part.mode == "add"}
        tables = SteeringTables(adding, num_entries=nothing + 1, decoder=decoder)
        tables.write(list(steerings.values()))
        entry = torch.full(layout.tokens.shape, nothing)
        for number, (row, first) in layout.starts.items():
            branch = branches[number]
            if branch.steering is not None:
                steered = slice(first + branch.first_steered, first + len(branch.tokens))
                entry[row, steered] = entry_of[id(branch.steering)]
        self._entry = entry.to(decoder.device)
        self._added = {id(decoder.blocks[layer]): table for layer, table in tables.of_layer.items()}
        turning: dict[tuple[int, Turn], list[tuple[int, Steering]]] = defaultdict(list)
        for place, part in parts:
            if part.mode != "add":
                turning[part.layer, part.mode].append((place, part))
        self._turned: dict[int, list[TurnTable]] = defaultdict(list)
        for (layer, mode), held in turning.items():
            self._turned[id(decoder.blocks[layer])].append(TurnTable(held, nothing + 1, mode=mode))

    def run_block(
        self,
        block: DecoderBlock,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        place: forward.RowPlaces,
        tables: RowTables,
        deltas: forward.Deltas,
    ) -> Tensor:
        """Run a block of `forward`, and change what its tokens change."""
        x = forward.run_block(block, x, keys, values, place, tables, deltas)
        added = self._added.get(id(block))
        if added is not None:
            x = x + added[self._entry]
        for turned in self._turned.get(id(block), ()):
            x = turned.steer(x, entry=self._entry)
        return x


def _rows_of(branches: Sequence[TokenBranch]) -> list[_Trunk]:
    """Put branches behind their trunks, rows of like size beside one another."""
    by_trunk: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, one in enumerate(branches):
        by_trunk[one.trunk].append(number)
    rows = []
    for trunk, numbers in by_trunk.items():
        # Without a trunk nothing is shared: branches beside one another would only widen the mask.
        room = ROW_TOKENS if trunk else 1
        held: list[int] = []
        size = 0
        for number in numbers:
            own = len(branches[number].tokens)
            if held and size + own > room:
                rows.append(_Trunk(trunk, held, size))
                held, size = [], 0
            held.append(number)
            size += own
        rows.append(_Trunk(trunk, held, size))
    return sorted(rows, key=lambda row: (row.num_tokens, len(row.trunk)))


def _num_fitting(lengths: Sequence[int], batch_tokens: int) -> int:
    """Count how many of some ascending lengths fit a batch padded to the last of them; at least one."""
    count = 1
    while count < len(lengths) and (count + 1) * lengths[count] <= batch_tokens:
        count += 1
    return count
