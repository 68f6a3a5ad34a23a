"""Triton kernels; importing one imports triton, which CUDA builds of torch bring.

step        a decode step of a Llama-shaped model, made of: norm, attend, gate, split (prefill), choose
linear      the correction of rows in any order
noise       normal numbers by table
"""

from __future__ import annotations

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None
