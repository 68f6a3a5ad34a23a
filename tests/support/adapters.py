"""Adapter runs in small: a tokenizer and an encoder made in code, settings for seconds, and reports."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.engines.adapters.evaluation.results import (
    ConfidenceBin,
    Evaluation,
    RoutingQuality,
    RoutingScores,
    ShownRow,
)
from flatout.engines.adapters.evaluation.score_routings import Subject
from flatout.engines.adapters.lora.bank import AdapterBank, AdapterSpec
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.token_blocks import TokenBlock, TokenBlocks
from flatout.engines.adapters.report.run_report import RunReport
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.adapters.tasks.known import task_named
from flatout.engines.adapters.tasks.task import encode_all
from flatout.engines.adapters.training.records import StepRecord
from flatout.testing.adapter_tasks import tiny_tokenizer as tiny_tokenizer

# A tiny encoder with a tokenizer, and settings under which all three phases run in seconds

LONGEST = 96


def save_tiny(folder: Path, *, seed: int = 0) -> Path:
    """A folder with a BERT of one layer and its tokenizer."""
    from transformers import BertConfig, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generated(*, train: int = 40, held_out: int = 8) -> dict[str, Any]:
    return {"source": "generated", "num_train": train, "num_validation": held_out, "num_test": held_out}


def tiny_settings(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """A task with a head of its own and one that writes, six steps, two epochs and four steps."""
    return {
        "model": str(model),
        "out": str(out),
        "device": "cpu",
        "max_length": LONGEST,
        "log_every": 1,
        "checkpoint_every": 2,
        "tasks": {
            "sentiment": {"rank": 2, "data": generated(), "patience": 9},
            "translation": {"rank": 3, "data": generated(), "settings": {"max_target_length": 32}},
        },
        "decoder": {"layers": 1},
        "router": {"hidden": [16]},
        "phase1": {
            "steps": 6,
            "tokens": 512,
            "accumulate": 2,
            "buckets": 2,
            "lr": 0.001,
            "evaluate_every": 3,
            "validate_rows": 8,
        },
        "phase2": {"epochs": 2, "rows": 16},
        "phase3": {
            "steps": 4,
            "tokens": 256,
            "accumulate": 2,
            "buckets": 2,
            "lr": 0.001,
            "evaluate_every": 2,
            "validate_rows": 8,
        },
        "evaluation": {"rows": 4, "tokens": 1024},
        **changes,
    }


def with_phase(settings: dict[str, Any], phase: str, **changes: Any) -> dict[str, Any]:
    return {**settings, phase: {**settings[phase], **changes}}


def opened(model: Path, out: Path, **changes: Any) -> Any:
    """The parts of a tiny run in this process."""
    from flatout.engines.adapters.assembly import AdapterAssembly
    from flatout.engines.adapters.settings import make_settings
    from flatout.engines.run.ranks import Ranks

    settings = make_settings(tiny_settings(model, out, **changes))
    return AdapterAssembly(settings, ranks=Ranks(device=torch.device(changes.get("device", "cpu"))))


def phase_run(assembly: Any, phase: str, *, steps: int, lines: list[str] | None = None) -> Any:
    """A phase that begins, which tells its lines and keeps its checkpoints as in earnest."""
    from flatout.engines.adapters.training.live_line import LiveLine
    from flatout.engines.adapters.training.phase import PhaseRun
    from flatout.ground.interrupts import Interrupts

    told: list[str] = [] if lines is None else lines
    return PhaseRun(
        assembly,
        phase=phase,
        steps=steps,
        found=None,
        log=None,
        live=LiveLine(cuda_index=None),
        stop=Interrupts(ask=True),
        on_line=told.append,
        on_progress=told.append,
    )


# A tiny real encoder with three adapters and three tasks, untrained, for what routes and scores

NAMES = ("sentiment", "qa", "translation")
WIDTH = 32


class CountingEncoder(PackedEncoder):
    """Keeps what each pass was given: adapter, rows, tokens, and whether adapters were mixed."""

    passes: list[tuple[int, int, int, bool]]

    def __call__(self, blocks: TokenBlocks, **options: Any) -> tuple[Tensor, ...]:
        (block,) = blocks
        mixed = options.get("mixture") is not None
        self.__dict__.setdefault("passes", []).append(
            (block.adapter, block.num_rows, block.num_tokens, mixed)
        )
        return super().__call__(blocks, **options)

    def depths(self, block: TokenBlock) -> tuple[Tensor, ...]:
        self.__dict__.setdefault("passes", []).append(
            (block.adapter, block.num_rows, block.num_tokens, False)
        )
        return super().depths(block)


def tiny_encoder(*, ranks: Sequence[int] = (4, 2, 3)) -> CountingEncoder:
    """Adapters that change what the encoder says: their second factors are not zero."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
    )
    model = BertModel(config)
    specs = [AdapterSpec(name=name, rank=rank) for name, rank in zip(NAMES, ranks, strict=True)]
    bank = AdapterBank(model, specs)
    for name in NAMES:
        drawn = {key: 0.3 * torch.randn_like(value) for key, value in bank.state_dict(name).items()}
        bank.load_state_dict(name, drawn)
    encoder = CountingEncoder(model, bank)
    encoder.passes = []
    return encoder


