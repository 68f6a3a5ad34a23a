"""A job's config as the job will see it: files merged in order, and for every value the file it stands in.

A config is one file (plain YAML, Lightning CLI, Hugging Face TrainingArguments), or a Hydra-style folder
whose `config.yaml` pulls in others through `defaults`.  A folder of curriculum stages beside it, or a list of
them in it, gives one merged view per stage.  Values keep their place, so that a change is written where the
value is, and a batch size that all stages share is known to be one value.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flatout.ground.errors import BadInput
from flatout.planner.config.config_text import (
    Document,
    Layer,
    Value,
    is_hydra,
    nearest_hint,
    package_header,
    read_document,
)

MAIN_FILES = ("config.yaml", "config.yml", "config.json", "training_args.json")
STAGE_FOLDERS = ("curriculum", "stages")
STAGE_LISTS = ("stages", "curriculum", "phases")
SUFFIXES = (".yaml", ".yml", ".json")
ONE_STAGE = "training"
_INTERPOLATION = re.compile(r"\$\{([^${}:]+)\}")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class ConfigPlace:
    """Where a value stands: a file and the dotted key inside it."""

    path: Path
    key: str
    line: int

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A value of the merged config; `place` is None for one given on the command line."""

    key: str
    value: Value
    place: ConfigPlace | None
    num_ignored: int = 0  # earlier keys of the same name in the same file

    @property
    def where(self) -> str:
        return f"{self.key} ({self.place})" if self.place else f"{self.key} (--set)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One view of the config: all of it, or as one stage of a curriculum sees it."""

    name: str
    values: Mapping[str, Found]

    def find(self, key: str) -> Found | None:
        """Find the value at a dotted key; follow `${other.key}` to the end."""
        seen: list[str] = []
        found = self.values.get(key)
        while found is not None and isinstance(found.value, str):
            match = _INTERPOLATION.fullmatch(found.value.strip())
            if match is None or match[1] in seen:
                break
            seen.append(match[1])
            found = self.values.get(match[1])
        return found

    def followers(self, place: ConfigPlace) -> set[str]:
        """Return the keys that follow a place through `${...}`, directly or through others."""
        moved = {key for key, found in self.values.items() if found.place == place}
        following = {
            key: set(_INTERPOLATION.findall(found.value))
            for key, found in self.values.items()
            if isinstance(found.value, str)
        }
        found: set[str] = set()
        while more := {key for key, keys in following.items() if keys & (moved | found)} - found:
            found |= more
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """A config with its stages; `root` is the folder that backups are kept in."""

    path: Path
    root: Path
    stages: tuple[Stage, ...]
    documents: Mapping[Path, Document]
    hydra: bool = False
    notes: tuple[str, ...] = ()


def read_config(
    conf: Path, *, stages: str | None = None, overrides: Mapping[str, Value] | None = None
) -> JobConfig:
    """Read CONF, a file or a folder; `stages` is a glob under its folder, "" for none."""
    path = main_file(conf)
    root = path.parent
    main = read_document(path, name=_show_path(path, root))
    notes: list[str] = []
    hydra = is_hydra(main)
    given = dict(overrides or {})
    layers = [Layer(path=path, document=main)]
    if hydra:
        from flatout.planner.config.hydra import chosen_groups, hydra_layers

        choices = chosen_groups(given, root=root)
        given = {key: value for key, value in given.items() if key not in choices}
        layers = hydra_layers(path, root=root, notes=notes, choices=choices)
    stage_files = _stage_files(root, stages, main=path)
    views = [(file.stem, _stack_layers(layers, file, root=root, hydra=hydra)) for file in stage_files]
    views = views or [(ONE_STAGE, layers)]
    documents = {layer.path: layer.document for _, stack in views for layer in stack}
    found = tuple(_stage(name, stack, given, path=path) for name, stack in views)
    if not stage_files and stages is None:
        found = _listed_stages(found[0]) or found
    return JobConfig(
        path=path,
        root=root,
        stages=found,
        documents=documents,
        hydra=hydra,
        notes=tuple(notes),
    )


