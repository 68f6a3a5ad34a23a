"""Does it learn?  Evolution against the untrained model and against a random search of the same budget.

    python benchmarks/evolution/learn.py --model FOLDER --seconds 60 --random --seed 1 --save DIR
    python benchmarks/evolution/learn.py --model FOLDER --epochs 100 --save DIR     # on a GPU that others use

The seed is that of the noise and of the training prompts; the held-out prompts are the same for every seed.
With `--epochs` what is learned does not depend on how busy the GPU is.  The result is written again after
every evaluation, so that a run that is cut short leaves its curve.

Both searches draw the same number of populations from the same noise and score them on the same training
prompts.  Evolution moves the weights after each; random search keeps the best members it has seen, scores
them again on fresh training prompts and answers with the best of those.  Both are judged on held-out prompts
alone.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1])]
from interleaved import ResultFile, cpu_name  # noqa: E402

import flatout  # noqa: E402
from flatout.engines.evolution import fitness  # noqa: E402
from flatout.engines.evolution.eggroll import Eggroll  # noqa: E402
from flatout.engines.evolution.rewards.pool import RewardPool  # noqa: E402
from flatout.engines.evolution.tasks.find_task import find_task  # noqa: E402
from flatout.engines.evolution.training import models  # noqa: E402
from flatout.engines.evolution.training.answers import score_texts  # noqa: E402
from flatout.engines.evolution.training.models import Texts  # noqa: E402
from flatout.engines.run.models import capability_of, choose_dtype  # noqa: E402
from flatout.multiplex.decode.generator import end_tokens  # noqa: E402

FINALISTS = 8


class Search:
    """A model, a task and a population that answers its prompts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.task = find_task(options.task, **dict(one.split("=") for one in options.task_option))
        dtype = choose_dtype("auto", capability=capability_of(self.device)).value
        self.model = models.open_model(options.model, device=self.device, dtype=dtype)
        self.held_out = self.task.prompts("heldout", epoch=0, count=options.held_out, seed=0)
        self.texts = Texts(
            models.open_tokenizer(options.model, prompts=self.held_out),
            stop=self.task.stop,
            ends=end_tokens(self.model),
            chat=False,
        )
        self.es = Eggroll(
            self.model,
            population=options.population,
            rank=options.rank,
            sigma=options.sigma,
            lr=options.lr,
            seed=options.seed,
        )
        self.pool = RewardPool(self.task.reward, workers=2, timeout_s=5.0)
        self.curve: list[dict[str, float | int | None]] = []

    def train_prompts(self, epoch: int, count: int) -> list[Any]:
        return self.task.prompts("train", epoch=epoch, count=count, seed=self.options.seed)

    def answers(self, prompts: list[Any], **which: Any) -> torch.Tensor:
        """Rewards [members, prompts]."""
        done = self.es.generate(
            self.texts.ids(prompts),
            max_new_tokens=self.task.max_new_tokens,
            slots=self.options.rows,
            max_tokens=self.options.max_tokens,
            capacity=self.options.population,
            eos=self.texts.ends,
            **which,
        )
        flat = [one for row in done for one in row]
        scores = score_texts(self.pool, self.texts, prompts * len(done), flat)
        return fitness.reward_matrix(
            scores.values,
            member_of_row=[member for member in range(len(done)) for _ in prompts],
            prompt_of_row=list(range(len(prompts))) * len(done),
            num_members=len(done),
            num_prompts=len(prompts),
        )

    def held_out_score(self) -> float:
        return float(self.answers(self.held_out, members=range(2), plain=True).nanmean())


def evolve(
    search: Search, *, seconds: float, epochs: int | None, every: int, keep: Callable[[], None]
) -> int:
    """Train until the epochs are done, or else until the time is over; the number of epochs."""
    start, es = time.perf_counter(), search.es
    search.curve.append({"epoch": 0, "seconds": 0.0, "held_out": search.held_out_score(), "train": None})
    while time.perf_counter() - start < seconds if epochs is None else es.epoch < epochs:
        rewards = search.answers(search.train_prompts(es.epoch, search.options.prompts))
        es.tell(rewards, cosine=False)
        if es.epoch % every == 0:
            point = {
                "epoch": es.epoch,
                "seconds": time.perf_counter() - start,
                "held_out": search.held_out_score(),
                "train": float(rewards.nanmean()),
            }
            search.curve.append(point)
            keep()
            print(
                f"  epoch {es.epoch}: {point['seconds']:.0f} s, held out {point['held_out']:.3f}", flush=True
            )
    return es.epoch


def random_search(search: Search, *, epochs: int) -> dict[str, Any]:
    """The best of all members of `epochs` populations, as far as training prompts can tell."""
    best: list[tuple[float, int, int]] = []
    for epoch in range(epochs):
        search.es.epoch = epoch
        means = search.answers(search.train_prompts(epoch, search.options.prompts)).nanmean(1)
        for member in means.topk(2).indices.tolist():
            heapq.heappush(best, (float(means[member]), epoch, member))
            if len(best) > FINALISTS:
                heapq.heappop(best)
    finals = []
    fresh = search.train_prompts(epochs + 1, 256)
    for seen, epoch, member in best:
        search.es.epoch = epoch
        pair = range(member // 2 * 2, member // 2 * 2 + 2)
        again = float(search.answers(fresh, members=pair)[member % 2].nanmean())
        held = float(search.answers(search.held_out, members=pair)[member % 2].nanmean())
        finals.append({"seen": seen, "again": again, "held_out": held, "epoch": epoch, "member": member})
    return max(finals, key=lambda one: one["again"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--task", default="arithmetic")
    parser.add_argument("--task-option", nargs="*", default=[])
    parser.add_argument("--population", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--sigma", type=float, default=0.004)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--epochs", type=int, default=None, help="train so many, however long they take")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", action="store_true", help="also a random search of the same budget")
    parser.add_argument("--save", type=Path, default=None, metavar="DIR")
    options = parser.parse_args()
    search = Search(options)
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    result: dict[str, Any] = {
        "benchmark": "evolution-learns",
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "torch": str(torch.__version__),
        "flatout": flatout.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **given,
        "model": options.model.name,
        "save": None,
        "held_out_prompts": len(search.held_out),
        "curve": search.curve,
    }

    file = ResultFile(options.save, subject=f"learn-{options.task}-seed{options.seed}", result=result)

    def keep() -> None:
        result["epochs"] = result["curve"][-1]["epoch"]
        file.write()

    epochs = evolve(search, seconds=options.seconds, epochs=options.epochs, every=options.every, keep=keep)
    print(
        f"{epochs} epochs: held out {search.curve[0]['held_out']:.3f} -> {search.curve[-1]['held_out']:.3f}"
    )
    if options.random:
        search.pool.close()
        del search
        result["random_search"] = random_search(Search(options), epochs=epochs)
        keep()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
