"""Vectors to and from other libraries, where they are plain tensors.

repeng             GGUF control vectors, also llama.cpp's; its layer N is the stream after block N, as here
                   (llama.cpp itself refuses layer 0)
steering-vectors   has no file format of its own: its vectors are a dict {layer: tensor}, which
                   `directions_of` gives and `from_directions` takes; on disk they are pickles, which can run
                   any code when loaded and are refused
safetensors        tensors named by their layer: "13", "layer.13" (as `write_plain` names them) or
                   "direction.13"; two lines make a dict of steering-vectors of them

What is exchanged is what strength 1 adds, so a strength here is a coefficient (or multiplier) there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flatout.engines.run.tensor_files import open_tensors, save_tensors
from flatout.engines.steering.vectors.gguf import read_control_vector, write_control_vector
from flatout.engines.steering.vectors.steering_vectors import FORMAT, SteeringVectors, load
from flatout.ground.errors import BadInput

NAME = re.compile(r"(?:(?:layer|direction)\.)?(\d+)")
PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
CONVERT = (
    "save plain tensors where it was made: "
    "safetensors.torch.save_file({str(k): v for k, v in vector.layer_activations.items()}, path)"
)


def from_directions(directions: Mapping[int, Tensor]) -> SteeringVectors:
    """Make vectors whose strength 1 adds `directions`."""
    if not directions:
        raise BadInput("there are no directions")
    layers = tuple(sorted(directions))
    shapes = {tuple(directions[layer].shape) for layer in layers}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1:
        raise BadInput(f"directions have shapes {sorted(shapes)}", hint="give one vector [width] per layer")
    values = torch.stack([directions[layer].detach().float().cpu() for layer in layers])
    norms = values.norm(dim=1)
    wrong = [layer for layer, norm in zip(layers, norms, strict=True) if not 0 < norm < torch.inf]
    if wrong:
        raise BadInput(f"the direction of layer {wrong[0]} is zero or not finite")
    return SteeringVectors(values=values / norms[:, None], norms=norms, layers=layers, method="imported")


def directions_of(vectors: SteeringVectors) -> dict[int, Tensor]:
    """Return what strength 1 adds at each layer."""
    return {layer: vectors.added(layer=layer, strength=1.0) for layer in vectors.layers}


def read(path: Path | str) -> SteeringVectors:
    """Read vectors of flatout, a GGUF control vector, or plain tensors named by layer."""
    path = Path(path)
    if path.suffix in PICKLES:
        raise BadInput(f"{path} is a pickle, which flatout never loads", hint=CONVERT)
    if path.suffix == ".gguf":
        return from_directions(read_control_vector(path)[0])
    with open_tensors(path, extra="steering", hint="give a .safetensors or a .gguf file") as (file, metadata):
        if metadata.get("format") == FORMAT:
            return load(path)
        found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    directions = {}
    for name, tensor in found.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise BadInput(
                f"{path}: tensor {name!r} does not name a layer", hint="13, layer.13 or direction.13"
            )
        directions[int(match[1])] = tensor
    return from_directions(directions)


def write_plain(vectors: SteeringVectors, path: Path | str, *, model: str = "unknown") -> None:
    """Write what strength 1 adds, for other libraries: a GGUF control vector, or a tensor per layer."""
    path = Path(path)
    if path.suffix != ".safetensors":
        write(vectors, path, model=model)
        return
    plain = {f"layer.{layer}": direction for layer, direction in directions_of(vectors).items()}
    save_tensors(path, plain, extra="steering", metadata={"format": "pt"})


def write(vectors: SteeringVectors, path: Path | str, *, model: str = "unknown") -> None:
    """Write a GGUF control vector for repeng and llama.cpp, or by any other name flatout's own file.

    `model` is the kind of model that a GGUF file names, such as "llama".
    """
    path = Path(path)
    if path.suffix in PICKLES:
        raise BadInput(
            f"{path} would be a pickle, which flatout never writes", hint="use .safetensors or .gguf"
        )
    if path.suffix == ".gguf":
        write_control_vector(path, directions_of(vectors), model=model)
    else:
        vectors.save(path)
