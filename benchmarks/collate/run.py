"""How long a padded batch takes to make: PadCollate, the usual ways, and a copy of the same bytes.

python benchmarks/collate/run.py [--rounds 40] [--threads 1] [--quick] [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

sys.path.insert(0, str(Path(__file__).parents[1]))
from interleaved import arguments, compare, measure, ratio, report

from flatout.data import Pad, PadCollate

HERE = Path(__file__).parent
OURS = "flatout"
# what makes the same batch from the same input
OURS_BESIDE = {
    "list, concatenate, stack": OURS,
    "pad_sequence": "flatout, tensors",
    "default_collate, equal lengths": "flatout, equal lengths",
    "default_collate, equal tensors": "flatout, equal tensors",
    "transformers": "flatout, the same lists",
    "pad_sequence, pin_memory": "flatout, tensors, pinned",
    "default_collate, equal tensors, pin_memory": "flatout, equal tensors, pinned",
}
Sample = dict[str, Any]
Arm = Callable[[], object]


def tokens(random: np.random.Generator) -> list[Sample]:
    return [{"input_ids": random.integers(1, 30000, n)} for n in random.integers(8, 129, 512)]


def transitions(random: np.random.Generator) -> list[Sample]:
    return [
        {
            "states": random.random((n, 2), dtype=np.float32),
            "actions": random.integers(0, 5, n),
            "rewards": random.random(n, dtype=np.float32),
            "next_states": random.random((n, 2), dtype=np.float32),
        }
        for n in random.integers(0, 160, 512)
    ]


def features(random: np.random.Generator) -> list[Sample]:
    return [{"frames": random.random((n, 80), dtype=np.float32)} for n in random.integers(100, 1001, 64)]


def large(random: np.random.Generator) -> list[Sample]:
    """Beyond 32 MiB the C library takes fresh pages for every batch; buffers that are reused have theirs."""
    return [{"frames": random.random((n, 80), dtype=np.float32)} for n in random.integers(100, 1001, 256)]


SHAPES = {"tokens": tokens, "transitions": transitions, "features": features, "large": large}


def concatenate_and_stack(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """As it is written in many training scripts."""
    batch = {}
    for name in samples[0]:
        longest = max(len(sample[name]) for sample in samples)
        padded = []
        for sample in samples:
            values = sample[name]
            padding = longest - len(values)
            if padding > 0:
                values = np.concatenate([values, np.zeros((padding, *values.shape[1:]), dtype=values.dtype)])
            padded.append(values)
        batch[name] = torch.tensor(np.stack(padded))
    return batch


def pad_sequences(samples: list[Sample]) -> dict[str, torch.Tensor]:
    return {name: pad_sequence([sample[name] for sample in samples], batch_first=True) for name in samples[0]}


def copy_bytes(batch: dict[str, torch.Tensor]) -> Arm:
    """A copy of the batch's bytes into memory that is there already."""
    targets = [torch.empty_like(values) for values in batch.values()]

    def copy() -> None:
        for target, source in zip(targets, batch.values(), strict=True):
            target.copy_(source)

    return copy


def transformers_arms(samples: list[Sample]) -> dict[str, Arm]:
    """DataCollatorWithPadding and PadCollate on the lists that tokenizers give."""
    try:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast
    except ImportError:
        return {}
    vocabulary = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    make: Any = PreTrainedTokenizerFast  # its constructor has no types
    tokenizer = make(tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]")
    lists = [
        {"input_ids": sample["input_ids"].tolist(), "attention_mask": [1] * len(sample["input_ids"])}
        for sample in samples
    ]
    return {
        "transformers": partial(DataCollatorWithPadding(tokenizer), lists),
        "flatout, the same lists": partial(PadCollate(), lists),
        "flatout, lists, own mask": partial(
            PadCollate({"input_ids": Pad(mask="attention_mask")}),
            [{"input_ids": each["input_ids"]} for each in lists],
        ),
    }


