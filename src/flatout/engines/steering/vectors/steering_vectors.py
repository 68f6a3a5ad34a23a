"""A direction per layer, and how long the residual stream is there.

    vectors = fit(positive, negative, method="mean-difference")
    vectors.added(layer=13, strength=0.2)      # what to add to the residual stream after block 13

The residual stream grows by a factor of ten and more from the first layer to the last, so an amount that
rewrites an early layer is noise at a late one.  A strength is therefore counted in units of the layer's own
mean norm: strength 0.2 adds a vector a fifth as long as what is there, at every layer and in every model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from flatout.engines.run.fingerprint import model_fingerprint
from flatout.engines.run.tensor_files import open_tensors, save_tensors
from flatout.engines.steering.extract.activations import Activations
from flatout.engines.steering.model_blocks import dtype_name
from flatout.engines.steering.vectors.methods import METHODS, mean_difference
from flatout.ground.errors import BadInput

FORMAT = "flatout-steering-vectors"
VERSION = "1"
CHUNK_BYTES = 512 << 20  # of activations in fp64 at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class SteeringVectors:
    """Unit directions [L, D] and the mean norms [L] of the residual stream at `layers`."""

    values: Tensor
    norms: Tensor
    layers: tuple[int, ...]
    method: str
    recipe: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or len(self.values) != len(self.layers):
            raise BadInput(f"vectors are {tuple(self.values.shape)} for {len(self.layers)} layers")
        if self.norms.shape != (len(self.layers),):
            raise BadInput(f"norms are {tuple(self.norms.shape)} for {len(self.layers)} layers")

    def place_of(self, layer: int) -> int:
        """Return which row of `values` and `norms` belongs to a layer."""
        if layer not in self.layers:
            raise BadInput(f"there is no vector for layer {layer}", hint=f"there are {list(self.layers)}")
        return self.layers.index(layer)

    def direction(self, layer: int) -> Tensor:
        """Return the unit direction of a layer, [D]."""
        return self.values[self.place_of(layer)]

    def norm(self, layer: int) -> float:
        """Return the mean norm of the residual stream at a layer: what strength 1 adds."""
        return float(self.norms[self.place_of(layer)])

    def added(self, *, layer: int, strength: float) -> Tensor:
        """Return what a strength adds after block `layer`, [D]."""
        place = self.place_of(layer)
        return strength * self.norms[place] * self.values[place]

    def is_of_another_model(self, model: nn.Module, *, fingerprint: str | None = None) -> bool:
        """Return whether these were fitted on other weights; another dtype alone cannot be detected."""
        weights, dtype = self.recipe.get("weights"), self.recipe.get("dtype")
        if weights is None or dtype != dtype_name(model):
            return False
        return weights != (fingerprint or model_fingerprint(model))

    def save(self, path: Path | str) -> None:
        """Write a safetensors file, whole or not at all."""
        save_tensors(
            path,
            {"values": self.values.float(), "norms": self.norms.float(), "layers": torch.tensor(self.layers)},
            extra="steering",
            metadata={
                "format": FORMAT,
                "version": VERSION,
                "method": self.method,
                "recipe": json.dumps(dict(self.recipe)),
            },
        )


def load(path: Path | str) -> SteeringVectors:
    """Read vectors that `save` wrote."""
    if Path(path).is_dir():
        found = sorted(file.name for file in Path(path).glob("*.safetensors"))
        raise BadInput(
            f"{path} is a folder", hint=f"name one file in it: {', '.join(found) or 'it has none'}"
        )
    hint = "give a METHOD.safetensors that flatout steer fit wrote"
    with open_tensors(path, extra="steering", hint=hint) as (file, metadata):
        if metadata.get("format") != FORMAT:
            raise BadInput(
                f"{path} does not hold vectors of flatout", hint="flatout steer import reads others"
            )
        if metadata.get("version") != VERSION:
            raise BadInput(
                f"{path} has version {metadata.get('version')}; this flatout reads {VERSION}",
                hint="install the release that wrote it",
            )
        return SteeringVectors(
            values=file.get_tensor("values").clone(),
            norms=file.get_tensor("norms").clone(),
            layers=tuple(file.get_tensor("layers").tolist()),
            method=metadata["method"],
            recipe=json.loads(metadata["recipe"]),
        )


def load_methods(folder: Path, *, methods: Sequence[str]) -> dict[str, SteeringVectors]:
    """Read the vectors that `flatout steer fit` wrote into a folder, by method."""
    paths = {name: method_file(folder, name) for name in methods}
    absent = [name for name, path in paths.items() if not path.is_file()]
    if absent:
        there = sorted(path.stem for path in folder.glob("*.safetensors"))
        raise BadInput(
            f"{folder} has no vectors of {', '.join(absent)}",
            hint=f"it has {', '.join(there)}" if there else "make them with flatout steer fit",
        )
    return {name: load(path) for name, path in paths.items()}


def method_file(folder: Path, method: str) -> Path:
    """Return where a folder keeps the vectors of a method."""
    return folder / f"{method}.safetensors"


def fit(positive: Activations, negative: Activations, *, method: str, seed: int = 0) -> SteeringVectors:
    """Fit directions from the negative side to the positive one, at all layers at once.

    For "pca" row i of both sides belongs to pair i.  `seed` is that of "random".
    """
    if positive.layers != negative.layers:
        raise BadInput(
            f"the two sides have different layers: {positive.layers} and {negative.layers}",
            hint="extract both sides at the same layers",
        )
    if not len(positive.values) or not len(negative.values):
        raise BadInput("a side has no texts", hint="give texts of both sides")
    if method != "random" and method not in METHODS:
        raise BadInput(f"method {method!r} is unknown", hint=f"use one of {[*METHODS, 'random']}")
    norms = torch.cat([_norms(one.values) for one in (positive, negative)]).double().mean(0)
    _refuse_not_finite(norms, positive.layers)
    if method == "random":
        generator = torch.Generator().manual_seed(seed)
        shape = (len(positive.layers), positive.values.shape[2])
        raw = torch.randn(shape, generator=generator, dtype=torch.float64)
    else:
        raw = _directions(positive.values, negative.values, method)
    lengths = raw.norm(dim=1, keepdim=True)
    if flat := [layer for layer, length in zip(positive.layers, lengths, strict=True) if not length > 0]:
        raise BadInput(
            f"the two sides do not differ at layer {flat[0]}",
            hint="check whether both answers are read at the same token",
        )
    recipe = {
        **positive.recipe,
        "positive_texts": str(len(positive.values)),
        "negative_texts": str(len(negative.values)),
    }
    if method == "random":
        recipe["seed"] = str(seed)
    return SteeringVectors(
        values=(raw / lengths).float(),
        norms=norms.float(),
        layers=positive.layers,
        method=method,
        recipe=recipe,
    )


def _directions(positive_NLD: Tensor, negative_NLD: Tensor, method: str) -> Tensor:
    """Compute directions [L, D] of any length, as many layers at a time as memory for their copies allows."""
    bytes_of_layer = (len(positive_NLD) + len(negative_NLD)) * positive_NLD.shape[2] * 8
    layers = max(1, CHUNK_BYTES // bytes_of_layer)
    found = []
    for some in zip(positive_NLD.split(layers, dim=1), negative_NLD.split(layers, dim=1), strict=True):
        # Products of activations over all texts lose too many digits in fp32 for an inverse.
        sides = [side.transpose(0, 1).double() for side in some]
        raw_LD = METHODS[method](*sides)
        agreement_L1 = (raw_LD * mean_difference(*sides)).sum(1, keepdim=True)
        found.append(torch.where(agreement_L1 < 0, -raw_LD, raw_LD))  # an axis has no sign of its own
    return torch.cat(found)


def _norms(values_NLD: Tensor) -> Tensor:
    """Compute lengths [N, L] in float32: squares of bfloat16 lose digits, those of float16 overflow."""
    return torch.stack([layer_ND.float().norm(dim=1) for layer_ND in values_NLD.unbind(1)], dim=1)


def _refuse_not_finite(norms: Tensor, layers: tuple[int, ...]) -> None:
    wrong = [
        layer for layer, norm in zip(layers, norms.tolist(), strict=True) if norm != norm or norm == torch.inf
    ]
    if wrong:
        raise BadInput(
            f"activations of layer {wrong[0]} are not finite",
            hint="fp16 overflows in some models: load it in bfloat16 or float32",
        )