def main_file(conf: Path) -> Path:
    """Return the file of CONF that is read first."""
    if not conf.exists():
        raise BadInput(f"no config at {conf}", hint="give a YAML or JSON file, or a folder with config.yaml")
    if not conf.is_dir():
        return conf
    for name in MAIN_FILES:
        if (conf / name).is_file():
            return conf / name
    files = [path for path in sorted(conf.iterdir()) if path.suffix in (*SUFFIXES, ".toml")]
    if len(files) == 1:
        return files[0]
    names = ", ".join(path.name for path in files[:6])
    raise BadInput(
        f"{conf} has no config.yaml", hint=f"name one of its files: {names}" if files else "it has no config"
    )


def _show_path(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _stage_files(root: Path, pattern: str | None, *, main: Path) -> list[Path]:
    if pattern is not None:
        found = sorted(root.glob(pattern)) if pattern else []
        if pattern and not found:
            raise BadInput(
                f"no stage matches {pattern!r} in {root}",
                hint='set stages in the mapping file, such as "stages/*.yaml"',
            )
        return found
    for name in STAGE_FOLDERS:
        if (root / name).is_dir():
            found = [path for path in sorted((root / name).iterdir()) if path.suffix in SUFFIXES]
            return [path for path in found if path != main]
    return []


def _stack_layers(layers: list[Layer], stage_path: Path, *, root: Path, hydra: bool) -> list[Layer]:
    """Return the layers of a stage, which replaces the file that `defaults` picks from its group."""
    document = read_document(stage_path, name=_show_path(stage_path, root))
    siblings = [layer for layer in layers if layer.path.parent == stage_path.parent != root]
    header = package_header(document)
    package = header if header is not None else siblings[0].package if hydra and siblings else ""
    under = [layer for layer in layers if layer not in siblings]
    return [*under, Layer(path=stage_path, document=document, package=package)]


def _stage(name: str, layers: Iterable[Layer], overrides: dict[str, Value], *, path: Path) -> Stage:
    values: dict[str, Found] = {}
    for layer in layers:
        _merge(values, layer)
    for key, value in overrides.items():
        bare = key.removeprefix("+")
        if bare == key and key not in values and not any(k.startswith(f"{key}.") for k in values):
            raise BadInput(
                f"--set {key}={value}: {path.name} has no such key",
                hint=f"{nearest_hint(key, list(values))}; write +{key} to add one",
            )
        values[bare] = Found(key=bare, value=value, place=None)
    return Stage(name=name, values=values)


def _listed_stages(config: Stage) -> tuple[Stage, ...]:
    """Make a stage of each item of a list called stages, or of a config that is a list, over the rest.

    A list of less than two, or one with values among its items, is no list of stages.
    """
    for name in ("", *STAGE_LISTS):
        prefix = f"{name}." if name else ""
        items: dict[str, dict[str, Found]] = {}
        for key, found in config.values.items():
            number, dot, inner = key.removeprefix(prefix).partition(".")
            if not key.startswith(prefix) or not number.isdigit():
                continue
            if not dot:
                break
            items.setdefault(number, {})[inner] = dataclasses.replace(found, key=inner)
        else:
            rest = {
                key: found
                for key, found in config.values.items()
                if not (key.startswith(prefix) and key.removeprefix(prefix).partition(".")[0] in items)
            }
            if len(items) > 1:
                names = _stage_names(items)
                return tuple(
                    Stage(name=names[number], values={**rest, **item}) for number, item in items.items()
                )
    return ()


def _stage_names(items: Mapping[str, Mapping[str, Found]]) -> dict[str, str]:
    """Return each item's own `name`, if all have different ones."""
    given = {number: item["name"].value for number, item in items.items() if "name" in item}
    if len({str(name) for name in given.values()}) == len(items):
        return {number: str(name) for number, name in given.items()}
    return {number: f"stage {int(number) + 1}" for number in items}


def _merge(values: dict[str, Found], layer: Layer) -> None:
    """Merge a later layer: it adds to mappings and replaces lists and values."""
    prefix = f"{layer.package}." if layer.package else ""
    lists = [f"{prefix}{key}" for key, kind in layer.document.sections.items() if kind == "list"]
    for whole in lists:
        for key in [key for key in values if key.startswith(f"{whole}.")]:
            del values[key]
    for key, scalar in layer.document.scalars.items():
        full = f"{prefix}{key}"
        if full.startswith("defaults.") and not prefix:
            continue
        place = ConfigPlace(path=layer.path, key=scalar.key, line=scalar.line)
        values[full] = Found(key=full, value=scalar.value, place=place, num_ignored=scalar.num_ignored)
