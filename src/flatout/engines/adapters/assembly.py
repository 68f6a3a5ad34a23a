"""The loaded parts of a run: encoder, adapters, tasks with their heads, decoder, router.

Checkpoints name all weights in one flat list:

    adapters/qa/encoder.layer.0....lora_A.weight    heads/qa/...    decoder/...    router/...

Each part is drawn from a seed made of its name, so that adding a task changes no other.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from flatout.engines.adapters.lora.bank import DEFAULT_TARGETS, AdapterBank, AdapterSpec
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.routing.features import features_of, width_of
from flatout.engines.adapters.routing.router import Decider, Router
from flatout.engines.adapters.settings import DEFAULT_RANK, AdaptSettings, TaskSettings
from flatout.engines.adapters.tasks.data_rows import SPLITS, DataOptions, Record, Splits, choose_some
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.adapters.tasks.generation import end_id_of
from flatout.engines.adapters.tasks.known import task_named
from flatout.engines.adapters.tasks.task import AdapterTask, Example, encode_all
from flatout.engines.adapters.training.records import BEST, PhaseCheckpoint
from flatout.engines.run import models
from flatout.engines.run.fingerprint import check_model, weights_fingerprint
from flatout.engines.run.ranks import Ranks
from flatout.ground import OnProgress, ignore
from flatout.ground.errors import BadInput
from flatout.ground.units import show_some

DEFAULT_TARGET_LENGTH = 64  # for a task that writes and does not set one
MOST_SHOWN = 5  # classes in one line


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPart:
    """One task of the run: its adapter's number, its settings and its head."""

    name: str
    adapter: int
    task: AdapterTask
    settings: TaskSettings
    head: nn.Module
    max_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSplit:
    """Examples and the records they were made of; example i is record `examples[i].index`."""

    examples: list[Example]
    records: list[Record]

    def some(self, number: int | None, *, task: AdapterTask) -> TaskSplit:
        """Return `number` of the examples, renumbered; all of them for None.

        A hash of the input chooses, so that a file may be sorted by class.
        """
        if number is None:
            return self
        chosen = choose_some(
            self.examples, number, key=lambda example: task.input_of(self.records[example.index])
        )
        return TaskSplit(
            examples=[dataclasses.replace(example, index=place) for place, example in enumerate(chosen)],
            records=[self.records[example.index] for example in chosen],
        )


