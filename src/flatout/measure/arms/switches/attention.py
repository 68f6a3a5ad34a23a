"""Steps that run handwritten attention as one fused call.

The first product, of queries and keys, is deferred instead of computed; scaling, mask, softmax and dropout
are noted, and the product with the values becomes one call of `scaled_dot_product_attention`.  Any other use
of the scores computes them after all, and such a step does not count.  The block's first step, which is never
timed, checks whether a mask is causal, because causal attention has a kernel of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from flatout.measure.arms.arm import COMPILED, Arm, ArmContext
from flatout.measure.clock import Clock, ident
from flatout.measure.evidence import Place
from flatout.measure.lines.attention_calls import ATTENTION, PRODUCT
from flatout.measure.patches import Patches
from flatout.measure.phases import has_compiled
from flatout.measure.user_code import UserCode

SUSPICION = 0.25
LOWEST = -1e4  # masks are filled with at most this: less is nothing after a softmax


class FusedAttention(Arm):
    """Defers products at some lines until the attention around them is known."""

    kind = label = "fused-attention"
    suspicion = SUSPICION

    def __init__(
        self, user_code: UserCode, clock: Clock, products: Iterable[Place], *, place: Place | None
    ) -> None:
        self.place = place
        self._user_code, self._clock, self._products = user_code, clock, frozenset(products)
        self._patches = Patches()
        self._learning = True
        self._number = self._num_fused = 0  # of attention calls in this step
        self._is_causal: dict[int, bool] = {}

    def begin(self) -> None:
        import torch

        self._learning, self._number, self._is_causal = True, 0, {}
        for owner, name in (
            (torch, "matmul"),
            (torch, "bmm"),
            (torch.Tensor, "matmul"),
            (torch.Tensor, "bmm"),
        ):
            self._patches.replace(owner, name, self._product(getattr(owner, name)))
        self._patches.replace(torch.Tensor, "__matmul__", self._product(torch.Tensor.__matmul__))

    def step_end(self) -> None:
        if self._learning and not self._num_fused:
            self.refusal = "the products of the script's attention could not be deferred"
        self._learning, self._number, self._num_fused = False, 0, 0

    def end(self) -> None:
        self._patches.undo()

    release = end

    def _product(self, multiply: Callable[..., Any]) -> Callable[..., Any]:
        def product(left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(left, Scores):
                return left @ right
            if args or kwargs or self.refusal is not None or ident() != self._clock.owner or left.dim() < 3:
                return multiply(left, right, *args, **kwargs)
            if self._user_code.place(sys._getframe(1))[0] not in self._products:
                return multiply(left, right)
            return Scores(self, left, right, lambda: multiply(left, right))

        return product

    def attend(self, scores: Scores, values: Any) -> Any:
        """Run the whole attention in one call."""
        from torch.nn.functional import scaled_dot_product_attention

        number, self._number = self._number, self._number + 1
        if self._learning:
            self._is_causal[number] = scores.is_causal()
        self._num_fused += 1
        causal = self._is_causal.get(number, False)
        query, key, mask = scores.query, scores.key.transpose(-2, -1), scores.mask
        flat = query.dim() == 3
        if flat:  # the fused kernels need a heads dimension
            query, key, values = (each.unsqueeze(1) for each in (query, key, values))
            mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        result = scaled_dot_product_attention(
            query,
            key,
            values,
            attn_mask=None if causal else mask,
            dropout_p=scores.dropout,
            is_causal=causal,
            scale=scores.scale,
        )
        return result.squeeze(1) if flat else result


class Scores:
    """The product of queries and keys, or its softmax, not computed yet."""

    def __init__(self, arm: FusedAttention, query: Any, key: Any, compute: Callable[[], Any]) -> None:
        self.arm, self.query, self.key = arm, query, key
        self.scale, self.dropout, self.is_weights = 1.0, 0.0, False
        self.mask: Any = None
        self._compute = compute  # computes the plain result
        self._tensor: Any = None  # the plain result, from the first operation that cannot be deferred

    def plain(self) -> Any:
        """Compute the plain tensor, for operations that cannot be deferred; the step does not count.

        There is only one, because operations in place change it.
        """
        self.arm.fell_back = True
        if self._tensor is None:
            self._tensor = self._compute()
        return self._tensor

    def is_causal(self) -> bool:
        import torch

        mask = self.mask
        if mask is None or mask.dtype is not torch.bool or mask.shape[-1] != mask.shape[-2]:
            return False
        lower = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
        return mask.numel() == lower.numel() and torch.equal(mask.reshape(lower.shape), lower)

    def _then(self, change: Callable[[Any], Any], **fields: Any) -> Any:
        if self._tensor is not None:
            return change(self._tensor)
        before = self._compute
        after = Scores(self.arm, self.query, self.key, lambda: change(before()))
        for name in ("scale", "dropout", "mask", "is_weights"):
            setattr(after, name, fields.get(name, getattr(self, name)))
        return after

    @property
    def shape(self) -> Any:
        return (*self.query.shape[:-1], self.key.shape[-1])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> Any:
        return self.query.dtype

    @property
    def device(self) -> Any:
        return self.query.device

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Ignore the format: a fused kernel has its own, and its result has the format of the queries."""
        return self._then(lambda tensor: tensor.to(*args, **kwargs))

    def float(self) -> Any:
        return self._then(lambda tensor: tensor.float())

    def type_as(self, other: Any) -> Any:
        return self._then(lambda tensor: tensor.type_as(other))

    def _scaled(self, factor: Any, change: Callable[[Any], Any]) -> Any:
        can = isinstance(factor, (int, float)) and self.mask is None and not self.is_weights
        return self._then(change, scale=self.scale * factor) if can else change(self.plain())

    def __mul__(self, factor: Any) -> Any:
        return self._scaled(factor, lambda tensor: tensor * factor)

    __rmul__ = mul = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        factor = 1 / divisor if isinstance(divisor, (int, float)) else divisor
        return self._scaled(factor, lambda tensor: tensor / divisor)

    div = __truediv__

    def __add__(self, mask: Any) -> Any:
        import torch

        if isinstance(mask, torch.Tensor) and mask.is_floating_point() and self.mask is None:
            return self._then(lambda tensor: tensor + mask, mask=mask)
        return self.plain() + mask

    __radd__ = add = __add__

    def masked_fill(self, mask: Any, value: Any) -> Any:
        can = (
            isinstance(value, (int, float)) and value <= LOWEST and self.mask is None and not self.is_weights
        )
        if not can:
            return self.plain().masked_fill(mask, value)
        return self._then(lambda tensor: tensor.masked_fill(mask, value), mask=mask.logical_not())

    def masked_fill_(self, mask: Any, value: Any) -> Any:
        after = self.masked_fill(mask, value)
        if isinstance(after, Scores):
            self.mask, self._compute = after.mask, after._compute
        else:
            self._tensor = after
        return self

    def softmax(self, dim: int | None = None, *_args: Any, dtype: Any = None, **_kwargs: Any) -> Any:
        if dim not in (-1, self.query.dim() - 1) or self.is_weights:
            return self.plain().softmax(dim, dtype=dtype)
        return self._then(lambda tensor: tensor.softmax(-1, dtype=dtype), is_weights=True)

    def dropped(self, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
        import torch

        if self.is_weights and not self.dropout:
            return self._then(
                lambda tensor: torch.nn.functional.dropout(tensor, p, training),
                dropout=p if training else 0.0,
            )
        return torch.nn.functional.dropout(self.plain(), p, training)

    def __matmul__(self, values: Any) -> Any:
        fuses = self.is_weights and self._tensor is None
        return self.arm.attend(self, values) if fuses else self.plain() @ values

    matmul = bmm = __matmul__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        known = {"softmax": "softmax", "dropout": "dropped", "masked_fill": "masked_fill"}
        if name in known and isinstance(args[0], cls):
            kwargs.pop("_stacklevel", None)
            return getattr(args[0], known[name])(*args[1:], **kwargs)
        plain = [each.plain() if isinstance(each, cls) else each for each in args]
        return function(*plain, **kwargs)


def _on_tensor(name: str) -> Callable[..., Any]:
    """Make a method for an operator of Python, which looks for it in the class alone."""

    def operate(self: Scores, *args: Any) -> Any:
        plain = [each.plain() if isinstance(each, Scores) else each for each in args]
        return getattr(self.plain(), name)(*plain)

    return operate


for _name in (
    *("__getitem__", "__setitem__", "__len__", "__iter__", "__bool__", "__float__", "__int__", "__array__"),
    *("__sub__", "__rsub__", "__isub__", "__neg__", "__abs__", "__pow__", "__rpow__", "__rtruediv__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__", "__xor__", "__invert__", "__rmatmul__"),
):
    setattr(Scores, _name, _on_tensor(_name))


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose the arm if lines of the user's write attention out."""
    calls = [site for site in context.sites if site.kind == "call" and site.via is None]
    found = [site for site in calls if site.op == ATTENTION]
    products = [site.place for site in calls if site.op == PRODUCT]
    if found and products:
        place = max(found, key=lambda site: site.calls_per_step).place
        arm = FusedAttention(context.user_code, context.clock, products, place=place)
        arm.refusal = COMPILED if has_compiled() else None
        yield arm
