"""Which weights of a model evolve, and which of them move together.

A language model is read as a `Decoder`; its targets are the products of the blocks, with query, key and value
as one matrix and gate and up as one.  Any other module is taken as it is: its targets are the weights of its
Linear layers, and its vectors (biases, weights of norms) can have full noise.  Embedding and head of a
language model are not targets: their noise would be as large as the vocabulary.  Convolutions, embeddings,
`in_proj` of torch's attention and bare parameters get no noise.  `unmoved` lists every parameter without
noise.

An update runs a dozen operations on each matrix.  A GPU takes a few microseconds for a small matrix and the
host ten times as long to launch them, so a model of two hundred matrices would wait for the host.  All layers
have matrices of the same shapes: their factors lie in one tensor, a *stack*, and one batched product and one
kernel move them all.
"""

from __future__ import annotations

import bisect
import fnmatch
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from flatout.ground.errors import BadInput
from flatout.multiplex.factors import Factors
from flatout.multiplex.models.decoder import Decoder
from flatout.multiplex.swap import is_linear, takes_vectors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Kind = Literal["auto", "language", "module"]
Others = Literal["freeze", "full"]
Names = tuple[str, ...]

# Numbers in a stack's product and in the factors it reads: 256 MiB beside the model on a GPU; on a CPU, what
# its caches hold.  A larger matrix is a stack by itself.
DEVICE_NUMBERS = 1 << 26
CPU_NUMBERS = 1 << 18


def is_language_model(model: nn.Module | Decoder) -> bool:
    """Return whether a model is a causal language model that generates."""
    if isinstance(model, Decoder):
        return True
    can_generate = getattr(model, "can_generate", None)
    return callable(can_generate) and bool(can_generate())


def linear_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weight [out, in] of every linear layer, by its name; a Conv1D is transposed."""
    found = {}
    for name, module in model.named_modules():
        if is_linear(module):
            weight = module.get_parameter("weight").detach()
            found[name] = weight if isinstance(module, nn.Linear) else weight.mT
    return found


def vectors(model: nn.Module) -> dict[str, Tensor]:
    """Return every bias of a linear layer and every vector of a norm, by the parameter's name."""
    return {
        f"{name}.{leaf}": parameter.detach()
        for name, module in model.named_modules()
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 1 and takes_vectors(module)
    }


def choose_weights(weights: Mapping[str, Tensor], patterns: Sequence[str] | None) -> dict[str, Tensor]:
    """Choose the weights whose names match a pattern (*.mlp.*); all of them without patterns."""
    if patterns is not None and not patterns:
        raise BadInput("targets is empty: no weight would learn", hint="omit it, or name patterns: *.mlp.*")
    for pattern in patterns or ():
        if not fnmatch.filter(weights, pattern):
            some = ", ".join(list(weights)[:3]) or "none: the model has no Linear layer"
            raise BadInput(f"no target matches {pattern!r}", hint=f"names look like {some}")
    if not weights:
        raise BadInput("the model has no Linear layer to evolve", hint="low-rank noise needs a matrix")
    return {
        name: weight
        for name, weight in weights.items()
        if patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def unmoved_parameters(
    model: nn.Module, moved: Iterable[Tensor], *, names: Collection[str]
) -> dict[str, int]:
    """Return the parameters outside the memory of `moved` and not in `names`, with their sizes.

    A target may be a stack of several parameters, which are then views of it.
    """
    spans = sorted(_span(each) for each in moved)
    found = {}
    for name, parameter in model.named_parameters():
        first, last = _span(parameter)
        place = bisect.bisect_right(spans, (first, sys.maxsize)) - 1
        inside = place >= 0 and last <= spans[place][1]
        if not inside and name not in names:
            found[name] = parameter.numel()
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    return first, first + tensor.numel() * tensor.element_size()


def summarise(parameters: Mapping[str, int]) -> list[str]:
    """Summarise parameters in few lines: one for all layers, with a star for the layer's number."""
    alike: dict[tuple[str, int], int] = {}
    for name, count in parameters.items():
        key = re.sub(r"(?<=\.)\d+(?=\.)", "*", name), count
        alike[key] = alike.get(key, 0) + 1
    return [
        f"{name} ({f'{times} x ' if times > 1 else ''}{count:,})" for (name, count), times in alike.items()
    ]


def warn_of_frozen(model: nn.Module, frozen: Mapping[str, int]) -> None:
    """Warn of parameters that no noise can reach; vectors are frozen by choice."""
    by_choice = vectors(model)
    if shown := summarise({name: count for name, count in frozen.items() if name not in by_choice}):
        warnings.warn(
            f"Eggroll leaves these as they are, and they do not learn: {', '.join(shown)}. Noise is for "
            "Linear layers, their biases and norms. Name the `targets` to silence this warning.",
            UserWarning,
            stacklevel=3,
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """Factors of matrices of one shape: `shrink` [matrices, variants, rank, in], `expand` [..., out]."""

    shrink: Tensor
    expand: Tensor
    scales: tuple[float, ...]

    def __getitem__(self, number: int) -> Factors:
        return Factors(self.shrink[number], self.expand[number], self.scales[number])

    def part(self, variants: range) -> Stack:
        """Return the factors of some variants, without a copy."""
        first, last = variants.start, variants.stop
        return Stack(self.shrink[:, first:last], self.expand[:, first:last], self.scales)


def stacks_of(weights: Mapping[str, Tensor], *, terms: int) -> tuple[Names, ...]:
    """Group matrices, by name, into stacks; a product of a stack sums `terms`: variants times rank."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[str]] = {}
    for name, weight in weights.items():
        alike.setdefault((weight.shape, weight.dtype, weight.device), []).append(name)
    found: list[Names] = []
    for (shape, _, device), names in alike.items():
        numbers = shape.numel() + terms * sum(shape)
        size = max(1, (CPU_NUMBERS if device.type == "cpu" else DEVICE_NUMBERS) // numbers)
        found += [tuple(names[start : start + size]) for start in range(0, len(names), size)]
    return tuple(found)
