"""Train the Darkroom transformer as `train.py` does, at the speed the hardware allows.

    python examples/darkroom/train_fast.py --size small
    python examples/darkroom/train_fast.py --levers all --mend --save darkroom.safetensors
    torchrun --nproc-per-node 2 examples/darkroom/train_fast.py --mend

Model, loss and gradients are those of `train.py`, and so are the faults that change what is computed.
`--mend` removes these two: the heads read each sample's query instead of padding, and under torchrun each
rank draws its own share of the samples.  `--batch-size` counts the samples of one rank.

Levers, each of which can be had alone:
    causal       attention told that it is causal           same numbers
    answer_row   the last layer only where it is read       same numbers
    fused        AdamW in one kernel                        same up to rounding
    graph        the step launched as one CUDA graph        same numbers
    compile      torch.compile                              same up to rounding
    bf16         matrix products in bfloat16                other rounding
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed
from dataset import REGION, Batch
from every_moment import logits_of_every_moment
from fast_data import batches_on, endless, last_moments, moments
from fast_model import FastDarkroom
from fast_step import FastStep, Levers, logits_of_one_moment
from histories import GRID, learning_histories, split_goals
from train import SIZES

from flatout.ground.errors import FlatoutError, import_extra

LEVERS = tuple(field.name for field in dataclasses.fields(Levers))
SAVED = ("mend", "every_moment", "goals", "histories", "history_steps", "batch_size", "steps", "seed")
EXACT = ("causal", "answer_row", "fused", "graph")


def main(argv: Sequence[str] | None = None) -> None:
    settings = read_settings(argv)
    rank, num_ranks = join_ranks(settings)
    try:
        run(settings, rank=rank, num_ranks=num_ranks)
    except FlatoutError as error:
        raise SystemExit(f"train_fast.py: {error}") from error
    finally:
        if num_ranks > 1:
            torch.distributed.destroy_process_group()


def run(settings: argparse.Namespace, *, rank: int, num_ranks: int) -> None:
    torch.manual_seed(settings.seed)
    levers = chosen_levers(settings)
    goals, _held_out = split_goals(settings.goals, seed=settings.seed)
    histories = learning_histories(
        goals, histories_per_goal=settings.histories, num_steps=settings.history_steps, seed=settings.seed
    )
    samples = last_moments(histories) if settings.every_moment else moments(histories)
    batches = batches_on(
        samples,
        device=settings.device,
        batch_size=settings.batch_size,
        seed=settings.seed,
        one_shape=levers.one_shape or settings.every_moment,
        shard=rank if settings.mend else 0,
        num_shards=num_ranks if settings.mend else 1,
    )
    model = FastDarkroom(mend=settings.mend, causal=levers.causal, answer_row=levers.answer_row)
    model.to(settings.device)
    step = FastStep(
        model,
        levers=levers,
        lr=settings.lr,
        logits=logits_of_every_moment if settings.every_moment else logits_of_one_moment,
    )
    say = print if rank == 0 else silent
    on = ", ".join(name for name in LEVERS if getattr(levers, name)) or "none"
    say(f"{len(histories)} histories, {len(samples)} samples, training on {settings.device}, levers: {on}")
    say(f"data on the {batches.placement}", flush=True)
    train(step, endless(batches), settings, say=say)
    if settings.save and rank == 0:
        save(model, Path(settings.save), settings)
        say(f"saved {settings.save}")


def train(
    step: FastStep,
    batches: Iterator[Batch],
    settings: argparse.Namespace,
    *,
    say: Callable[..., None] = print,
) -> None:
    last_log_s, logged = time.perf_counter(), 0
    for number in range(1, settings.steps + 1):
        step(next(batches))
        if number % settings.log_every == 0 or number == settings.steps:
            loss, accuracy = step.metrics()
            now_s = time.perf_counter()
            say(
                f"step {number:6d}  loss {loss:.4f}  action accuracy {accuracy:.3f}"
                f"  {(number - logged) / (now_s - last_log_s):.2f} it/s",
                flush=True,
            )
            last_log_s, logged = now_s, number


def silent(*_values: object, **_options: object) -> None:
    """What ranks other than the first say."""


def chosen_levers(settings: argparse.Namespace) -> Levers:
    """`exact` and `all` leave out what the device does not have; a lever named itself is an error there."""
    on_gpu = settings.device.startswith("cuda")
    groups = {"none": (), "exact": EXACT, "all": LEVERS}
    if settings.levers in groups:
        names = [name for name in groups[settings.levers] if on_gpu or name != "graph"]
    else:
        names = settings.levers.split(",")
    return Levers(**dict.fromkeys(names, True))


def join_ranks(settings: argparse.Namespace) -> tuple[int, int]:
    """(rank, number of ranks) as torchrun gives them; the device becomes this rank's own."""
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        on_gpu = settings.device == "cuda"
        if on_gpu:
            settings.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(settings.device)
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    return rank, num_ranks


def save(model: FastDarkroom, path: Path, settings: argparse.Namespace) -> None:
    """The weights, and how they came about; an evaluation needs `mend`, `goals` and `seed`."""
    safetensors = import_extra("safetensors.torch", extra="adapters")
    known = {name: getattr(settings, name) for name in SAVED}
    half_written = path.with_name(f"{path.name}.part")
    weights = {name: value.contiguous().cpu() for name, value in model.state_dict().items()}
    safetensors.save_file(weights, half_written, metadata={name: str(int(v)) for name, v in known.items()})
    half_written.replace(path)


def read_settings(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags as given, the rest from the size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(SIZES), default="full", help="defaults of the next five")
    parser.add_argument("--goals", type=int, help=f"training goals, of {GRID * GRID} cells")
    parser.add_argument("--histories", type=int, help="learning histories per goal")
    parser.add_argument("--history-steps", type=int, help="steps of a history")
    parser.add_argument("--batch-size", type=int, help="samples of one rank")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument(
        "--levers", default="exact", help="none, exact, all, or names with commas (default: exact)"
    )
    parser.add_argument("--mend", action="store_true", help="remove the faults that change the results")
    parser.add_argument(
        "--every-moment",
        action="store_true",
        help="a sequence answers all 80 moments of its region; --batch-size counts regions; needs --mend",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 1e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10, help="steps per line of output (default: 10)")
    parser.add_argument("--save", metavar="FILE", help="where the weights go, a .safetensors file")
    settings = parser.parse_args(argv)

    for name, value in SIZES[settings.size].items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    if settings.device == "auto":
        settings.device = "cuda" if torch.cuda.is_available() else "cpu"
    refuse_bad(settings, parser)
    return settings


def refuse_bad(settings: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if not 1 <= settings.goals <= GRID * GRID:
        parser.error(f"--goals {settings.goals}: the grid has 1 to {GRID * GRID} goals")
    if settings.history_steps < REGION:
        parser.error(f"--history-steps {settings.history_steps}: a region needs {REGION} steps")
    for name in ("histories", "batch_size", "steps", "log_every"):
        if getattr(settings, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(settings, name)}: at least 1")
    if settings.levers not in ("none", "exact", "all"):
        unknown = [name for name in settings.levers.split(",") if name not in LEVERS]
        if unknown:
            parser.error(f"--levers {','.join(unknown)}: not one of {', '.join(LEVERS)}")
        if "graph" in settings.levers.split(",") and not settings.device.startswith("cuda"):
            parser.error(f"--levers graph: a CUDA graph needs a CUDA device, not {settings.device}")
    if settings.every_moment and not settings.mend:
        parser.error("--every-moment: reads each query's own position, as --mend does; give both")


if __name__ == "__main__":
    main()