def subjects(encoder: PackedEncoder, *, rows: int = 12) -> dict[str, Subject]:
    """Generated rows of three tasks; the third writes through a decoder."""
    torch.manual_seed(1)
    tokenizer = tiny_tokenizer()
    words = encoder.model.get_input_embeddings().weight
    decoder = TextDecoder(
        words, end_id=tokenizer.sep_token_id, pad_id=tokenizer.pad_token_id, num_layers=1, max_length=12
    )
    found = {}
    for name in NAMES:
        task = task_named(name, **({"max_target_length": 12} if name == "translation" else {}))
        records = task.generated(rows, seed=3)
        examples, _ = encode_all(task, records, tokenizer, max_length=96, training=False)
        head = task.head(encoder.width, decoder=decoder if task.needs_decoder else None)
        found[name] = Subject(task=task, head=head, examples=examples, records=records)
    return found


# Evaluations and logs of adapters runs that were never run, for what only reads them

HOSTILE = "<script>alert(1)</script>\"'& $x_2$ \u202e\x00"
METRICS = {
    "sentiment": "accuracy",
    "qa": "f1",
    "summarisation": "rouge_l",
    "code": "bleu",
    "translation": "bleu",
}
TASKS = tuple(METRICS)
OWN = {"sentiment": 84.2, "qa": 61.5, "summarisation": 31.0, "code": 22.4, "translation": 38.9}
TERMS = ("router", "confidence", "balance", "efficiency", "consistency", "entropy", "temperature")


def scores(routing: Any, less: float, *, adapter: str | None = None) -> RoutingScores:
    """Every task some points below what its own adapter reaches; at home, `adapter` loses nothing."""
    return RoutingScores(
        routing=routing,
        adapter=adapter,
        by_task={
            task: {METRICS[task]: max(own - (0 if task == adapter else less), 0.0), "other": 50.0}
            for task, own in OWN.items()
        },
    )


def quality(**changes: Any) -> RoutingQuality:
    """A good router that takes some code for translations."""
    confusion = (
        (500, 0, 0, 0, 0), (2, 498, 0, 0, 0), (0, 4, 496, 0, 0), (0, 0, 1, 462, 37), (0, 0, 0, 9, 491),
    )  # fmt: skip
    counts = (4, 6, 9, 14, 20, 33, 52, 96, 240, 2026)
    bins = tuple(
        ConfidenceBin(
            low=number / 10,
            high=(number + 1) / 10,
            num_rows=count,
            num_right=round(count * (number + 0.6) / 10.2),
            mean_confidence=(number + 0.55) / 10,
        )
        for number, count in enumerate(counts)
    )
    values: dict[str, Any] = {
        "accuracy_share": sum(confusion[i][i] for i in range(5)) / 2500,
        "accuracy_by_task": {task: confusion[i][i] / 500 for i, task in enumerate(TASKS)},
        "confusion": confusion,
        "entropy_nats": 0.11,
        "needed_share": dict.fromkeys(TASKS, 0.2),
        "used_share": dict(zip(TASKS, (0.201, 0.201, 0.199, 0.188, 0.211), strict=True)),
        "balance": 0.9996,
        "calibration_error": 0.018,
        "bins": bins,
        "threshold": 0.6,
        "top_k": 2,
        "fallback": "uniform",
        "sure_share": 0.966,
        "sure_accuracy_share": 0.991,
        "temperature": 0.94,
    }
    return RoutingQuality(**{**values, **changes})


