"""A context manager that steers any transformers model, row by row.

A forward hook on the layer does it: the model's weights stay as they are, and removing the hooks leaves no
trace.

Where to steer is a matter of positions, not of calls: with a key-value cache a call carries one token,
without one it carries the whole text again, and both must give the same tokens.  So the first call's tokens
are taken for the prompt, and what follows them for generated text.

Shapes: B rows, T tokens of a call, D width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engines.steering.model_blocks import blocks_of, width_of
from flatout.engines.steering.settings import Mode, Where
from flatout.engines.steering.trials.steering import Steering, TurnTable
from flatout.ground.errors import BadInput
from flatout.multiplex.rows import Rows
from flatout.multiplex.vectors import steered, with_hidden


@contextmanager
def steered_model(
    model: nn.Module,
    steering: Steering | Sequence[Steering | None],
    *,
    prompt_lengths: Sequence[int] | None = None,
) -> Iterator[None]:
    """Steer `model` for the length of a block: one steering for all rows, or one (or None) for each row.

    The first call in the block carries the prompts; calls that continue it (with or without a cache) carry
    generated tokens, and a call with other tokens starts again.  Where one call carries prompt and answer
    together, `prompt_lengths` says how many tokens of each row, padding not counted, are its prompt.
    """
    rows = (steering,) if isinstance(steering, Steering) else tuple(steering)
    if not rows:
        raise BadInput("the list of steerings is empty", hint="give one, or one for each row")
    blocks = blocks_of(model)
    for given in {id(one): one for one in rows if one is not None}.values():
        given.check_model(num_layers=len(blocks), width=width_of(model))
    groups: dict[tuple[int, Mode, Where], list[tuple[int, Steering]]] = defaultdict(list)
    for row, one in enumerate(rows):
        for part in () if one is None else one.parts:
            groups[part.layer, part.mode, part.where].append((row, part))
    places = _TokenPlaces(prompt_lengths, num_rows=None if isinstance(steering, Steering) else len(rows))
    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(places, with_kwargs=True))
        for (layer, mode, where), held in groups.items():
            chosen = partial(places.steered, where)
            if mode == "add":
                hooks.enter_context(
                    _add_vectors(str(layer), blocks[layer], held, len(rows), positions=chosen)
                )
            else:
                table = TurnTable(held, len(rows), mode=mode)
                hook = _TurningHook(str(layer), table, len(rows), chosen=chosen)
                hooks.enter_context(blocks[layer].register_forward_hook(hook))
        yield


def _add_vectors(
    name: str,
    block: nn.Module,
    held: Sequence[tuple[int, Steering]],
    num_rows: int,
    *,
    positions: Callable[[], Tensor],
) -> AbstractContextManager[None]:
    """Steer the rows of mode `add` at one layer."""
    table = torch.stack([one.added().cpu() for _, one in held])
    variants: list[int | None] = [None] * num_rows
    for variant, (row, _) in enumerate(held):
        variants[row] = variant
    return steered({name: block}, table, Rows(tuple(variants)), positions=positions)


class _TokenPlaces:
    """Where the tokens of the running call stand: a pre-forward hook of the whole model."""

    def __init__(self, prompt_lengths: Sequence[int] | None, *, num_rows: int | None) -> None:
        self._prompt_lengths = prompt_lengths
        self._num_rows = num_rows  # of every call; None: any number
        self._prompt: Tensor | None = None  # tokens of the first call, [B, T]
        self._last: Tensor | None = None  # column of each row's last prompt token, [B]
        self.columns: Tensor | None = None  # of the running call, [T]
        self.real: Tensor | None = None  # [B, T]; None: no padding

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        if not isinstance(tokens, Tensor):
            raise BadInput("the model is called without tokens", hint="pass input_ids or inputs_embeds")
        if self._num_rows is not None and len(tokens) != self._num_rows:
            raise BadInput(
                f"the call has {len(tokens)} rows, but there are {self._num_rows} steerings",
                hint="give one for each row, or a single one for all",
            )
        start = _num_cached(kwargs.get("past_key_values"))
        num_tokens = tokens.shape[1]
        mask = kwargs.get("attention_mask")
        known = isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= start + num_tokens
        real = mask[:, : start + num_tokens].ne(0) if known and isinstance(mask, Tensor) else None
        if start == 0 and not self._continues(tokens):
            self._begin(tokens, real)
        self.columns = torch.arange(start, start + num_tokens, device=tokens.device)
        self.real = None if real is None else real[:, start:]

    def _continues(self, tokens: Tensor) -> bool:
        """Return whether a call without a cache is the remembered prompt and more."""
        held = self._prompt
        if held is None or tokens.ndim != held.ndim or tokens.shape[1] <= held.shape[1]:
            return False
        return tokens.shape[0] == held.shape[0] and torch.equal(tokens[:, : held.shape[1]], held)

    def _begin(self, tokens: Tensor, real: Tensor | None) -> None:
        self._prompt = tokens.detach()
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        inside = (
            torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if real is None else real
        )
        if self._prompt_lengths is None:
            self._last = torch.where(inside, columns, -1).amax(1)
            return
        lengths = torch.tensor(list(self._prompt_lengths), device=tokens.device)
        if lengths.shape != tokens.shape[:1]:
            raise BadInput(
                f"there are {len(lengths)} prompt lengths for {len(tokens)} rows",
                hint="give one for each row",
            )
        self._last = torch.where(inside & (inside.cumsum(1) <= lengths[:, None]), columns, -1).amax(1)

    def steered(self, where: Where) -> Tensor:
        """Return which tokens of the running call are steered, [B, T]."""
        if self.columns is None or self._last is None:
            raise BadInput(
                "only a part of the model was called", hint="call the model that steered_model was given"
            )
        last, columns = self._last[:, None], self.columns[None]
        chosen = {"all": columns >= 0, "generated": columns > last, "last-and-generated": columns >= last}
        # Right padding lies between a row's prompt and what follows: the mask leaves it out.
        taken = chosen[where].expand(len(last), -1)
        return taken if self.real is None else taken & self.real


def _num_cached(cache: Any) -> int:
    if cache is None:
        return 0
    length = getattr(cache, "get_seq_length", None)
    return int(length()) if length is not None else int(cache[0][0].shape[-2])


class _TurningHook:
    """Steers the rows of one mode at one layer, where what it does depends on the hidden state."""

    def __init__(self, name: str, table: TurnTable, num_rows: int, *, chosen: Callable[[], Tensor]) -> None:
        self._name, self._table, self._chosen = name, table, chosen
        self._rows = torch.arange(num_rows)[:, None]

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return with_hidden(output, self._steer, name=self._name)

    def _steer(self, hidden: Tensor) -> Tensor:
        self._rows = self._rows.to(hidden.device)
        return self._table.steer(hidden, entry=self._rows, chosen=self._chosen().to(hidden.device))