def pinned_arms(tensors: list[Sample], equal_tensors: list[Sample]) -> dict[str, Arm]:
    """Batches in page-locked memory, as a copy to the GPU wants them."""
    if not torch.cuda.is_available():
        return {}
    collate = PadCollate(pinned=True)
    assert all(values.is_pinned() for values in collate(tensors).values())

    def pinned(make: Callable[[list[Sample]], Sample], samples: list[Sample]) -> Sample:
        return {name: values.pin_memory() for name, values in make(samples).items()}

    return {
        "flatout, tensors, pinned": partial(collate, tensors),
        "pad_sequence, pin_memory": partial(pinned, pad_sequences, tensors),
        "flatout, equal tensors, pinned": partial(collate, equal_tensors),
        "default_collate, equal tensors, pin_memory": partial(pinned, default_collate, equal_tensors),
    }


def arms_of(shape: str, samples: list[Sample]) -> dict[str, Arm]:
    tensors = [{name: torch.from_numpy(values) for name, values in sample.items()} for sample in samples]
    batch = PadCollate()(samples)
    equal = [{name: values[i].numpy() for name, values in batch.items()} for i in range(len(samples))]
    equal_tensors = [{name: values[i] for name, values in batch.items()} for i in range(len(samples))]
    expected = concatenate_and_stack(samples)
    ours = [PadCollate()(each) for each in (tensors, equal, equal_tensors)]
    for found in (batch, *ours, pad_sequences(tensors), default_collate(equal_tensors)):
        assert all(torch.equal(found[name], expected[name]) for name in expected), shape
    return {
        OURS: partial(PadCollate(), samples),
        "flatout, reused buffers": partial(PadCollate(reuse=2), samples),
        "flatout, tensors": partial(PadCollate(), tensors),
        "list, concatenate, stack": partial(concatenate_and_stack, samples),
        "pad_sequence": partial(pad_sequences, tensors),
        "flatout, equal lengths": partial(PadCollate(), equal),
        "flatout, equal tensors": partial(PadCollate(), equal_tensors),
        "default_collate, equal lengths": partial(default_collate, equal),
        "default_collate, equal tensors": partial(default_collate, equal_tensors),
        "memcpy": copy_bytes(batch),
        **(transformers_arms(samples) if shape == "tokens" else {}),
        **pinned_arms(tensors, equal_tensors),
    }


def raced(arms: dict[str, Arm], *, rounds: int) -> dict[str, Any]:
    """Every arm against the first, and every peer against ours on its own input."""
    seconds = measure(arms, rounds=rounds)
    row: dict[str, Any] = compare(seconds, ours=OURS)
    for peer, ours in OURS_BESIDE.items():
        if peer in seconds:
            row[peer]["beside"] = {"arm": ours, **ratio(seconds[peer], seconds[ours])}
    return row


def print_table(shape: str, num_bytes: int, row: dict[str, Any]) -> None:
    print(f"\n{shape}: {num_bytes / 2**20:.2f} MiB a batch")
    print(f"{'arm':42} {'per batch':>12} {'share of memcpy':>16}  times flatout on the same input")
    for name, found in row.items():
        share = row["memcpy"]["seconds"] / found["seconds"]
        line = f"{name:42} {found['seconds'] * 1e6:9.1f} µs {share:16.3f}"
        if "beside" in found:
            beside = found["beside"]
            line += f"  {beside['ratio']:.2f} [{beside['low']:.2f}, {beside['high']:.2f}]"
        print(line)


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    rounds = 5 if options.quick else options.rounds
    rows: dict[str, Any] = {}
    for shape, make in SHAPES.items():
        samples = make(np.random.default_rng(0))
        num_bytes = sum(values.nbytes for values in PadCollate()(samples).values())
        rows[shape] = raced(arms_of(shape, samples), rounds=rounds)
        print_table(shape, num_bytes, rows[shape])
    report("collate", {"shapes": rows}, folder=HERE, save=options.save)


if __name__ == "__main__":
    main()
