"""Names for what a result depends on: every bit of the weights, the config, the tokenizer.

A cached result under the name of another model is worse than no result.  So a model's name is a hash of all
its bytes, with names, shapes and dtypes, not of a path or a sample of values.  Hashing releases the
interpreter's lock, so parameters are hashed in parallel: an 8B model in bf16 is 16 GB, once per run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from flatout.ground.errors import BadInput

CHUNK_BYTES = 64 << 20  # copied from a GPU at a time
# Where a config was read from, and by which version, does not change what the model computes.
PROVENANCE = {"_name_or_path", "transformers_version", "_commit_hash", "dtype", "torch_dtype"}
SAMPLED = 16  # characters of the names in earlier checkpoints, which hash a sample of the values
SAMPLES = 1024


def weights_fingerprint(model: nn.Module) -> str:
    """Name a model's parameters: a checkpoint belongs to them."""
    return _weights(model.named_parameters()).hexdigest()[:32]


def model_fingerprint(model: nn.Module) -> str:
    """Return a hash of what a model computes: its parameters, buffers, config and active adapters."""
    whole = _weights([*model.named_parameters(), *model.named_buffers()])
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        said = {name: value for name, value in config.to_dict().items() if name not in PROVENANCE}
        whole.update(json.dumps(said, sort_keys=True, default=str).encode())
    for state in _adapter_states(model):
        whole.update(state.encode())
    return whole.hexdigest()[:32]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Name how a tokenizer cuts text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = backend.to_str()
    else:
        content = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def check_model(saved: str, model: nn.Module, *, name: str, checkpoint: object) -> None:
    """Raise BadInput if a checkpoint's saved fingerprint is that of another model."""
    parameters = list(model.named_parameters())
    if len(saved) == SAMPLED:
        same = saved in (_sampled(parameters, dtypes=True), _sampled(parameters, dtypes=False))
    else:
        same = saved == weights_fingerprint(model)
    if not same:
        raise BadInput(
            f"the checkpoint {checkpoint} belongs to a model other than {name}",
            hint="resume with the model that the run started with",
        )


def _weights(tensors: Iterable[tuple[str, Tensor]]) -> hashlib._Hash:
    ordered = sorted(tensors, key=lambda item: item[0])
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        digests = list(pool.map(lambda item: _tensor_digest(*item), ordered))
    whole = hashlib.sha256()
    for digest in digests:
        whole.update(digest)
    return whole


def _tensor_digest(name: str, tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    flat = tensor.detach().reshape(-1)
    for piece in flat.split(max(1, CHUNK_BYTES // flat.element_size())):
        if piece.numel():
            digest.update(memoryview(piece.cpu().contiguous().view(torch.uint8).numpy()))
    return digest.digest()


def _sampled(parameters: Iterable[tuple[str, Tensor]], *, dtypes: bool) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters, key=lambda item: item[0]):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLES)].float().cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)}{f' {parameter.dtype}' if dtypes else ''}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:SAMPLED]


def _adapter_states(model: nn.Module) -> Iterator[str]:
    """Yield which adapters of a PEFT model are active: their weights are there either way."""
    for name, module in model.named_modules():
        if hasattr(module, "merged_adapters"):
            active, merged = module.active_adapters, module.merged_adapters
            yield f"{name} {active} {merged} {module.disable_adapters} {getattr(module, 'scaling', None)}"
