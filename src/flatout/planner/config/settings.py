"""The knobs of a config as numbers: what each stage trains with, and where each value came from.

A config is opened with its mapping file and the flags over it, and its knobs are read once; the sizes of a
batch join them when the job, which names them, is known.  The effective batch counts all processes that train
together.  A plan is made for DDP, in which each holds the whole model: where a config shards it, a process
needs less than is planned, and a note says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import PrecisionName, Recipe
from flatout.planner.config.config_text import Value, plain_value
from flatout.planner.config.job_config import ConfigPlace, Found, JobConfig, Stage, main_file, read_config
from flatout.planner.config.knobs import (
    LAST_NAMES,
    MAPPING_FILE,
    PLANNED,
    Mapped,
    Style,
    find_key,
    missing_knob,
    overrides_of,
    pairs,
    read_mapping,
    recognise_style,
    section_of,
)

Kind = TypeVar("Kind")
NO_KEY = "assumed: the config has no key for it"
SHOWN_SIZES = tuple(name for name in LAST_NAMES if name not in PLANNED)  # if no job names its own
DEVICES, NODES = "trainer.devices", "trainer.num_nodes"
STRATEGIES = ("trainer.strategy", "trainer.strategy.class_path", "fsdp", "deepspeed")
SHARDING = ("fsdp", "deepspeed", "full_shard", "shard_grad_op", "hybrid_shard")

PRECISIONS: dict[str, PrecisionName] = {
    **dict.fromkeys(("32", "32-true", "fp32", "float32", "no", "none", "full", "false"), "fp32"),
    **dict.fromkeys(("tf32",), "tf32"),
    **dict.fromkeys(("16", "16-mixed", "fp16", "float16", "half", "amp", "true"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed", "bfloat16"), "bf16"),
    **dict.fromkeys(("bf16-true", "pure-bf16"), "pure-bf16"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting(Generic[Kind]):
    """A value, its source in words, and the place to write another (None if there is none)."""

    value: Kind
    source: str
    place: ConfigPlace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSettings:
    """What one stage trains with."""

    name: str
    batch_size: Setting[int]
    accumulation: Setting[int]
    precision: Setting[PrecisionName]
    checkpointing: Setting[bool]
    clip_norm: Setting[float | None]
    global_batch_size: Setting[int] | None = None  # what accumulation follows from, if it has no key
    eval_batch_size: Setting[int] | None = None  # None: evaluation has no size of its own
    learning_rate: Setting[float] | None = None
    optimizer: Setting[str] | None = None
    sizes: Mapping[str, Setting[int]] = field(default_factory=dict)  # "length", "n_negatives", ...

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            precision=self.precision.value,
            accumulation=self.accumulation.value,
            clip_norm=self.clip_norm.value,
            checkpointing=self.checkpointing.value,
        )

    @property
    def eval_batch(self) -> int:
        """The batch of evaluation; without its own size, evaluation uses the loader of training."""
        return self.batch_size.value if self.eval_batch_size is None else self.eval_batch_size.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A config as a plan sees it."""

    style: Decision[str]
    ranks: Decision[int]
    stages: tuple[StageSettings, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedConfig:
    """What a plan knows of a config before it knows the job."""

    config: JobConfig
    style: Decision[Style]
    mapped: Mapped
    overrides: Mapping[str, Value] = field(default_factory=dict)

    def settings(self, *, ranks: int | None = None) -> Settings:
        """Read the knobs of every stage."""
        if ranks is not None and ranks < 1:
            raise BadInput(f"--ranks {ranks} is not a number of processes", hint="give 1 or more")
        sharded = sharding_note(self.config.stages[0])
        notes = [*self.config.notes, *([sharded] if sharded else [])]
        num_ranks = find_ranks(self.config.stages[0], self.mapped, given=ranks)
        stages = tuple(
            self._look(stage, notes).settings(self.config, num_ranks.value) for stage in self.config.stages
        )
        return Settings(
            style=Decision(value=self.style.value.name, reason=self.style.reason, source=self.style.source),
            ranks=num_ranks,
            stages=stages,
            notes=tuple(dict.fromkeys(notes)),
        )

    def with_sizes(self, settings: Settings, names: Collection[str] = SHOWN_SIZES) -> Settings:
        """Return the settings with the config's sizes of these names."""
        notes = list(settings.notes)
        stages = tuple(
            dataclasses.replace(known, sizes=self._look(stage, notes).sizes(names))
            for known, stage in zip(settings.stages, self.config.stages, strict=True)
        )
        return dataclasses.replace(settings, stages=stages, notes=tuple(dict.fromkeys(notes)))

    def _look(self, stage: Stage, notes: list[str]) -> _Look:
        return _Look(stage=stage, style=self.style.value, mapped=self.mapped, notes=notes)

    def keys_of(self, names: Iterable[str]) -> frozenset[str]:
        """Return the keys of these knobs in any stage."""
        found = set()
        for stage in self.config.stages:
            for name in names:
                with contextlib.suppress(BadInput):  # two candidates: neither is used
                    found.add(find_key(name, stage, style=self.style.value, mapped=self.mapped))
        return frozenset(key for key in found if key is not None)

    def values(self) -> dict[str, dict[str, Value]]:
        """Return the merged config of every stage, by dotted key."""
        return {
            stage.name: {key: found.value for key in stage.values if (found := stage.find(key)) is not None}
            for stage in self.config.stages
        }


def open_config(
    conf: Path, *, mapping_file: Path | None = None, knobs: Sequence[str] = (), overrides: Sequence[str] = ()
) -> OpenedConfig:
    """Read CONF with its mapping file, `--knob` pairs over it, and `--set` pairs over the values."""
    beside = main_file(conf).parent / MAPPING_FILE
    mapped = read_mapping(mapping_file or beside) if mapping_file or beside.is_file() else Mapped()
    mapped = dataclasses.replace(mapped, keys={**mapped.keys, **pairs(knobs, flag="--knob")})
    given = overrides_of(overrides)
    config = read_config(conf, stages=mapped.stages, overrides=given)
    return OpenedConfig(config=config, style=recognise_style(config), mapped=mapped, overrides=given)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """Finds the knobs of one stage and reads each as its type."""

    stage: Stage
    style: Style
    mapped: Mapped
    notes: list[str]

    def settings(self, config: JobConfig, ranks: int) -> StageSettings:
        batch_size = self.whole("batch_size")
        if batch_size is None:
            raise missing_knob("batch_size", self.stage, config=config, style=self.style)
        accumulation, whole = self.accumulation(batch_size, ranks)
        return StageSettings(
            name=self.stage.name,
            batch_size=batch_size,
            accumulation=accumulation,
            precision=self.precision(),
            checkpointing=self.switch("checkpointing"),
            clip_norm=self.clip_norm(),
            global_batch_size=whole,
            eval_batch_size=self.whole("eval_batch_size"),
            learning_rate=self.number("learning_rate"),
            optimizer=self.words("optimizer"),
        )

    def accumulation(self, batch_size: Setting[int], ranks: int) -> tuple[Setting[int], Setting[int] | None]:
        """Return the accumulation, and the global batch that it follows from if it has no key."""
        found, whole = self.whole("accumulation"), self.whole("global_batch_size")
        if whole is None:
            return found or Setting(value=1, source=NO_KEY), None
        if found is None or found.place is None:
            return _derive_accumulation(whole, batch_size, ranks), whole
        effective = batch_size.value * found.value * ranks
        if whole.value != effective:
            self.notes.append(
                f"{whole.source} is {whole.value}, but batch × accumulation × ranks is {effective}, "
                "which is planned"
            )
        return found, None

    def sizes(self, names: Collection[str]) -> dict[str, Setting[int]]:
        """Read the sizes of a batch; one that the config leaves open is the job's, with a note."""
        mapped = self.mapped.keys
        found = {}
        for name in dict.fromkeys([*names, *(name for name in mapped if name not in PLANNED)]):
            if name == "batch_size":
                continue
            try:
                size = self.whole(name)
            except BadInput as error:
                if name in mapped:
                    raise
                self.notes.append(f"{error.message}; the job's own {name} is used ({error.hint})")
                continue
            if size is not None:
                found[name] = size
            if names and name not in names and name not in LAST_NAMES:
                known = ", ".join(sorted(PLANNED | set(names)))
                self.notes.append(f"the knob {name} ({mapped[name]}) is not used; knobs are {known}")
        return found

    def found(self, knob: str) -> Found | None:
        key = find_key(knob, self.stage, style=self.style, mapped=self.mapped)
        found = self.stage.find(key) if key is not None else None
        if found is None and key is not None:
            written = self.stage.values[key]
            raise BadInput(
                f"{knob} at {written.where} is {written.value!r}, which refers to no value of this config",
                hint=f"give the value that the job is started with: --set {key}=VALUE",
            )
        if found is not None and found.num_ignored:
            self.notes.append(f"{found.where} is given {found.num_ignored + 1} times; the last one counts")
        return None if found is None or found.value is None else found

    def shown(self, knob: str) -> Found | None:
        """Find a knob that is only shown, so that two candidates are no error."""
        try:
            return self.found(knob)
        except BadInput:
            if knob in self.mapped.keys:
                raise
            return None

    def whole(self, knob: str) -> Setting[int] | None:
        found = self.found(knob)
        if found is None:
            section = section_of(knob, self.stage, style=self.style)
            if section is not None:
                raise BadInput(
                    f"{knob} at {section} holds several values; a plan needs one",
                    hint=f"name one of them: --knob {knob}={section}.KEY, or write a number",
                )
            assumed = self.style.assumed.get(knob)
            source = f"assumed: the default of {self.style.name}"
            return Setting(value=assumed, source=source) if isinstance(assumed, int) else None
        value = number_of(found)
        if not isinstance(value, int) or value < 1:
            raise BadInput(
                f"{knob} at {found.where} is {found.value!r}, not a whole number of at least 1",
                hint=f"write a number, or name another key with --knob {knob}=KEY",
            )
        return Setting(value=value, source=found.where, place=found.place)

    def number(self, knob: str) -> Setting[float] | None:
        found = self.shown(knob)
        value = number_of(found) if found is not None else None
        if found is None or value is None:
            return None
        return Setting(value=float(value), source=found.where, place=found.place)

    def words(self, knob: str) -> Setting[str] | None:
        found = self.shown(knob)
        return (
            None if found is None else Setting(value=str(found.value), source=found.where, place=found.place)
        )

    def switch(self, knob: str) -> Setting[bool]:
        found = self.found(knob)
        if found is None:
            return Setting(value=False, source=NO_KEY)
        value = plain_value(found.value) if isinstance(found.value, str) else found.value
        if value not in (True, False):
            raise BadInput(f"{knob} at {found.where} is {found.value!r}, neither true nor false")
        return Setting(value=bool(value), source=found.where, place=found.place)

    def precision(self) -> Setting[PrecisionName]:
        found = self.found("precision")
        if found is not None:
            word = str(found.value).casefold()
            if word not in PRECISIONS:
                known = ", ".join(dict.fromkeys(PRECISIONS.values()))
                raise BadInput(
                    f"precision at {found.where} is {found.value!r}, which is not supported",
                    hint=f"supported are {known}; --set {found.key}=bf16 tries one",
                )
            return Setting(value=PRECISIONS[word], source=found.where, place=found.place)
        switches: tuple[PrecisionName, ...] = ("bf16", "fp16", "tf32")
        on = {name: switch for name in switches if (switch := self.switch(name)).value}
        if "bf16" in on and "fp16" in on:
            self.notes.append(f"{on['bf16'].source} and {on['fp16'].source} are both on; planned as bf16")
        for name, switch in on.items():
            return Setting(value=name, source=switch.source)
        return Setting(value="fp32", source=NO_KEY)

    def clip_norm(self) -> Setting[float | None]:
        found = self.found("clip_norm")
        if found is None:
            assumed = self.style.assumed.get("clip_norm")
            if not isinstance(assumed, (int, float)):
                return Setting(value=None, source=NO_KEY)
            return Setting(value=float(assumed), source=f"assumed: the default of {self.style.name}")
        number = number_of(found)
        return Setting(value=float(number) if number else None, source=found.where, place=found.place)


def _derive_accumulation(whole: Setting[int], batch_size: Setting[int], ranks: int) -> Setting[int]:
    """Return the accumulation that makes up a global batch."""
    at_once = batch_size.value * ranks
    if whole.value % at_once:
        raise BadInput(
            f"{whole.source} is {whole.value}, not a multiple of the {at_once} samples that {ranks} "
            f"{'rank takes' if ranks == 1 else 'ranks take'} at once ({batch_size.source})",
            hint="give the number of processes with --ranks, or another global batch",
        )
    times = f" × {ranks} ranks" if ranks > 1 else ""
    return Setting(value=whole.value // at_once, source=f"{whole.source} over {batch_size.value}{times}")


def number_of(found: Found) -> int | float | None:
    """Return a number, quoted or not; None for anything else."""
    value = plain_value(found.value) if isinstance(found.value, str) else found.value
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def with_job_sizes(settings: Settings, sizes: Mapping[str, int]) -> Settings:
    """Return settings in which every size of the job has a value: the config's, else the job's own."""
    own = {
        name: Setting(value=value, source=f"the job's own (another with --set +{name}=N)")
        for name, value in sizes.items()
        if name != "batch_size"
    }
    stages = (dataclasses.replace(stage, sizes={**own, **stage.sizes}) for stage in settings.stages)
    return dataclasses.replace(settings, stages=tuple(stages))


def find_ranks(stage: Stage, mapped: Mapped, *, given: int | None) -> Decision[int]:
    """Return the ranks from the command line, the mapping file, or a Lightning config's devices."""
    if given is not None:
        return Decision(value=given, reason="given on the command line", source="assumed")
    if mapped.ranks is not None:
        return Decision(value=mapped.ranks, reason="the mapping file says so", source="assumed")
    listed = [key for key in stage.values if key.startswith(f"{DEVICES}.")]
    devices, nodes = stage.find(DEVICES), stage.find(NODES)
    count = len(listed) or (None if devices is None else _count(devices))
    num_nodes = None if nodes is None else _count(nodes)
    if count is not None:
        where = devices.where if devices is not None else DEVICES
        times = f", on each of {num_nodes} nodes" if num_nodes is not None and num_nodes > 1 else ""
        return Decision(value=count * (num_nodes or 1), reason=f"from {where}{times}", source="computed")
    reason = "the config names no number of processes"
    if devices is not None and devices.value is not None:
        reason = f"{devices.where} is {devices.value!r}, which names no number: give it with --ranks"
    return Decision(value=1, reason=reason, source="assumed")


def _count(found: Found) -> int | None:
    """Count devices as Lightning does: 2 and "2" are two, "0,3" is a list, -1 and "auto" are all."""
    value = found.value
    if isinstance(value, str) and "," in value:
        return len([word for word in value.split(",") if word.strip()]) or None
    number = plain_value(value) if isinstance(value, str) else value
    return number if type(number) is int and number >= 1 else None


def sharding_note(stage: Stage) -> str | None:
    """Return a note if the config shards the model, which a plan does not."""
    for key in STRATEGIES:
        found = stage.values.get(key)
        words = "" if found is None or not found.value else f"{key}={found.value}".casefold()
        if found is not None and any(word in words for word in SHARDING):
            return (
                f"{found.where} shards the model; a plan assumes all of it in every process, as under "
                "DDP, so less may be needed (flatout.plan(..., parallel='fsdp2') estimates one process)"
            )
    return None
