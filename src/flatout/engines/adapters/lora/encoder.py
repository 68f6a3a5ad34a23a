"""A frozen encoder that reads the batches of several adapters in one pass.

The blocks of all tasks go through the Hugging Face model once, as one row of N tokens.  Its linear maps add
the correction of the adapter that owns each range of tokens (`multiplex.products.trained`), its attention
keeps rows apart (`attention`), and everything else in an encoder works token by token, packed or not.

The model is not rebuilt: during a pass, adapted linear maps have another forward and the config names another
attention function; between passes, and for other callers, it is the plain model.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.engines.adapters.lora import attention
from flatout.engines.adapters.lora.attention import AttentionKernel
from flatout.engines.adapters.lora.bank import AdapterBank, stackable
from flatout.engines.adapters.lora.encoder_layers import layers_of
from flatout.engines.adapters.lora.shape_plan import ShapePlan, plan_for_shapes
from flatout.engines.adapters.lora.token_blocks import (
    Frame,
    Shapes,
    TokenBlock,
    TokenBlocks,
    layout,
    rows_of,
    shapes_of,
)
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.multiplex.products.ranges import Dense, Path, Products
from flatout.multiplex.products.trained import BoundMaps, Dropout, Maps, corrected_maps

KEPT_FRAMES = 32  # shapes of batches whose tensors are kept


@dataclass(kw_only=True, slots=True)
class _Group:
    """Maps that read the same x, and during a pass the results that the first call computed for all."""

    names: list[str]
    maps: Maps | None = None  # made when it is first needed
    bound: dict[Hashable, BoundMaps] = field(default_factory=dict)  # by the kind of products
    x: Tensor | None = None
    results: tuple[Tensor, ...] = ()

    def empty(self) -> None:
        self.x, self.results = None, ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """The pass under way, as the linear maps see it."""

    products: Products
    siblings: Products  # of maps that share their input
    dropout: Dropout | None
    gain: Tensor | None


class PackedEncoder:
    """`model`, a Hugging Face encoder, with the adapters of `bank` in its linear maps.

    The base is cast to `dtype`, frozen and put into eval mode.  `close` (or the end of a `with`) gives the
    model its own forwards, its mode and its trainable parameters back; its precision stays.  `path` is the
    kind of products, whatever the shapes; None chooses.
    """

    def __init__(
        self,
        model: nn.Module,
        bank: AdapterBank | None,
        *,
        dtype: torch.dtype | None = None,
        path: Path | None = None,
    ) -> None:
        attention.register()
        self.model: Any = model
        config: Any = model.config
        self.bank = bank
        first = next(model.parameters())
        self.dtype = dtype or first.dtype
        self.device = first.device
        if bank is not None and (bank.dtype, bank.device) != (self.dtype, self.device):
            raise BadInput(
                f"the bank is in {bank.dtype} on {bank.device}, the encoder in {self.dtype} on {self.device}",
                hint="make both with the same dtype and device",
            )
        self.width = int(config.hidden_size)
        self.kernel: Decision[AttentionKernel] = attention.choose_kernel(
            device=self.device, dtype=self.dtype, head_width=self.width // int(config.num_attention_heads)
        )
        self._path = path
        self._pass: _Pass | None = None
        self._calls: list[tuple[str, Tensor]] | None = None  # which map read which input, if recorded
        self._groups: list[_Group] = []
        self._places: dict[str, tuple[_Group, int]] = {}
        self._plans: OrderedDict[Shapes, ShapePlan] = OrderedDict()
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._scales = torch.tensor(bank.scales if bank is not None else [], device=self.device)
        self._positions, self._longest = _positions(model)
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        self._was_training = model.training
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._pooler = getattr(model, "pooler", None)
        self._opened: list[nn.Module] = []
        self._layers = layers_of(model)
        try:
            self._open()
            self._find_siblings(self._check())
        except BadInput:
            self.close()
            raise

    def __call__(
        self,
        blocks: TokenBlocks,
        *,
        adapters: bool = True,
        mixture: Tensor | None = None,
        dropout: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return the last states of every block, [rows, length, width] each, in the encoder's dtype.

        `adapters=False` is the plain model.  `mixture` [rows of all blocks, adapters] runs every row with a
        weighted sum of all adapters, differentiable to the weights.  `dropout` is that of the adapters;
        training wants it on.  The backward adds the gradients of the factors to `bank.gradients`.
        """
        plan = self.prepare(shapes_of(blocks))
        if adapters and self.bank is not None and plan.products is not None:
            self.bank.refresh()
            self._pass = self._pass_of(plan, mixture=mixture, dropout=dropout)
        return rows_of(self._run(blocks, plan), plan.frame.shapes)

    def depths(self, block: TokenBlock) -> tuple[Tensor, ...]:
        """Return the plain model's states of one block: of its words alone, then after each layer."""
        plan = self.prepare(shapes_of((block,)))
        found = self._run_whole((block,), plan, output_hidden_states=True).hidden_states
        return tuple(rows_of(states, plan.frame.shapes)[0] for states in found)

    def _run(self, blocks: TokenBlocks, plan: ShapePlan) -> Tensor:
        """Return the last states of all blocks, end to end, under the current pass."""
        if self._layers is None:
            states: Tensor = self._run_whole(blocks, plan).last_hidden_state
            return states
        bounds = attention.bounds_of(layout(blocks, known=plan.frame), self.kernel.value)
        try:
            states = self.model.embeddings(**self._inputs(blocks, plan.frame)).squeeze(0)
            residual = states
            for layer in self._layers:
                states, residual = layer(states, residual, bounds)
            return states
        finally:
            self._end_pass()

    def _run_whole(self, blocks: TokenBlocks, plan: ShapePlan, **options: Any) -> Any:
        """Run the model's own forward and return what it returns."""
        bounds = attention.bounds_of(layout(blocks, known=plan.frame), self.kernel.value)
        config = self.model.config
        before = config._attn_implementation
        config._attn_implementation = attention.PACKED
        try:
            with attention.rows(bounds):
                return self.model(**self._inputs(blocks, plan.frame), **options)
        finally:
            config._attn_implementation = before
            self._end_pass()

    def _end_pass(self) -> None:
        self._pass = None
        for group in self._groups:
            group.empty()

    def prepare(self, shapes: Shapes) -> ShapePlan:
        """Prepare for blocks of these shapes; kept for the next batch of the same shapes."""
        known = self._plans.get(shapes)
        if known is not None:
            self._plans.move_to_end(shapes)
            return known
        longest = max(shape.length for shape in shapes)
        if self._longest is not None and longest > self._longest:
            raise BadInput(
                f"a row has {longest} tokens; the encoder has positions for {self._longest}",
                hint="set max_length to that, or cut the texts",
            )
        plan = plan_for_shapes(shapes, bank=self.bank, device=self.device, dtype=self.dtype, path=self._path)
        self._plans[shapes] = plan
        if len(self._plans) > KEPT_FRAMES:
            self._plans.popitem(last=False)
        return plan

    def close(self) -> None:
        """Restore the model, except for its precision."""
        for module in self._opened:
            del vars(module)["forward"]
        self._opened.clear()
        if self._pooler is not None:
            self.model.pooler = self._pooler
        for parameter in self._trained:
            parameter.requires_grad_(True)
        self._trained.clear()
        self.model.train(self._was_training)

    def __enter__(self) -> PackedEncoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        self.model.to(self.dtype).eval().requires_grad_(False)
        if self._pooler is not None:
            self.model.pooler = None  # it would read the first token of the whole pack
        if self.bank is None:
            return
        modules = dict(self.model.named_modules())
        for name, site in self.bank.sites.items():
            module = modules.get(name)
            if type(module) is not nn.Linear or module.weight.shape != (site.num_out, site.num_in):
                raise BadInput(
                    f"the model has no linear map {name!r} of this size",
                    hint="the bank was made for another model",
                )
            if "forward" in vars(module):
                raise BadInput(
                    f"{name} already has another forward", hint="close the first encoder of this model"
                )
            vars(module)["forward"] = self._forward_of(module, name)
            self._opened.append(module)

    def _forward_of(self, module: nn.Linear, name: str) -> Callable[[Tensor], Tensor]:
        self._places[name] = _Group(names=[name]), 0
        weight, bias = module.weight, module.bias

        def forward(x: Tensor) -> Tensor:
            now = self._pass
            if now is not None:
                return self._corrected(x, name, now)
            if self._calls is not None:
                self._calls.append((name, x))
            return F.linear(x, weight, bias)

        return forward

    def _corrected(self, x: Tensor, name: str, now: _Pass) -> Tensor:
        """Return the result of one map; the first call to a map of a group computes the whole group."""
        group, place = self._places[name]
        if group.x is x:
            return group.results[place]
        shares_input = len(group.names) > 1
        products = now.siblings if shares_input else now.products
        maps = group.bound.get(products.kind)
        if maps is None:
            group.maps = group.maps or self._maps_of(group.names)
            maps = group.bound[products.kind] = group.maps.bound(products)
        results = corrected_maps(
            x, maps=maps, products=products, anchor=self._anchor, dropout=now.dropout, gain=now.gain
        )
        if shares_input:
            group.x, group.results = x, results
        return results[place]

    def _maps_of(self, names: list[str]) -> Maps:
        assert self.bank is not None
        linears = [self.model.get_submodule(name) for name in names]
        return self.bank.maps(
            [self.bank.sites[name] for name in names],
            weights=[linear.weight for linear in linears],
            biases=[linear.bias for linear in linears],
        )

    def _find_siblings(self, calls: list[tuple[str, Tensor]]) -> None:
        """Group the maps that read the same input, by the calls of a pass."""
        for _, same in groupby(calls, key=lambda call: id(call[1])):
            names = [name for name, _ in same]
            assert self.bank is not None
            if stackable([self.bank.sites[name] for name in names]):
                self._groups.append(_Group(names=names))
                self._places |= {name: (self._groups[-1], place) for place, name in enumerate(names)}

    def _pass_of(self, plan: ShapePlan, *, mixture: Tensor | None, dropout: bool) -> _Pass:
        assert self.bank is not None and plan.products is not None
        drop = plan.dropout if dropout else None
        if mixture is None:
            together = None if _is_recorded(self.device) else plan.siblings
            return _Pass(
                products=plan.products,
                siblings=together or plan.products,
                dropout=drop,
                gain=None,
            )
        shapes = plan.frame.shapes
        expected = (sum(shape.num_rows for shape in shapes), len(self.bank))
        if mixture.shape != expected:
            raise BadInput(
                f"the mixture is {tuple(mixture.shape)} for {expected[0]} rows and {expected[1]} adapters",
                hint="give a weight for every row and adapter",
            )
        weights = (mixture * self._scales).split([shape.num_rows for shape in shapes])
        of_tokens = torch.cat(
            [
                part[:, None].expand(-1, shape.length, -1).reshape(shape.num_tokens, -1)
                for part, shape in zip(weights, shapes, strict=True)
            ]
        )
        gain = of_tokens[:, :, None].expand(-1, -1, self.bank.rank).flatten(1).to(self.dtype)
        every = Dense(first=0, last=len(self.bank), gain=gain)
        return _Pass(products=every, siblings=every, dropout=drop, gain=gain)

    def _inputs(self, blocks: TokenBlocks, made: Frame) -> dict[str, Tensor]:
        inputs = {"input_ids": _packed([block.ids for block in blocks])}
        if self._positions is not None:
            inputs["position_ids"] = made.positions + self._positions if self._positions else made.positions
        if self._takes_types and any(block.types is not None for block in blocks):
            kinds = [torch.zeros_like(block.ids) if block.types is None else block.types for block in blocks]
            inputs["token_type_ids"] = _packed(kinds)
        return inputs

    @torch.no_grad()
    def _check(self) -> list[tuple[str, Tensor]]:
        """Refuse a model whose states change when rows are packed: not every encoder can be packed.

        Returns the linear maps in the order of their calls, with their inputs.
        """
        ids = torch.arange(3, 13, device=self.device).view(2, 5) % int(self.model.config.vocab_size)
        lengths = torch.tensor([5, 3], device=self.device)
        alone = self.model(input_ids=ids[1:, :3]).last_hidden_state
        tolerance = 1e-3 if self.dtype == torch.float32 else 1e-1
        while True:
            calls: list[tuple[str, Tensor]] = []
            self._calls = calls
            (packed,) = self((TokenBlock(adapter=0, ids=ids, lengths=lengths),), adapters=False)
            self._calls = None
            if torch.allclose(packed[1:, :3], alone, rtol=tolerance, atol=tolerance):
                return calls
            if self._layers is None:
                raise BadInput(
                    f"{type(self.model).__name__} computes other states when rows are packed",
                    hint="use one with absolute positions and bidirectional attention: BERT, RoBERTa, MiniLM",
                )
            self._layers = None  # its layers differ from those of its family


def _is_recorded(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _packed(parts: list[Tensor]) -> Tensor:
    flat = [part.reshape(1, -1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _positions(model: nn.Module) -> tuple[int | None, int | None]:
    """Return the number of a row's first position and how many there are.

    RoBERTa's follow the padding's.  None where the model takes no positions, or does not look them up.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None, None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return first, module.num_embeddings - first
    return 0, None


def pool_rows(states: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of each row's real tokens: [rows, length, width] -> [rows, width]."""
    places = torch.arange(states.shape[1], device=states.device)
    real = (places < lengths[:, None]).to(states.dtype)
    return torch.einsum("blh,bl->bh", states, real) / lengths[:, None]
