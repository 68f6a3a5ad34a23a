"""Train the industry embedder: a plain loop over micro-batches, with mixed precision, clipping and AdamW.

python examples/embedder/train.py --stage 01
python examples/embedder/train.py --stage 01 --offline --steps 3 --set data_loader.max_length=32
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from embedder import Embedder, make_optimizer, step_loss
from industries import Texts, Tokens, batches, generated_industries, load_industries, tokenize
from settings import precision_of, read_settings
from torch import nn
from weights import load_weights, tokenizer_path

from flatout.ground.errors import NotFetched

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


def main(argv: Sequence[str] | None = None) -> None:
    flags = read_flags(argv)
    settings = read_settings(flags.conf, stage=flags.stage, overrides=flags.set)
    torch.manual_seed(int(settings["seed"]))
    try:
        tokens, model = make_parts(settings, offline=flags.offline)
    except NotFetched as error:
        raise SystemExit(str(error)) from None
    model = model.to(flags.device)
    steps = flags.steps or int(settings["training"]["trainer"]["max_steps"])
    num_trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    say(f"{len(tokens.codes)} industries; training {num_trainable:,} parameters on {flags.device}")
    report = train(
        model, batches(tokens, settings=settings, seed=int(settings["seed"])), settings, steps=steps
    )
    if flags.json:
        print(json.dumps(report))
    else:
        say(summary(report))


def make_parts(settings: Mapping[str, Any], *, offline: bool) -> tuple[Tokens, Embedder]:
    """Texts and model: the real ones, or where there is no network generated ones of the same shapes."""
    shape = {
        "max_length": int(settings["data_loader"]["max_length"]),
        "vocabulary": int(settings["model"]["encoder"]["vocabulary"]),
    }
    if offline:
        return tokenize(generated_industries(), tokenizer=None, **shape), Embedder(settings)
    tokens = tokenize(load_industries(), tokenizer=tokenizer_path(), **shape)
    return tokens, Embedder(settings, weights=load_weights())


def train(
    model: Embedder, batches: Iterator[dict[str, Texts]], settings: Mapping[str, Any], *, steps: int
) -> dict[str, Any]:
    """Run `steps` optimizer steps; what they lost, took and needed."""
    device = next(model.parameters()).device
    trainer = settings["training"]["trainer"]
    precision = precision_of(settings)
    if device.type == "cpu" and precision != "fp32":
        say(f"precision {precision} needs a GPU here: training in fp32 on the CPU")
        precision = "fp32"
    if precision == "pure-bf16":
        model.to(torch.bfloat16)
    if settings["model"]["gradient_checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trainable, settings)
    scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
    accumulation = int(trainer["accumulate_grad_batches"])
    losses, step_s = [], []
    for step in range(1, steps + 1):
        started_s = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for _ in range(accumulation):
            batch = to_device(next(batches), device)
            with (
                torch.autocast(device.type, dtype=AUTOCAST[precision])
                if precision in AUTOCAST
                else nullcontext()
            ):
                loss = step_loss(model, batch) / accumulation
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.detach()
            del loss, batch
        update(optimizer, scaler, trainable, clip_norm=float(trainer["gradient_clip_val"]))
        losses.append(total.item())  # waits for the device, so that the time is the step's
        step_s.append(time.perf_counter() - started_s)
        say(f"step {step:5d}  loss {losses[-1]:.4f}  {step_s[-1]:.2f} s")
    return make_report(settings, device, precision=precision, losses=losses, step_s=step_s)


def update(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    trainable: list[nn.Parameter],
    *,
    clip_norm: float,
) -> None:
    if scaler is None:
        nn.utils.clip_grad_norm_(trainable, clip_norm)
        optimizer.step()
    else:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trainable, clip_norm)
        scaler.step(optimizer)
        scaler.update()


def to_device(batch: dict[str, Texts], device: torch.device) -> dict[str, Texts]:
    return {group: {name: ids.to(device) for name, ids in texts.items()} for group, texts in batch.items()}


def make_report(
    settings: Mapping[str, Any],
    device: torch.device,
    *,
    precision: str,
    losses: list[float],
    step_s: list[float],
) -> dict[str, Any]:
    """One JSON document; memory is null where there is no GPU to ask."""
    on_gpu = device.type == "cuda"
    batch_size = int(settings["data_loader"]["batch_size"])
    accumulation = int(settings["training"]["trainer"]["accumulate_grad_batches"])
    return {
        "stage": settings.get("stage"),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "precision": precision,
        "batch_size": batch_size,
        "accumulation": accumulation,
        "effective_batch": batch_size * accumulation,
        "max_length": int(settings["data_loader"]["max_length"]),
        "n_positives": int(settings["n_positives"]),
        "n_negatives": int(settings["n_negatives"]),
        "losses": losses,
        "step_s": step_s,
        "max_allocated_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "max_reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
    }


def summary(report: Mapping[str, Any]) -> str:
    losses, step_s = report["losses"], report["step_s"]
    few = max(1, len(losses) // 4)
    first, last = statistics.mean(losses[:few]), statistics.mean(losses[-few:])
    lines = [
        f"loss {first:.4f} (first {few}) -> {last:.4f} (last {few})",
        f"step {statistics.median(step_s[1:] or step_s):.3f} s (median without the first)",
    ]
    if report["max_allocated_bytes"] is not None:
        allocated, reserved = (report[f"max_{kind}_bytes"] / 2**30 for kind in ("allocated", "reserved"))
        lines.append(f"memory {allocated:.2f} GiB allocated, {reserved:.2f} GiB reserved at most")
    return "\n".join(lines)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def read_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an embedder of industries.")
    parser.add_argument(
        "--conf", type=Path, default=Path(__file__).parent / "conf", help="folder of the settings"
    )
    parser.add_argument("--stage", help="stage of the curriculum: 01 to 05")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="a setting; may be repeated"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps (default: training.trainer.max_steps)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--offline", action="store_true", help="generated industries and untrained encoders")
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")
    flags = parser.parse_args(argv)
    if flags.steps is not None and flags.steps < 1:
        parser.error(f"--steps {flags.steps}: at least 1")
    return flags


if __name__ == "__main__":
    main()