def evaluation(**changes: Any) -> Evaluation:
    """A whole evaluation with everything that a report can show."""
    values: dict[str, Any] = {
        "tasks": TASKS,
        "metrics": METRICS,
        "num_rows": dict.fromkeys(TASKS, 500),
        "scores": (
            scores("oracle", 0.0),
            scores("routed", 0.6),
            scores("end-to-end", 1.4),
            *(scores("single", 14.0 + number, adapter=task) for number, task in enumerate(TASKS)),
            scores("uniform", 9.0),
            scores("random", 19.0),
        ),
        "routing": quality(),
        "heads_only": {task: {METRICS[task]: own - 4.1} for task, own in OWN.items()},
        "shown": tuple(
            ShownRow(
                task=task,
                fields={"text": f"a row of {task}, " + "with some words " * 4, "label": "yes"},
                answers={"oracle": "yes", "routed": "" if task == "qa" else "yes"},
                adapter=task,
                confidence=0.97,
            )
            for task in TASKS
        ),
        "elapsed_s": 42.0,
    }
    return Evaluation(**{**values, **changes})


def log(*, steps: int = 400, every: int = 5) -> tuple[StepRecord, ...]:
    """The three phases of a run, with noise and with evaluations now and then."""
    drawn = random.Random(0)
    records = []
    for phase in ("phase1", "phase2", "phase3"):
        for step in range(every, steps + 1, every):
            falls = math.exp(-step / 120) + 0.05 * drawn.random()
            is_checked = step % 50 == 0
            tasks = {task: (1 + place) * falls for place, task in enumerate(TASKS)}
            terms = {term: falls / (1 + place) for place, term in enumerate(TERMS)}
            checked = {
                task: {"loss": (1 + place) * falls * 1.1, METRICS[task]: OWN[task] * (1 - falls / 2)}
                for place, task in enumerate(TASKS)
            }
            records.append(
                StepRecord(
                    phase=phase,
                    step=step,
                    losses={**(tasks if phase != "phase2" else {}), **(terms if phase != "phase1" else {})},
                    validation=checked if is_checked and phase != "phase2" else {},
                    routing={"accuracy": 1 - falls / 2} if is_checked and phase != "phase1" else {},
                )
            )
    return tuple(records)


def report(**changes: Any) -> RunReport:
    values: dict[str, Any] = {
        "name": "five-tasks",
        "model": "models/all-MiniLM-L6-v2",
        "evaluation": evaluation(),
        "records": log(),
        "device": "NVIDIA H200",
        "notes": ("12 rows of qa were left out: their answer lies behind the last token.",),
    }
    return RunReport(**{**values, **changes})


def hostile_report() -> RunReport:
    """Every text a stranger could have written."""
    bad = HOSTILE + "x" * 300
    found = Evaluation(
        tasks=(bad, "b"),
        metrics={bad: HOSTILE, "b": "f1"},
        num_rows={bad: 1, "b": 0},
        scores=(
            RoutingScores(routing="oracle", by_task={bad: {HOSTILE: 1e9}, "b": {"f1": -3.0}}),
            RoutingScores(routing="single", adapter=bad, by_task={bad: {HOSTILE: 3.0}, "b": {"f1": 1.0}}),
            RoutingScores(routing="single", adapter="b", by_task={bad: {HOSTILE: 3.0}, "b": {"f1": 1.0}}),
        ),
        routing=quality(
            confusion=((1, 0), (0, 0)),
            accuracy_by_task={bad: 1.0, "b": None},
            needed_share={bad: 1.0, "b": 0.0},
            used_share={bad: 1.0, "b": 0.0},
            sure_accuracy_share=None,
            balance=None,
        ),
        shown=(
            ShownRow(task=bad, fields={HOSTILE: HOSTILE * 30}, answers={HOSTILE: "y" * 5000}, adapter=bad),
        ),
        split=HOSTILE,
        notes=(HOSTILE,),
    )
    records = (
        StepRecord(phase="phase1", step=1, losses={bad: 1e30}, validation={bad: {HOSTILE: None}}),
        StepRecord(phase="phase2", step=1, routing={bad: 0.5}),
    )
    return RunReport(name=bad, model=HOSTILE, evaluation=found, records=records, device=HOSTILE)
