"""The job with one thing changed on purpose, for comparisons: seeds, the last bit, 64 bits, no dropout.

All trials of a tuning start with the same state of every generator, even if the script sets no seed, because
their results are compared number by number.
"""

from __future__ import annotations

import itertools
import random
import sys
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from flatout.ground.script.main import after_import
from flatout.measure.patches import Patches
from flatout.tuner.first_call import Inputs

FIRST_SEED = 20_240  # if the script sets none


def seed_all(torch: Any, patches: Patches, by: int) -> None:
    """Start with a known state, and add `by` to every seed that the script sets."""

    def shifted(real: Callable[..., Any]) -> Callable[..., Any]:
        def seed(number: Any = None, *args: Any, **kwargs: Any) -> Any:
            return real(number + by if isinstance(number, int) else number, *args, **kwargs)

        return seed

    def seed_numpy(numpy: ModuleType) -> None:
        real_default, made = numpy.random.default_rng, itertools.count()

        def default_rng(seed: Any = None) -> Any:
            return real_default([FIRST_SEED + by, next(made)] if seed is None else seed)

        numpy.random.seed(FIRST_SEED + by)
        patches.replace(numpy.random, "default_rng", default_rng)
        if by:
            patches.replace(numpy.random, "seed", shifted(numpy.random.seed))

    torch.manual_seed(FIRST_SEED + by)
    random.seed(FIRST_SEED + by)
    if by:
        patches.replace(torch, "manual_seed", shifted(torch.manual_seed))
        patches.replace(random, "seed", shifted(random.seed))
    after_import("numpy", seed_numpy)


def fix_samples(torch: Any, patches: Patches) -> None:
    """Make what a dataset draws for a batch depend on its indices alone, whichever process fetches it."""
    from torch.utils.data._utils import fetch

    @patches.around(fetch._MapDatasetFetcher, "fetch")
    def fetch_batch(real: Any, fetcher: Any, indices: Any) -> Any:
        numpy, seed = sys.modules.get("numpy"), zlib.crc32(repr(indices).encode())
        before = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        try:
            return real(fetcher, indices)
        finally:
            random.setstate(before[0])
            torch.set_rng_state(before[1])
            if numpy is not None:
                numpy.random.set_state(before[2])


def nudge(torch: Any, parameter: Any) -> None:
    """Move every second element by one unit in the last place of the format it is multiplied in.

    Under autocast that is a 16-bit format.  Rounding to it moves values by up to half of such a unit.
    """
    kind = parameter.device.type
    moved = parameter.detach().clone().view(-1)
    if torch.is_autocast_enabled(kind) and parameter.dtype == torch.float32:
        by = torch.finfo(torch.get_autocast_dtype(kind)).eps / 4
        moved[::2] *= 1 + by
        moved[1::2] *= 1 - by
    else:
        moved[::2] = torch.nextafter(moved[::2], moved[::2] * 2)
    parameter.copy_(moved.view_as(parameter))


def widen(inputs: Inputs) -> Inputs:
    """Convert the inputs to 64 bits."""
    from flatout.measure.batches import map_arrays

    def wide(array: Any) -> Any:
        return array.double() if getattr(array, "is_floating_point", lambda: False)() else array

    args, kwargs = inputs
    return tuple(map_arrays(list(args), wide)), map_arrays(kwargs, wide)


def compute_in_64_bits(torch: Any, patches: Patches) -> None:
    """Widen what meets a 64-bit tensor in a function: targets, constants, what was made before the model.

    What a function writes into keeps its format, and gradients are asked of the script's own tensors.
    """
    from torch.overrides import TorchFunctionMode

    narrow = {torch.float32, torch.float16, torch.bfloat16}

    def formats(values: Any) -> set[Any]:
        found = {each.dtype for each in values if isinstance(each, torch.Tensor)}
        return found.union(*(formats(each) for each in values if isinstance(each, list | tuple)))

    def wide(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(wide, value)) if type(value) in (list, tuple) else value
        return value.double() if getattr(value, "dtype", None) in narrow else value

    class Wide(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            met = formats([*args, *kwargs.values()])
            if torch.float64 in met and not met.isdisjoint(narrow) and not _writes(function, kwargs):
                args, kwargs = tuple(map(wide, args)), {name: wide(each) for name, each in kwargs.items()}
            return function(*args, **kwargs)

    mode: Any = Wide()
    mode.__enter__()
    patches.on_undo(lambda: mode.__exit__(None, None, None))


def _writes(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a function writes into its arguments or asks for their gradients."""
    name = getattr(function, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or "set" in name
    return in_place or "out" in kwargs or "autograd" in (getattr(function, "__module__", None) or "")


def switch_dropout_off(torch: Any, patches: Patches) -> None:
    """Turn dropout off: formats draw different random masks, so gradients are compared without them."""
    functional = torch.nn.functional
    for name in ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"):
        patches.replace(functional, name, _without_chance(getattr(functional, name)))
    real = functional.scaled_dot_product_attention

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kw: Any
    ) -> Any:
        return real(query, key, value, attn_mask, 0.0, *args, **kw)

    patches.replace(functional, "scaled_dot_product_attention", attention)


def _without_chance(real: Callable[..., Any]) -> Callable[..., Any]:
    def same(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return real(x, 0.0, training, inplace)

    return same


def draw_as_eager_does() -> None:
    """Let compiled code draw like eager code: only then can losses be compared."""
    from torch._inductor import config

    config.fallback_random = True