class AdapterAssembly:
    """The parts of a run on one device; close it, or use it in a `with`."""

    def __init__(
        self,
        settings: AdaptSettings,
        *,
        ranks: Ranks,
        splits: Mapping[str, Splits] | None = None,
        on_progress: OnProgress = ignore,
    ) -> None:
        """Load the parts; `splits` are records that were read before, by task."""
        self.settings, self.ranks, self.device = settings, ranks, ranks.device
        self._on_progress = on_progress
        self._read = dict(splits or {})
        self._rows: dict[tuple[str, str], TaskSplit] = {}
        tasks = {name: make_task(settings, name) for name in settings.tasks}
        for name, given in settings.tasks.items():
            DataOptions.of(given.data, task=name)  # refuse wrong options before loading anything
        self.model = open_encoder(Path(settings.model), device=self.device)
        self.tokenizer = open_tokenizer(Path(settings.model))
        self.fingerprint = weights_fingerprint(self.model)
        ranks.agree("the encoder's weights", self.fingerprint)
        self.precision = models.choose_dtype(settings.precision, capability=models.capability_of(self.device))
        on_progress(f"precision: {self.precision}")
        dtype: torch.dtype = getattr(torch, self.precision.value)
        self.bank = AdapterBank(
            self.model,
            [_spec(name, given, heads_only=settings.heads_only) for name, given in settings.tasks.items()],
            seed=settings.seed,
            dtype=dtype,
            device=self.device,
        )
        words = self.model.get_input_embeddings().weight  # type: ignore[operator]
        self.encoder = PackedEncoder(self.model, self.bank, dtype=dtype)
        writing = [task for task in tasks.values() if task.needs_decoder]
        self.decoder = self._make_decoder(words, writing) if writing else None
        self.parts = {
            name: self._make_part(name, task, adapter=number)
            for number, (name, task) in enumerate(tasks.items())
        }
        with self._seeded("router"):
            self.router = Router(
                width_of(self.encoder),
                num_tasks=len(self.parts),
                hidden=settings.router.hidden,
                dropout=settings.router.dropout,
                temperature=settings.router.temperature,
            ).to(self.device)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.parts)

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    @cached_property
    def splits(self) -> dict[str, Splits]:
        """The records of every task, read once, on first use."""
        found = {}
        for name, part in self.parts.items():
            found[name] = self._read.get(name) or read_splits(part.task, part.settings, name=name)
            counts = ", ".join(f"{len(getattr(found[name], each))} {each}" for each in SPLITS)
            self._on_progress(f"{name}: {counts}; {found[name].origin}")
            if (decided := part.task.describe(found[name])) is not None:
                self._on_progress(f"{name}: {decided}")
        return found

    def rows(self, name: str, split: str, *, number: int | None = None) -> TaskSplit:
        """Return a split of a task as numbers, made once; training leaves out rows with nothing to learn.

        A `number` of rows is the same choice on every rank and after a resume.
        """
        if (name, split) not in self._rows:
            self._rows[name, split] = self._encode(name, split)
        return self._rows[name, split].some(number, task=self.parts[name].task)

    def missing_classes(self, name: str, split: str, *, number: int | None = None) -> str | None:
        """Say which classes of the training rows are missing from the scored rows; None if none is."""
        task = self.parts[name].task
        scored = self.rows(name, split, number=number).records
        judged = {task.class_of(record) for record in scored}
        trained = {task.class_of(record) for record in self.splits[name].train} - {None}
        if not (lacking := sorted(map(str, trained - judged))):
            return None
        return (
            f"{name}: the {split} rows that are scored ({len(scored)}) lack {len(lacking)} of {len(trained)} "
            f"classes of its training rows ({show_some(lacking, most=MOST_SHOWN)}); score more rows"
        )

    def _encode(self, name: str, split: str) -> TaskSplit:
        part, records = self.parts[name], getattr(self.splits[name], split)
        examples, num_left_out = encode_all(
            part.task, records, self.tokenizer, max_length=part.max_length, training=split == "train"
        )
        if num_left_out:
            self._on_progress(
                f"{name}: {num_left_out} of {len(records)} {split} rows have no target within "
                f"{part.max_length} tokens and are left out"
            )
        return TaskSplit(examples=examples, records=records)

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules that train in addition to the adapters, by the prefix of their weights."""
        found: dict[str, nn.Module] = {f"heads/{name}": part.head for name, part in self.parts.items()}
        if self.decoder is not None:
            found["decoder"] = self.decoder
        return {**found, "router": self.router}

    def weights(self, only: tuple[str, ...] | None = None) -> dict[str, Tensor]:
        """Return all trained weights by name, as they are; `only` limits them to some tasks."""
        found: dict[str, Tensor] = {}
        for name in only if only is not None else self.names:
            found |= {f"adapters/{name}/{key}": value for key, value in self.bank.state_dict(name).items()}
            found |= _with_prefix(f"heads/{name}", self.parts[name].head)
        if only is None:
            for prefix in ("decoder", "router"):
                found |= self.module_weights(prefix)
        return found

    def module_weights(self, prefix: str) -> dict[str, Tensor]:
        """Return the weights of one module by name; none where the run has no such module."""
        module = self.modules().get(prefix)
        return {} if module is None else _with_prefix(prefix, module)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load all weights; they must belong to these tasks on this encoder."""
        for name in self.names:
            self.bank.load_state_dict(name, weights_under(weights, f"adapters/{name}"))
        for prefix, module in self.modules().items():
            module.load_state_dict(weights_under(weights, prefix))

    def load_best(self, found: PhaseCheckpoint) -> None:
        """Load the best weights of a phase, if they belong to this encoder."""
        self.check(found)
        self.load_weights(found.tensors(BEST))

    def check(self, found: PhaseCheckpoint) -> None:
        """Raise BadInput if a checkpoint belongs to another encoder."""
        if found.state.fingerprint != self.fingerprint:
            check_encoder(found, self.settings.model)

    def train(self, mode: bool = True) -> None:
        """Switch dropout of heads, decoder and router on or off."""
        for module in self.modules().values():
            module.train(mode)

    def loss(self, adapter: int, states_BLH: Tensor, batch: Any) -> Tensor:
        """Compute the loss of one task's batch, by the number of its adapter."""
        part = self.parts[self.names[adapter]]
        return part.task.loss(part.head, states_BLH, batch)

    def features(self, examples: Sequence[Example]) -> Tensor:
        """Return what the router sees of examples, on the device; computed once per run folder."""
        return features_of(
            self.encoder,
            examples,
            pad_id=self.pad_id,
            fingerprint=f"{self.fingerprint} {self.precision.value}",
            folder=self.settings.folder / "features",
            tokens=self.settings.evaluation.tokens,
            ranks=self.ranks,
        ).to(self.device)

    @property
    def decider(self) -> Decider:
        """The router with the settings' rule for trusting its choice."""
        given = self.settings.router
        top_k = min(given.top_k, len(self.parts))
        return Decider(router=self.router, threshold=given.threshold, top_k=top_k, fallback=given.fallback)

    def close(self) -> None:
        self.encoder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make_decoder(self, words_VH: Tensor, writing: list[AdapterTask]) -> TextDecoder:
        given = self.settings.decoder
        with self._seeded("decoder"):
            return TextDecoder(
                words_VH,
                end_id=end_id_of(self.tokenizer),
                pad_id=self.pad_id,
                num_layers=given.layers,
                num_heads=given.heads,
                max_length=max(getattr(task, "max_target_length", DEFAULT_TARGET_LENGTH) for task in writing),
                dropout=given.dropout,
            ).to(self.device)

    def _make_part(self, name: str, task: AdapterTask, *, adapter: int) -> TaskPart:
        settings = self.settings.tasks[name]
        with self._seeded(f"heads/{name}"):
            head = task.head(self.encoder.width, decoder=self.decoder if task.needs_decoder else None)
        return TaskPart(
            name=name,
            adapter=adapter,
            task=task,
            settings=settings,
            head=head.to(self.device),
            max_length=settings.max_length or self.settings.max_length,
        )

    @contextmanager
    def _seeded(self, name: str) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.settings.seed, name))
            yield


