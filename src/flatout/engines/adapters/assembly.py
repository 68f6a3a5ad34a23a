"""Everything that a config names, opened: encoder, adapters, tasks with their heads, decoder, router.

Weights have one flat list of names, which checkpoints use:

    adapters/qa/encoder.layer.0....lora_A.weight    heads/qa/...    decoder/...    router/...

Each part is drawn from a seed of its own name, so that adding a task changes no other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engines.adapters import loading
from flatout.engines.adapters.lora.bank import DEFAULT_TARGETS, AdapterBank, AdapterSpec
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.precision import choose_precision
from flatout.engines.adapters.routing.features import width_of
from flatout.engines.adapters.routing.router import Router
from flatout.engines.adapters.settings import AdaptConfig, TaskConfig
from flatout.engines.adapters.tasks import (
    AdapterTask,
    DataOptions,
    Example,
    Record,
    Splits,
    encode_all,
    task_named,
)
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.adapters.tasks.generation import end_id_of
from flatout.engines.adapters.training.checkpoint import Checkpoint, check_model, fingerprint
from flatout.engines.adapters.training.processes import Processes

OnNote = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPart:
    """One task of the run: its adapter's number, its settings and its head."""

    name: str
    adapter: int
    task: AdapterTask
    settings: TaskConfig
    head: nn.Module
    max_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Examples and the records they were made of; example i is record `examples[i].index`."""

    examples: list[Example]
    records: list[Record]

    def first(self, number: int | None) -> Rows:
        return Rows(examples=self.examples[:number], records=self.records[:number])


class Assembly:
    """The parts of a run on one device; close it, or use it in a `with`."""

    def __init__(
        self, config: AdaptConfig, *, processes: Processes, on_note: OnNote = lambda note: None
    ) -> None:
        self.config, self.processes, self.device = config, processes, processes.device
        self._on_note = on_note
        self._rows: dict[tuple[str, str], Rows] = {}
        tasks = {
            name: task_named(given.kind or name, folder=_folder(config), **given.settings)
            for name, given in config.tasks.items()
        }
        for name, given in config.tasks.items():
            DataOptions.of(given.data, task=name)  # what is wrong there is said before anything is loaded
        folder = Path(config.model)
        self.model = loading.open_encoder(folder, device=self.device)
        self.tokenizer = loading.open_tokenizer(folder)
        self.fingerprint = fingerprint(self.model.named_parameters())
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        self.precision = choose_precision(
            config.precision, device_type=self.device.type, capability=capability
        )
        on_note(f"precision: {self.precision}")
        dtype: torch.dtype = getattr(torch, self.precision.value)
        self.bank = AdapterBank(
            self.model,
            [_spec(name, given, heads_only=config.heads_only) for name, given in config.tasks.items()],
            seed=config.seed,
            dtype=dtype,
            device=self.device,
        )
        words = self.model.get_input_embeddings().weight  # type: ignore[operator]
        self.encoder = PackedEncoder(self.model, self.bank, dtype=dtype)
        writing = [task for task in tasks.values() if task.needs_decoder]
        self.decoder = self._decoder(words, writing) if writing else None
        self.parts = {
            name: self._part(name, task, adapter=number) for number, (name, task) in enumerate(tasks.items())
        }
        with self._seeded("router"):
            self.router = Router(
                width_of(self.encoder),
                num_tasks=len(self.parts),
                hidden=config.router.hidden,
                dropout=config.router.dropout,
                temperature=config.router.temperature,
            ).to(self.device)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.parts)

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    @cached_property
    def splits(self) -> dict[str, Splits]:
        """The records of every task; read once, when they are asked for."""
        found = {}
        for name, part in self.parts.items():
            found[name] = part.task.records(DataOptions.of(part.settings.data, task=name))
            counts = ", ".join(f"{len(getattr(found[name], each))} {each}" for each in SPLITS)
            self._on_note(f"{name}: {counts}; {found[name].origin}")
        return found

    def rows(self, name: str, split: str, *, number: int | None = None) -> Rows:
        """A split of a task as numbers, made once: of the training split what has something to learn."""
        if (name, split) not in self._rows:
            self._rows[name, split] = self._encoded(name, split)
        return self._rows[name, split].first(number)

    def _encoded(self, name: str, split: str) -> Rows:
        part, records = self.parts[name], getattr(self.splits[name], split)
        examples, num_left_out = encode_all(
            part.task, records, self.tokenizer, max_length=part.max_length, training=split == "train"
        )
        if num_left_out:
            self._on_note(
                f"{name}: {num_left_out} of {len(records)} {split} rows have no target within "
                f"{part.max_length} tokens and are left out"
            )
        return Rows(examples=examples, records=records)

    def modules(self) -> dict[str, nn.Module]:
        """What is trained beside the adapters, by the prefix of its weights."""
        found: dict[str, nn.Module] = {f"heads/{name}": part.head for name, part in self.parts.items()}
        if self.decoder is not None:
            found["decoder"] = self.decoder
        return {**found, "router": self.router}

    def weights(self, only: tuple[str, ...] | None = None) -> dict[str, Tensor]:
        """All trained weights under their names, as they are; `only` some tasks' adapters and heads."""
        found: dict[str, Tensor] = {}
        for name in only if only is not None else self.names:
            found |= {f"adapters/{name}/{key}": value for key, value in self.bank.state_dict(name).items()}
            found |= _prefixed(f"heads/{name}", self.parts[name].head)
        if only is None:
            for prefix in ("decoder", "router"):
                found |= self.module_weights(prefix)
        return found

    def module_weights(self, prefix: str) -> dict[str, Tensor]:
        """The weights of one module under their names; none where the run has no such module."""
        module = self.modules().get(prefix)
        return {} if module is None else _prefixed(prefix, module)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take all weights; they must be those of these tasks on this encoder."""
        for name in self.names:
            self.bank.load_state_dict(name, under(weights, f"adapters/{name}"))
        for prefix, module in self.modules().items():
            module.load_state_dict(under(weights, prefix))

    def load_best(self, found: Checkpoint) -> None:
        """The best weights of a finished phase."""
        check_model(found.state, fingerprint=self.fingerprint, model=self.config.model, path=found.path)
        self.load_weights(found.best())

    def train(self, mode: bool = True) -> None:
        """Dropout of heads, decoder and router on or off."""
        for module in self.modules().values():
            module.train(mode)

    def loss(self, adapter: int, states_BLH: Tensor, batch: Any) -> Tensor:
        """The loss of one task's batch, by the number of its adapter."""
        part = self.parts[self.names[adapter]]
        return part.task.loss(part.head, states_BLH, batch)

    def close(self) -> None:
        self.encoder.close()

    def __enter__(self) -> Assembly:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _decoder(self, words_VH: Tensor, writing: list[AdapterTask]) -> TextDecoder:
        given = self.config.decoder
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

    def _part(self, name: str, task: AdapterTask, *, adapter: int) -> TaskPart:
        settings = self.config.tasks[name]
        with self._seeded(f"heads/{name}"):
            head = task.head(self.encoder.width, decoder=self.decoder if task.needs_decoder else None)
        return TaskPart(
            name=name,
            adapter=adapter,
            task=task,
            settings=settings,
            head=head.to(self.device),
            max_length=settings.max_length or self.config.max_length,
        )

    @contextmanager
    def _seeded(self, name: str) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.config.seed, name))
            yield


DEFAULT_TARGET_LENGTH = 64  # of a task that writes and does not say how much
SPLITS = ("train", "validation", "test")


def seed_of(seed: int, *names: str | int) -> int:
    """A seed of its own for what is named."""
    return zlib.crc32("/".join(map(str, (seed, *names))).encode())


def under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights below a prefix, without it."""
    return {
        name.removeprefix(f"{prefix}/"): value
        for name, value in weights.items()
        if name.startswith(f"{prefix}/")
    }


def _prefixed(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": value.detach() for name, value in module.state_dict().items()}


def _folder(config: AdaptConfig) -> Path | None:
    return None if config.tasks_folder is None else Path(config.tasks_folder)


def _spec(name: str, given: TaskConfig, *, heads_only: bool) -> AdapterSpec:
    return AdapterSpec(
        name=name,
        rank=0 if heads_only else given.rank,
        alpha=given.alpha,
        dropout=given.dropout,
        targets=given.targets or DEFAULT_TARGETS,
    )
