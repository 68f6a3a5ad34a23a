"""The knobs of a config as numbers: what each stage trains with, and where each value came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flatout.decisions import Decision
from flatout.errors import BadInput
from flatout.memory.jobs.job import Precision, Recipe
from flatout.planner.config.documents import plain_value
from flatout.planner.config.job_config import Found, JobConfig, Place, Stage
from flatout.planner.config.knobs import (
    LAST_NAMES,
    PLANNED,
    Mapped,
    Style,
    find_key,
    missing_knob,
    section_of,
)
from flatout.planner.config.ranks import find_ranks, sharding_note

Kind = TypeVar("Kind")

PRECISIONS: dict[str, Precision] = {
    **dict.fromkeys(("32", "32-true", "fp32", "float32", "no", "none", "full", "false"), "fp32"),
    **dict.fromkeys(("tf32",), "tf32"),
    **dict.fromkeys(("16", "16-mixed", "fp16", "float16", "half", "amp", "true"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed", "bfloat16"), "bf16"),
    **dict.fromkeys(("bf16-true", "pure-bf16"), "pure-bf16"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting(Generic[Kind]):
    """A value, in words where it came from, and the place to write another; None: there is no such place."""

    value: Kind
    source: str
    place: Place | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSettings:
    """What one stage trains with."""

    name: str
    batch_size: Setting[int]
    accumulation: Setting[int]
    precision: Setting[Precision]
    checkpointing: Setting[bool]
    clip_norm: Setting[float | None]
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
        """The batch of evaluation, which without a size of its own uses the loader of training."""
        return self.batch_size.value if self.eval_batch_size is None else self.eval_batch_size.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A config as a plan sees it."""

    style: Decision[str]
    ranks: Decision[int]
    stages: tuple[StageSettings, ...]
    notes: tuple[str, ...] = ()


def read_settings(
    config: JobConfig,
    *,
    style: Decision[Style],
    mapped: Mapped,
    size_names: tuple[str, ...],
    ranks: int | None,
) -> Settings:
    """The settings of every stage; `size_names` are the sizes that the job's batch maker takes."""
    sharded = sharding_note(config.stages[0])
    notes = [*config.notes, *([sharded] if sharded else [])]
    stages = tuple(
        _stage_settings(stage, config, style.value, mapped, size_names, notes) for stage in config.stages
    )
    return Settings(
        style=Decision(value=style.value.name, reason=style.reason, source=style.source),
        ranks=find_ranks(config.stages[0], mapped, given=ranks),
        stages=stages,
        notes=tuple(dict.fromkeys(notes)),
    )


def with_job_sizes(settings: Settings, sizes: Mapping[str, int]) -> Settings:
    """Settings in which every size of the job has a value: the config's, else the job's own."""
    own = {
        name: Setting(value=value, source=f"the job's own (another with --set +{name}=N)")
        for name, value in sizes.items()
        if name != "batch_size"
    }
    stages = (dataclasses.replace(stage, sizes={**own, **stage.sizes}) for stage in settings.stages)
    return dataclasses.replace(settings, stages=tuple(stages))


def _stage_settings(
    stage: Stage,
    config: JobConfig,
    style: Style,
    mapped: Mapped,
    size_names: tuple[str, ...],
    notes: list[str],
) -> StageSettings:
    look = _Look(stage=stage, style=style, mapped=mapped, notes=notes)
    batch_size = look.whole("batch_size")
    if batch_size is None:
        raise missing_knob("batch_size", stage, config=config, style=style)
    accumulation = look.whole("accumulation")
    return StageSettings(
        name=stage.name,
        batch_size=batch_size,
        accumulation=accumulation or Setting(value=1, source="assumed: the config has no key for it"),
        precision=look.precision(),
        checkpointing=look.switch("checkpointing"),
        clip_norm=look.clip_norm(),
        eval_batch_size=look.whole("eval_batch_size"),
        learning_rate=look.number("learning_rate"),
        optimizer=look.words("optimizer"),
        sizes=_sizes(look, size_names),
    )


def _sizes(look: _Look, size_names: tuple[str, ...]) -> dict[str, Setting[int]]:
    wanted = dict.fromkeys([*size_names, *(name for name in look.mapped.keys if name not in PLANNED)])
    sizes = {}
    for name in wanted:
        if name == "batch_size":
            continue
        try:
            found = look.whole(name)
        except BadInput as error:
            if name in look.mapped.keys:
                raise
            look.notes.append(f"{error.message}; the job's own {name} is used ({error.hint})")
            continue
        if found is not None:
            sizes[name] = found
        if size_names and name not in size_names and name not in LAST_NAMES:
            known = ", ".join(sorted(PLANNED | set(size_names)))
            look.notes.append(f"the knob {name} ({look.mapped.keys[name]}) is not used; knobs are {known}")
    return sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """Finds knobs of one stage and reads them as the type they must have."""

    stage: Stage
    style: Style
    mapped: Mapped
    notes: list[str]

    def found(self, knob: str) -> Found | None:
        key = find_key(knob, self.stage, style=self.style, mapped=self.mapped)
        found = self.stage.find(key) if key is not None else None
        if found is None and key is not None:
            written = self.stage.values[key]
            raise BadInput(
                f"{knob} at {written.where} is {written.value!r}, which leads to no value of this config",
                hint=f"give the one that the job is started with: --set {key}=VALUE",
            )
        if found is not None and found.num_ignored:
            self.notes.append(f"{found.where} is given {found.num_ignored + 1} times; the last one counts")
        return None if found is None or found.value is None else found

    def shown(self, knob: str) -> Found | None:
        """A knob that is only shown: two candidates are then no reason to stop."""
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
                    f"{knob} at {section} holds several values, and a plan is made for one",
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
            return Setting(value=False, source="assumed: the config has no key for it")
        value = plain_value(found.value) if isinstance(found.value, str) else found.value
        if value not in (True, False):
            raise BadInput(f"{knob} at {found.where} is {found.value!r}, neither true nor false")
        return Setting(value=bool(value), source=found.where, place=found.place)

    def precision(self) -> Setting[Precision]:
        found = self.found("precision")
        if found is not None:
            word = str(found.value).casefold()
            if word not in PRECISIONS:
                known = ", ".join(dict.fromkeys(PRECISIONS.values()))
                raise BadInput(
                    f"precision at {found.where} is {found.value!r}, which no plan is made for",
                    hint=f"plans are made for {known}; --set {found.key}=bf16 tries one",
                )
            return Setting(value=PRECISIONS[word], source=found.where, place=found.place)
        switches: tuple[Precision, ...] = ("bf16", "fp16", "tf32")
        on = {name: switch for name in switches if (switch := self.switch(name)).value}
        if "bf16" in on and "fp16" in on:
            self.notes.append(f"{on['bf16'].source} and {on['fp16'].source} are both on; planned as bf16")
        for name, switch in on.items():
            return Setting(value=name, source=switch.source)
        return Setting(value="fp32", source="assumed: the config has no key for it")

    def clip_norm(self) -> Setting[float | None]:
        found = self.found("clip_norm")
        if found is None:
            assumed = self.style.assumed.get("clip_norm")
            if not isinstance(assumed, (int, float)):
                return Setting(value=None, source="assumed: the config has no key for it")
            return Setting(value=float(assumed), source=f"assumed: the default of {self.style.name}")
        number = number_of(found)
        return Setting(value=float(number) if number else None, source=found.where, place=found.place)


def number_of(found: Found) -> int | float | None:
    """A number, also one that stands in quotes; None for anything else."""
    value = plain_value(found.value) if isinstance(found.value, str) else found.value
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
