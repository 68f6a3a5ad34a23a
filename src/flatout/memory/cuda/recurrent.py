"""Recurrent layers as cuDNN runs them: one call for a stack, with a reserve kept for the backward.

The reserve holds the gates of every step (LSTM five, GRU six, plain one value per hidden unit) and the
outputs between layers.  A workspace lives during each call: the weights without their biases, 8 MiB for each
layer and direction, and values for each step and for each row's state, as the tables below have them.  Under
autocast, of whatever dtype, weights are cast into one flat buffer of float16, inputs and states to float16 as
well, so that the result is float16 too.  The first call with dropout allocates the generator's state, which
stays.

In half precision PyTorch asks for kernels that keep one layer's weights on the chip (`_is_persistent` has its
conditions); they take more than twice the memory.  Forward it asks for such kernels in every precision if an
LSTM has at most 192 units.

The tables were read off 168 single calls on an H200 (cuDNN 9.19) with rows first and 162 with steps first, in
all precisions.  They predict LSTM and GRU to a thousandth, packed or not, and stacks of GRU to 3 %, except
stacks with 16 or 32 rows and 512 steps, which take a quarter less.  Plain RNN are within 3 %; those of at
most 256 units have kernels of their own, which take less in evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flatout.memory.cuda.formulas import ASSUMED_MULTIPROCESSORS
from flatout.memory.trace import known_values
from flatout.memory.trace.record import Lean

GATES_KEPT = {"lstm": 5, "gru": 6, "rnn": 1}
# Values per unit of the output, and per state of a layer and direction: of a padded batch in one direction
# and in both, and of a packed one in one and in both.
WORKSPACES = {
    "lstm": (((7.0, 10), (7.5, 12)), ((5.0, 6), (6.0, 8))),
    "gru": (((6.0, 5), (7.0, 7)), ((4.0, 3), (5.0, 5))),
    "rnn": (((5.0, 17), (7.0, 7)), ((2.0, 1), (4.0, 3))),
}
# stacks, and both directions, whose batch has its steps first
STEPS_FIRST: dict[tuple[str, bool], tuple[float, int]] = {
    ("lstm", False): (6.0, 10),
    ("gru", False): (5.0, 17),
    ("gru", True): (6.5, 7),
    ("rnn", True): (6.0, 7),
}
# stacks in one direction whose input is narrower than their state; they take the input once beside, and
# with dropout the output of a layer once
NARROW = {"lstm": (5.0, 10), "gru": (4.0, 5)}
ONE_LAYER = {"lstm": (6.0, 11), "gru": (6.0, 5), "rnn": (6.0, 5)}  # padded, in one direction
PERSISTENT = {"lstm": (22.0, 8), "rnn": (15.0, 6)}
# one layer of an LSTM of few units forward, padded: in one direction as the kernels above, and in both
NARROWEST = 192
NARROWEST_LSTM = {False: PERSISTENT["lstm"], True: (16.0, 8)}
SMALL_UNITS = 256
SMALL = {(1, False): (15.0, 6), (1, True): (10.5, 7)}  # plain RNN: (layers, both directions)
SMALL_STACK = (16.0, 6)
WORKSPACE_PER_LAYER = 8 << 20
RESERVE_HEAD = 256
DROPOUT_STATE_PER_MULTIPROCESSOR = 49_152  # 6,488,064 bytes were measured on 132

_lasting: list[Tensor] = []
_called: dict[Lean, None] = {}
_target = {"num_multiprocessors": ASSUMED_MULTIPROCESSORS}


def begin(*, num_multiprocessors: int) -> None:
    """Forget earlier calls, before a trace for a GPU with this many multiprocessors."""
    _lasting.clear()
    _called.clear()
    _target["num_multiprocessors"] = num_multiprocessors


def leans_on() -> tuple[Lean, ...]:
    """Return which tables and assumptions the calls of this process used."""
    return tuple(_called)


def lasting_blocks() -> tuple[Tensor, ...]:
    """Return the blocks that cuDNN keeps for the rest of the process."""
    return tuple(_lasting)


def install(library: torch.library.Library, *, key: str = "AutogradCPU") -> None:
    for name, kind in (("lstm", "lstm"), ("gru", "gru"), ("rnn_tanh", "rnn"), ("rnn_relu", "rnn")):
        library.impl(f"{name}.input", _padded(kind), key)
        library.impl(f"{name}.data", _packed(kind), key)
    library.impl("_pack_padded_sequence", _pack, key)
    library.impl("_pad_packed_sequence", _pad, key)


def _padded(kind: str) -> Any:
    def run(x: Tensor, hx: Any, params: Any, has_biases: bool, *settings: Any) -> Any:
        *others, batch_first = settings
        steps_first = x.transpose(0, 1) if batch_first else x
        output, *last = _run(kind, steps_first, hx, params, others, rows_first=batch_first)
        return (output.transpose(0, 1) if batch_first else output, *last)

    return run


def _packed(kind: str) -> Any:
    def run(data: Tensor, batch_sizes: Tensor, hx: Any, params: Any, has_biases: bool, *settings: Any) -> Any:
        return _run(kind, data, hx, params, settings, rows_first=False)

    return run


def _run(
    kind: str, x: Tensor, hx: Any, params: Sequence[Tensor], settings: Sequence[Any], *, rows_first: bool
) -> Any:
    num_layers, dropout, train, bidirectional = settings
    weights = _cast(params)
    dtype = weights[0].dtype
    states = [state.to(dtype) for state in (hx if isinstance(hx, (list, tuple)) else [hx])]
    how = (kind, num_layers, bidirectional, dropout if train else 0.0, train, len(states), rows_first)
    return _apply(_Cudnn, *how, x.to(dtype), *states, *weights)


def _cast(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights as cuDNN wants them: one flat buffer in the dtype it computes in.

    Under autocast that is float16 whatever autocast was asked for: what reads the result casts it again.
    """
    dtype = torch.float16 if torch.is_autocast_enabled(params[0].device.type) else params[0].dtype
    # nn.LSTM and its kin lay their weights out flat, but not in bfloat16: those are copied at every call
    if params[0].dtype is dtype and dtype is not torch.bfloat16:
        return list(params)
    return list(_apply(_Flat, dtype, *params))


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *params: Tensor) -> Any:
        ctx.shapes = [(parameter.shape, parameter.dtype) for parameter in params]
        flat = params[0].new_empty(sum(parameter.numel() for parameter in params), dtype=dtype)
        return _views(flat, [parameter.shape for parameter in params])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, *(grads[0].new_empty(shape, dtype=dtype) for shape, dtype in ctx.shapes))


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    parts = flat.split([shape.numel() for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


class _Cudnn(torch.autograd.Function):
    """Allocates what cuDNN allocates; computes nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        num_layers: int,
        bidirectional: bool,
        dropout: float,
        train: bool,
        num_states: int,
        rows_first: bool,
        x: Tensor,
        *rest: Tensor,
    ) -> Any:
        states, weights = rest[:num_states], rest[num_states:]
        dtype = weights[0].dtype
        directions, hidden = (2 if bidirectional else 1), states[0].shape[-1]
        _called["recurrent layers"] = None
        is_narrow = num_layers > 1 and x.shape[-1] < hidden
        is_known = kind in NARROW and x.dim() == 3 and not bidirectional
        if is_narrow and not is_known:
            _called["narrow recurrent layers"] = None
        if dropout and not _lasting:
            state_bytes = DROPOUT_STATE_PER_MULTIPROCESSOR * _target["num_multiprocessors"]
            _lasting.append(x.new_empty(state_bytes, dtype=torch.uint8))
            _called["dropout of recurrent layers"] = None
        steps = x.contiguous()
        output = x.new_empty((*x.shape[:-1], hidden * directions), dtype=dtype)
        last = [x.new_empty(state.shape, dtype=dtype) for state in states]
        units = output.numel()
        per_unit, per_state = WORKSPACES[kind][x.dim() == 2][bidirectional]
        if x.dim() == 3:
            shape = (num_layers, bidirectional, rows_first)
            per_unit, per_state = _padded_workspace(kind, *shape, x=x, hidden=hidden, dtype=dtype)
        if is_narrow and is_known:
            per_unit, per_state = NARROW[kind]
            per_unit += 1 if dropout else 0
        beside = x.numel() if is_narrow and is_known else 0
        beside += sum(weight.numel() for weight in weights if weight.dim() > 1)

        def workspace_bytes(per_unit: float, per_state: int) -> int:
            values = (per_unit if train else per_unit - 1) * units + per_state * states[0].numel() + beside
            return int(values * dtype.itemsize) + WORKSPACE_PER_LAYER * num_layers * directions

        in_backward = workspace_bytes(per_unit, per_state)
        if kind == "lstm" and num_layers == 1 and x.dim() == 3 and hidden <= NARROWEST:
            per_unit, per_state = NARROWEST_LSTM[bidirectional]
        workspace = x.new_empty(workspace_bytes(per_unit, per_state), dtype=torch.uint8)
        kept = units * (GATES_KEPT[kind] * num_layers + num_layers - 1) * dtype.itemsize
        masks = (num_layers - 1) * units * directions // 8 if dropout else 0
        needs = train and any(ctx.needs_input_grad)
        reserve = x.new_empty(kept + masks + RESERVE_HEAD if needs else 0, dtype=torch.uint8)
        del workspace, steps
        ctx.save_for_backward(x, output, reserve, *states, *weights)
        ctx.num_kept = 3 + num_states
        ctx.workspace_bytes = in_backward
        return (output, *last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, _output, _reserve = ctx.saved_tensors[:3]
        states = ctx.saved_tensors[3 : ctx.num_kept]
        weights = ctx.saved_tensors[ctx.num_kept :]
        steps, grad_output = x.contiguous(), grads[0].contiguous()
        grad_x = x.new_empty(x.shape, dtype=x.dtype)
        grad_states = [torch.empty_like(state) for state in states]
        workspace = x.new_empty(ctx.workspace_bytes, dtype=torch.uint8)
        del workspace, steps, grad_output
        steps = x.contiguous()  # for the weights, once more
        flat = x.new_empty(sum(weight.numel() for weight in weights), dtype=weights[0].dtype)
        workspace = x.new_empty(ctx.workspace_bytes, dtype=torch.uint8)
        del workspace, steps
        views = _views(flat, [weight.shape for weight in weights])
        return (*(None,) * 7, grad_x, *grad_states, *views)


def _padded_workspace(
    kind: str,
    num_layers: int,
    bidirectional: bool,
    rows_first: bool,
    *,
    x: Tensor,
    hidden: int,
    dtype: torch.dtype,
) -> tuple[float, int]:
    """Return the values per unit of the output, and per state."""
    alone = num_layers == 1 and not bidirectional
    if alone and dtype.itemsize == 2 and _is_persistent(kind, x, hidden):
        return PERSISTENT[kind]
    if kind == "rnn" and hidden <= SMALL_UNITS:
        return SMALL.get((num_layers, bidirectional), SMALL_STACK)
    if alone:
        return ONE_LAYER[kind]
    plain = WORKSPACES[kind][False][bidirectional]
    return plain if rows_first else STEPS_FIRST.get((kind, bidirectional), plain)


def _is_persistent(kind: str, x: Tensor, hidden: int) -> bool:
    """Return whether PyTorch asks for persistent kernels: datacentre GPUs, one layer, half precision."""
    rows, width = x.shape[1], x.shape[2]
    if kind == "gru" or hidden % 128 or width % 128 or hidden > 1024 or rows % 8 or rows > 128:
        return False
    return kind == "lstm" or rows < 96 or hidden < 896


class _Reshaped(torch.autograd.Function):
    """A copy in another shape: rows packed without padding, or padded again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.new_empty(ctx.shape), None


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    known = known_values.value_of(lengths)
    longest = x.shape[1] if batch_first else x.shape[0]
    with _disable_current_modes():
        rows = known if known is not None else torch.full(lengths.shape, longest)
        sizes = torch.stack([(rows > step).sum() for step in range(int(rows.max()))])
        total = int(rows.sum())
    data = _apply(_Reshaped, x, (total, *x.shape[2:]))
    return data, known_values.with_value(sizes)


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    sizes = known_values.value_of(batch_sizes)
    assert sizes is not None
    with _disable_current_modes():
        num_rows, num_steps = int(sizes[0]), max(len(sizes), total_length)
        lengths = torch.stack([(sizes > row).sum() for row in range(num_rows)])
    padded = _apply(_Reshaped, data, (num_steps, num_rows, *data.shape[1:]))
    return padded.transpose(0, 1) if batch_first else padded, known_values.with_value(lengths)