def make_task(settings: AdaptSettings, name: str) -> AdapterTask:
    """Make the task of this name in the settings."""
    folder = None if settings.tasks_folder is None else Path(settings.tasks_folder)
    given = settings.tasks[name]
    return task_named(given.kind or name, folder=folder, **given.settings)


def read_splits(task: AdapterTask, given: TaskSettings, *, name: str) -> Splits:
    """Read the records of a task."""
    return task.records(DataOptions.of(given.data, task=name))


def open_encoder(folder: Path, *, device: torch.device) -> nn.Module:
    """Load the encoder in float32, frozen; `PackedEncoder` casts it to a lower precision."""
    model = models.load_pretrained(
        "AutoModel", folder, what="encoder", extra="adapters", unread="pooler.", dtype=torch.float32
    )
    if getattr(model.config, "is_encoder_decoder", False) or getattr(model.config, "is_decoder", False):
        raise BadInput(
            f"{folder} holds a {model.config.model_type} model, which is not an encoder",
            hint="use BERT, RoBERTa, MiniLM or similar",
        )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # not used here; transformers draws it at random where a folder has none
    loaded: nn.Module = model.to(device)
    return loaded


def open_tokenizer(folder: Path) -> Any:
    """Load the fast tokenizer of a model's folder: spans need its offsets."""
    tokenizer = models.open_tokenizer(folder, extra="adapters")
    if not tokenizer.is_fast:
        raise BadInput(f"the tokenizer of {folder} is not a fast one", hint="save one with tokenizer.json")
    if tokenizer.pad_token_id is None:
        raise BadInput(f"the tokenizer of {folder} has no padding token", hint="set its pad_token")
    return tokenizer


def check_encoder(found: PhaseCheckpoint, model: str) -> None:
    """Raise BadInput if a checkpoint does not belong to the encoder in the folder `model`."""
    encoder = open_encoder(Path(model), device=torch.device("cpu"))
    check_model(found.state.fingerprint, encoder, name=model, checkpoint=found.path)


def seed_of(seed: int, *names: str | int) -> int:
    """Derive a seed from the run's seed and some names."""
    return zlib.crc32("/".join(map(str, (seed, *names))).encode())


def weights_under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights whose names begin with a prefix, without it."""
    return {
        name.removeprefix(f"{prefix}/"): value
        for name, value in weights.items()
        if name.startswith(f"{prefix}/")
    }


def _with_prefix(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": value.detach() for name, value in module.state_dict().items()}


def _spec(name: str, given: TaskSettings, *, heads_only: bool) -> AdapterSpec:
    return AdapterSpec(
        name=name,
        rank=0 if heads_only else given.rank or DEFAULT_RANK,
        alpha=given.alpha,
        dropout=given.dropout,
        targets=given.targets or DEFAULT_TARGETS,
    )
