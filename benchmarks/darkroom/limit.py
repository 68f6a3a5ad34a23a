"""What a step must cost at least: its arithmetic and its memory traffic, against the device's peaks.

Arithmetic counts the matrix products of the forward pass three times (backward makes two of each), and
attention's products as causal: half of them.  The last layer is counted at one row per sample, since only
that row is read.  Traffic counts what a perfectly fused step still moves: each layer's input, queries,
keys, values, attended rows, both norms and the hidden rows of the feed-forward, written once and read
once forward, read once backward, with a gradient of the same size written and read.  Neither can be
reached; the larger of the two says how far there is to go.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatout.hardware.matching import find_datasheet

WIDTH, NUM_LAYERS, FEED_FORWARD, ROW_WIDTH = 64, 4, 256, 10
PASSES_OF_A_ROW = 5  # written, read, read again backward, its gradient written and read


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The floor of one step."""

    flops: float
    traffic_bytes: float
    arithmetic_s: float | None  # None: no peak is known for this device
    traffic_s: float | None

    @property
    def step_s(self) -> float | None:
        if self.arithmetic_s is None or self.traffic_s is None:
            return None
        return max(self.arithmetic_s, self.traffic_s)


def limit_of_step(*, batch_size: int, num_tokens: int, device_name: str | None, dtype: str) -> Limit:
    """The floor for `batch_size` sequences of `num_tokens` tokens, in "fp32" or "bf16"."""
    flops = 3 * batch_size * forward_flops(num_tokens)
    traffic_bytes = batch_size * kept_numbers(num_tokens) * PASSES_OF_A_ROW * (2 if dtype == "bf16" else 4)
    sheet = find_datasheet(device_name) if device_name else None
    peak = sheet.peak_flops.get(dtype) if sheet else None
    return Limit(
        flops=flops,
        traffic_bytes=traffic_bytes,
        arithmetic_s=flops / peak if peak else None,
        traffic_s=traffic_bytes / sheet.bandwidth_bytes_per_s if sheet else None,
    )


def forward_flops(num_tokens: int) -> float:
    """Of one sequence."""
    projections = 2 * num_tokens * WIDTH * 3 * WIDTH
    attention = 2 * 2 * num_tokens * num_tokens / 2 * WIDTH
    rest_of_a_row = 2 * WIDTH * WIDTH + 2 * 2 * WIDTH * FEED_FORWARD
    whole_layer = projections + attention + num_tokens * rest_of_a_row
    last_layer = 2 * num_tokens * WIDTH * 2 * WIDTH + 2 * 2 * num_tokens * WIDTH + rest_of_a_row
    embedding = 2 * num_tokens * ROW_WIDTH * WIDTH
    return (NUM_LAYERS - 1) * whole_layer + last_layer + embedding


def kept_numbers(num_tokens: int) -> float:
    """Numbers of one sequence that backward needs, or that a kernel hands to the next."""
    whole_layer = num_tokens * (WIDTH + 3 * WIDTH + WIDTH + 2 * WIDTH + FEED_FORWARD)
    last_layer = num_tokens * (WIDTH + 2 * WIDTH)
    return (NUM_LAYERS - 1) * whole_layer + last_layer + num_tokens * (ROW_WIDTH + WIDTH)
