"""A config opened for planning: its files, its style, and what the mapping file and the flags say of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flatout.decisions import Decision
from flatout.errors import BadInput
from flatout.planner.config.documents import Value
from flatout.planner.config.job_config import JobConfig, main_file, read_config
from flatout.planner.config.knobs import (
    LAST_NAMES,
    MAPPING_FILE,
    PLANNED,
    Mapped,
    Style,
    find_key,
    overrides_of,
    pairs,
    read_mapping,
    recognise,
)
from flatout.planner.config.settings import Settings, read_settings

SHOWN_SIZES = tuple(
    name for name in LAST_NAMES if name not in PLANNED
)  # looked for where no job names its own


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedConfig:
    """Everything a plan needs to know of a config before it knows the job."""

    config: JobConfig
    style: Decision[Style]
    mapped: Mapped
    overrides: Mapping[str, Value] = field(default_factory=dict)

    def settings(self, *, ranks: int | None = None, size_names: Sequence[str] = SHOWN_SIZES) -> Settings:
        if ranks is not None and ranks < 1:
            raise BadInput(f"--ranks {ranks} is no number of processes", hint="give 1 or more")
        return read_settings(
            self.config, style=self.style, mapped=self.mapped, size_names=tuple(size_names), ranks=ranks
        )

    def keys_of(self, names: Iterable[str]) -> frozenset[str]:
        """The keys of these knobs in any stage."""
        found = set()
        for stage in self.config.stages:
            for name in names:
                with contextlib.suppress(BadInput):  # two candidates: neither is used
                    found.add(find_key(name, stage, style=self.style.value, mapped=self.mapped))
        return frozenset(key for key in found if key is not None)

    def values(self) -> dict[str, dict[str, Value]]:
        """The merged config of every stage, by dotted key."""
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
    return OpenedConfig(config=config, style=recognise(config), mapped=mapped, overrides=given)
