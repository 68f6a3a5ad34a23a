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

from flatout.engines.steering.trials.steered_model import Steering
from flatout.errors import BadInput
from flatout.multiplex.decode import forward
from flatout.multiplex.decode.cache import Cache, Prefixes, bucket_of
from flatout.multiplex.rows import Rows

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.multiplex.models.decoder import Attention, Block, Decoder
    from flatout.multiplex.rows import RowTables

ROW_TOKENS = 256  # branch tokens behind one trunk; the mask grows with their square
TARGETS = 1024  # positions whose logits exist at once
TRUNK, PADDING, VOID = -1, -2, -3  # what a column holds, where it is no branch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """Tokens behind a trunk, steered from the `first_steered`-th on.

    `targets` are (index of a token here, token that may follow it): their log-probabilities are wanted.
    """

    trunk: tuple[int, ...]
    tokens: tuple[int, ...]
    targets: tuple[tuple[int, int], ...]
    steering: Steering | None = None
    first_steered: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    """A trunk and some of its branches; `numbers` says which of the caller's."""

    trunk: tuple[int, ...]
    numbers: list[int]
    num_tokens: int


class Grove:
    """Branches scored in batches of at most `batch_tokens` tokens; trunks are kept for the next call."""

    def __init__(self, decoder: Decoder, *, batch_tokens: int = 8192, trunk_tokens: int = 65536) -> None:
        if batch_tokens < 1:
            raise BadInput(f"batch_tokens={batch_tokens}", hint="take at least 1")
        self._decoder = decoder
        self.batch_tokens = batch_tokens
        self._trunks = Prefixes(max_tokens=trunk_tokens)

    def weights_changed(self) -> None:
        """Forget the trunks that were computed with other weights."""
        self._trunks.forget()

    @torch.no_grad()
    def log_probabilities(self, branches: Sequence[Branch]) -> Iterator[tuple[int, list[float]]]:
        """(number of a branch, the log-probabilities of its targets), batch by batch.

        A batch that does not fit the device's memory is halved, and so are the batches after it.
        """
        self._check(branches)
        waiting = _rows_of(branches)
        while waiting:
            batch = _first_batch(waiting, self.batch_tokens)
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

    def _check(self, branches: Sequence[Branch]) -> None:
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
            check_steering(one.steering, decoder)

    def _run(self, branches: Sequence[Branch], batch: Sequence[_Row]) -> list[tuple[int, list[float]]]:
        decoder = self._decoder
        layout = _Layout(branches, batch, device=decoder.device)
        cache = Cache(
            torch.zeros(
                _storage_shape(decoder, rows=len(batch), columns=layout.num_columns),
                dtype=decoder.dtype,
                device=decoder.device,
            )
        )
        self._plant([row.trunk for row in batch], cache)
        added = _Added(branches, layout, decoder)
        x = forward.embed(decoder, layout.tokens, layout.positions)
        plain = forward.deltas_of(decoder, {})
        tables = Rows.plain(len(batch)).tables(decoder.device)
        x = forward.run_blocks(decoder, x, cache, layout.places(decoder), tables, plain, run=added.run_block)
        return self._read(x, branches, layout)

    def _plant(self, trunks: Sequence[tuple[int, ...]], cache: Cache) -> None:
        """Put every trunk's keys and values into its row, computing those that are not held."""
        rows_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for row, trunk in enumerate(trunks):
            if trunk:
                rows_of[trunk].append(row)
        absent = sorted((trunk for trunk in rows_of if self._trunks.find(trunk) is None), key=len)
        grown: dict[tuple[int, ...], Tensor] = {}
        while absent:
            count = 1
            while count < len(absent) and (count + 1) * len(absent[count]) <= self.batch_tokens:
                count += 1
            grown.update(self._grow(absent[:count]))
            del absent[:count]
        for trunk, rows in rows_of.items():
            held = grown[trunk] if trunk in grown else self._trunks.find(trunk)
            assert held is not None, "a trunk is held or was grown"
            cache.put(torch.tensor(rows, device=cache.storage.device), held)
        for trunk, held in grown.items():
            self._trunks.keep(trunk, held)

    def _grow(self, trunks: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Tensor]:
        """The keys and values of trunks, [L, 2, K, length, E] each, by one plain forward."""
        decoder = self._decoder
        longest = max(len(trunk) for trunk in trunks)
        slots = torch.arange(len(trunks), device=decoder.device)
        shape = _storage_shape(decoder, rows=len(trunks), columns=longest)
        cache = Cache(torch.zeros(shape, dtype=decoder.dtype, device=decoder.device))
        padded = [[*trunk, *[0] * (longest - len(trunk))] for trunk in trunks]
        steps = torch.arange(longest, device=decoder.device)[None]
        x = forward.embed(decoder, torch.tensor(padded, device=decoder.device), steps)
        places = forward.fresh_places(decoder, slots=slots, num_tokens=longest)
        tables = Rows.plain(len(trunks)).tables(decoder.device)
        forward.run_blocks(decoder, x, cache, places, tables, forward.deltas_of(decoder, {}))
        return {trunk: cache.take(row, length=len(trunk)) for row, trunk in enumerate(trunks)}

    def _read(self, x: Tensor, branches: Sequence[Branch], layout: _Layout) -> list[tuple[int, list[float]]]:
        """Logits exist at the wanted positions alone, and never for all of them at once."""
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

    def __init__(self, branches: Sequence[Branch], batch: Sequence[_Row], *, device: torch.device) -> None:
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

    def places(self, decoder: Decoder) -> tuple[forward.Place, ...]:
        """Blocks of one kind share one `Place`."""
        write = torch.arange(self.num_trunk, self.end, device=self.tokens.device)
        made: dict[tuple[object, ...], forward.Place] = {}
        places = []
        for block in decoder.blocks:
            attention = block.attention
            kind = (id(attention.cos), attention.window, attention.softcap)
            if kind not in made:
                cos = None if attention.cos is None else attention.cos[self.positions][:, :, None]
                sin = None if attention.sin is None else attention.sin[self.positions][:, :, None]
                made[kind] = forward.Place(
                    None, write.expand(len(self.tokens), -1), self._visible(attention), cos, sin
                )
            places.append(made[kind])
        return tuple(places)

    def _visible(self, attention: Attention) -> Tensor:
        """[n, T, S]: the trunk and the own branch, up to the own position.

        Padding sees padding: a softmax over nothing would be NaN, and 0 times NaN is NaN.
        """
        own = self._holders[:, self.num_trunk : self.end, None]
        held, places = self._holders[:, None], self._places[:, None]
        here = self.positions[:, :, None]
        seen = ((held == own) | (held == TRUNK)) & (places <= here)
        return seen if attention.window is None else seen & (places > here - attention.window)


