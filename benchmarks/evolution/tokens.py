"""Prompts encoded and completions decoded in one call, against one call for each.

    python benchmarks/evolution/tokens.py --model FOLDER --texts 2048

A table, then one JSON line.  Both arms must give the same, and the first must ask the tokenizer once,
which is counted; the times are the best of interleaved rounds, of the CPU: what other programs do then is
left out, and so is what several cores gain.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flatout.engines.evolution.tasks.task import Prompt
from flatout.engines.evolution.training.models import Texts

ROUNDS = 5
QUESTION = "is the sky blue ? is the house of stone near the long road ?"


@contextmanager
def counted(names: tuple[str, ...]) -> Iterator[list[str]]:
    """List the calls of these methods of every fast tokenizer: each handles one text, or one batch."""
    calls: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        plain = getattr(PreTrainedTokenizerFast, name)

        def call(self: Any, *given: Any, **options: Any) -> Any:
            calls.append(name)
            return plain(self, *given, **options)

        return call

    made = {name: counting(name) for name in names}
    with mock.patch.multiple(PreTrainedTokenizerFast, **made):
        yield calls


def best_s(arms: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the shortest time of each arm over interleaved rounds."""
    seconds = dict.fromkeys(arms, float("inf"))
    for _ in range(ROUNDS):
        for name, run in arms.items():
            began = time.process_time()
            run()
            seconds[name] = min(seconds[name], time.process_time() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder with a tokenizer")
    parser.add_argument("--texts", type=int, default=2048)
    arguments = parser.parse_args()
    both = Texts(AutoTokenizer.from_pretrained(arguments.model), chat=False)
    prompts = [Prompt(text=QUESTION, key=str(number), answer={}) for number in range(arguments.texts)]
    rows = both.ids(prompts)
    result: dict[str, Any] = {"benchmark": "evolution-tokens", "texts": arguments.texts}
    for name, together, apart, num_calls in (
        ("encode", lambda: both.ids(prompts), lambda: [both.ids([one])[0] for one in prompts], 1),
        ("decode", lambda: both.texts(rows), lambda: [both.texts([row])[0] for row in rows], 0),
    ):
        with counted(("_encode_plus", "_decode")) as calls:
            given = together()
        assert given == apart(), f"{name}: not what single calls give"
        assert len(calls) == num_calls, f"{name}: {len(calls)} calls for {len(prompts)} texts"
        seconds = best_s({"one call": together, "one call each": apart})
        rates = {arm: arguments.texts / taken for arm, taken in seconds.items()}
        gain = rates["one call"] / rates["one call each"]
        print(
            f"{name}: {arguments.texts} texts in one call, {rates['one call']:,.0f} a second of the CPU;"
            f" one by one {rates['one call each']:,.0f}: {gain:.1f}x"
        )
        result[name] = {"texts_per_s": rates, "gain": gain}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
