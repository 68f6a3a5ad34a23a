"""What single layers ask the allocator for, forward and backward: where rules about libraries come from.

    python benchmarks/memory/single_calls.py --out calls.json        # on a GPU, half a minute

Each call runs once before it is recorded, so that what libraries take for good is there already.  A row has
the sizes of all requests in their order, those of the forward apart from those of the backward, and the most
bytes that each of both held beyond what was there before it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Call = tuple[dict[str, Any], Callable[[], nn.Module], Callable[[], Tensor]]


def calls() -> Iterator[Call]:
    yield from _recurrent()
    yield from _recurrent_of_other_widths()
    yield from _depthwise()
    yield from _plain_convolutions()


def _recurrent() -> Iterator[Call]:
    kinds = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
    shapes = [(64, 128, 256), (64, 128, 512), (128, 32, 512), (256, 64, 1024), (512, 16, 256), (64, 256, 650)]
    for kind, make in kinds.items():
        for steps, rows, width in shapes:
            for num_layers, both in ((1, False), (1, True), (2, False)):
                described = {"call": kind, "steps": steps, "rows": rows, "width": width}
                described |= {"num_layers": num_layers, "both": both}
                yield (
                    described,
                    lambda make=make, width=width, num_layers=num_layers, both=both: make(
                        width, width, num_layers=num_layers, bidirectional=both
                    ),
                    lambda steps=steps, rows=rows, width=width: torch.randn(steps, rows, width),
                )


def _recurrent_of_other_widths() -> Iterator[Call]:
    """Inputs narrower and wider than the state, states small enough for kernels of their own, rows first."""
    widths = [(24, 768), (256, 512), (512, 512), (768, 512), (1024, 512), (384, 192), (192, 192), (96, 128)]
    for kind in (nn.LSTM, nn.GRU):
        for num_in, width in widths:
            for num_layers, both in ((1, False), (1, True), (2, False), (3, False), (2, True)):
                for rows_first in (True, False):
                    described = {"call": kind.__name__.lower(), "steps": 96, "rows": 64, "in": num_in}
                    described |= {"width": width, "num_layers": num_layers, "both": both}
                    yield (
                        {**described, "rows_first": rows_first},
                        partial(kind, num_in, width, num_layers, bidirectional=both, batch_first=rows_first),
                        partial(torch.randn, *((64, 96) if rows_first else (96, 64)), num_in),
                    )


def _depthwise() -> Iterator[Call]:
    shapes = [(32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 5, 2), (240, 28, 5, 1)]
    shapes += [(480, 14, 5, 1), (672, 14, 5, 2), (1152, 7, 3, 1), (256, 64, 3, 1), (1024, 16, 3, 1)]
    for batch_size in (16, 64):
        for channels, side, kernel, stride in shapes:
            yield _convolution(
                nn.Conv2d, batch_size, channels, channels, side, kernel, stride, groups=channels
            )


def _plain_convolutions() -> Iterator[Call]:
    """In one to three dimensions, transposed, grouped, strided, and of few channels."""
    for a, b, side, kernel, stride in [(64, 64, 56, 3, 1), (3, 64, 224, 7, 2), (128, 256, 28, 3, 2)]:
        yield _convolution(nn.Conv2d, 32, a, b, side, kernel, stride)
    for a, b, groups in [(64, 64, 4), (320, 320, 20), (128, 128, 8)]:
        yield _convolution(nn.Conv2d, 32, a, b, 28, 3, 1, groups=groups)
    for a, b, side in [(256, 128, 16), (128, 64, 32), (64, 3, 64), (512, 256, 8)]:
        yield _convolution(nn.ConvTranspose2d, 128, a, b, side, 4, 2)
    for a, b, dilation in [(64, 128, 1), (64, 128, 16), (64, 128, 512), (512, 512, 1), (1, 64, 1)]:
        yield _convolution(nn.Conv1d, 8, a, b, 4096, 3, 1, dilation=dilation)
    for a, b in [(3, 64), (64, 512)]:
        yield _convolution(nn.Conv1d, 32, a, b, 2048, 1, 1)
    for a, b, side, stride in [(3, 32, 56, 1), (32, 64, 28, 2), (64, 64, 14, 1), (128, 256, 14, 2)]:
        yield _convolution(nn.Conv3d, 8, a, b, side, 3, stride)


def _convolution(
    kind: type[nn.Module],
    batch_size: int,
    num_in: int,
    num_out: int,
    side: int,
    kernel: int,
    stride: int,
    **more: int,
) -> Call:
    num_dims = int(kind.__name__[-2])
    padding = 0 if kernel == 1 else (kernel - 1) // 2
    described = {"call": kind.__name__, "batch_size": batch_size, "in": num_in, "out": num_out}
    described |= {"side": side, "kernel": kernel, "stride": stride, **more}
    return (
        described,
        lambda: kind(num_in, num_out, kernel, stride=stride, padding=padding, **more),
        lambda: torch.randn(batch_size, num_in, *[side] * num_dims),
    )


def record(
    make_layer: Callable[[], nn.Module], make_input: Callable[[], Tensor], precision: str
) -> dict[str, Any]:
    with torch.device("cuda"):
        layer, x = make_layer(), make_input().requires_grad_()
    dtype = None if precision == "fp32" else DTYPES[precision]
    row: dict[str, Any] = {}
    for recorded in (False, True):
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            forward, out = _requests(lambda: layer(x), recorded=recorded)
        out = out[0] if isinstance(out, tuple) else out
        gradient = torch.ones_like(out)
        backward, _ = _requests(lambda out=out, gradient=gradient: out.backward(gradient), recorded=recorded)
        row = {"forward": forward, "backward": backward}
        del out, gradient
    return row


def _requests(work: Callable[[], Any], *, recorded: bool) -> tuple[dict[str, Any] | None, Any]:
    if not recorded:
        return None, work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=100_000)
    result = work()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    sizes = [
        event["size"] if event["action"] == "alloc" else -event["size"]
        for event in events
        if event["action"] in ("alloc", "free_completed")
    ]
    return {"peak_bytes": torch.cuda.max_memory_allocated() - before, "requests": sizes}, result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="calls of these kinds: lstm,gru")
    arguments = parser.parse_args()
    rows = []
    for described, make_layer, make_input in calls():
        if arguments.only and described["call"] not in arguments.only.split(","):
            continue
        for precision in DTYPES:
            row: dict[str, Any] = {**described, "precision": precision}
            try:
                row |= record(make_layer, make_input, precision)
            except RuntimeError as error:  # one call that a library refuses costs that call
                row["error"] = str(error).splitlines()[0][:200]
            rows.append(row)
            gc.collect()
            torch.cuda.empty_cache()
    result = {
        "hardware": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "cudnn": torch.backends.cudnn.version(),
        "rows": rows,
    }
    partial = Path(arguments.out + ".part")
    partial.write_text(json.dumps(result) + "\n")
    partial.replace(arguments.out)
    print(f"{len(rows)} calls, {sum('error' in row for row in rows)} failed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