class _Added:
    """The vectors of a batch: at each steered layer a table, and which of its rows each token adds."""

    def __init__(self, branches: Sequence[Branch], layout: _Layout, decoder: Decoder) -> None:
        by_layer: dict[int, dict[int, Steering]] = defaultdict(dict)
        for number in layout.starts:
            steering = branches[number].steering
            if steering is not None:
                by_layer[steering.layer][id(steering)] = steering
        self._layers = {id(decoder.blocks[layer]): layer for layer in by_layer}
        self._tables: dict[int, Tensor] = {}
        self._index: dict[int, Tensor] = {}
        for layer, held in by_layer.items():
            entry = {key: 1 + place for place, key in enumerate(held)}  # row 0 adds nothing
            index = torch.zeros(layout.tokens.shape, dtype=torch.int64)
            for number, (row, first) in layout.starts.items():
                one = branches[number]
                if one.steering is not None and one.steering.layer == layer:
                    steered = slice(first + one.first_steered, first + len(one.tokens))
                    index[row, steered] = entry[id(one.steering)]
            rows = [torch.zeros(decoder.width), *(one.added().cpu() for one in held.values())]
            self._tables[layer] = torch.stack(rows).to(device=decoder.device, dtype=decoder.dtype)
            self._index[layer] = index.to(decoder.device)

    def run_block(
        self,
        block: Block,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        place: forward.Place,
        tables: RowTables,
        deltas: forward.Deltas,
    ) -> Tensor:
        """A block of `forward`, and what its tokens add."""
        x = forward.run_block(block, x, keys, values, place, tables, deltas)
        layer = self._layers.get(id(block))
        return x if layer is None else x + self._tables[layer][self._index[layer]]


def check_steering(steering: Steering | None, decoder: Decoder) -> None:
    """What a batch of many steerings can run."""
    if steering is None:
        return
    if steering.mode != "add":
        raise BadInput(
            f"mode {steering.mode!r} cannot share a batch",
            hint="pack mode 'add'; steered_model runs them all",
        )
    if steering.layer >= len(decoder.blocks):
        raise BadInput(
            f"steering at layer {steering.layer}", hint=f"the model has layers 0 to {len(decoder.blocks) - 1}"
        )
    if len(steering.direction) != decoder.width:
        raise BadInput(
            f"a direction of {len(steering.direction)} numbers", hint=f"the model is {decoder.width} wide"
        )


def _storage_shape(decoder: Decoder, *, rows: int, columns: int) -> tuple[int, ...]:
    attention = decoder.blocks[0].attention
    return (len(decoder.blocks), 2, rows, attention.num_kv_heads, columns, attention.head_width)


def _rows_of(branches: Sequence[Branch]) -> list[_Row]:
    """Branches behind their trunks, rows of like size beside one another."""
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
                rows.append(_Row(trunk, held, size))
                held, size = [], 0
            held.append(number)
            size += own
        rows.append(_Row(trunk, held, size))
    return sorted(rows, key=lambda row: (row.num_tokens, len(row.trunk)))


def _first_batch(rows: Sequence[_Row], batch_tokens: int) -> list[_Row]:
    """Rows from the front while the padded batch stays within `batch_tokens`; at least one.

    Rows come in order of size, so the last one says how far all are padded.
    """
    count = 1
    while count < len(rows) and (count + 1) * rows[count].num_tokens <= batch_tokens:
        count += 1
    return list(rows[:count])
