"""The run's settings: plain YAML, a curriculum stage laid over it, then dotted overrides.

YAML 1.1 as PyYAML reads it has two traps that these files keep, as real ones do: of a key given twice the
last one counts, and `2e-4` (no dot) is a string.  Whoever needs a number therefore says `float(...)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

PRECISIONS = {"32-true": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16", "bf16-true": "pure-bf16"}


def read_settings(folder: Path, *, stage: str | None, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """`config.yaml`, then `curriculum/<stage>_stage.yaml`, then `a.b=c`."""
    settings = _read(folder / "config.yaml")
    if stage is not None:
        settings = _laid_over(settings, _read(folder / "curriculum" / f"{stage}_stage.yaml"))
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise SystemExit(f"--set {override}: expected a.b=value")
        _put(settings, name.split("."), yaml.safe_load(value), said=override)
    return settings


def precision_of(settings: Mapping[str, Any]) -> str:
    """The trainer's precision in Flatout's words."""
    given = str(settings["training"]["trainer"]["precision"])
    if given not in PRECISIONS:
        raise SystemExit(f"training.trainer.precision is {given!r}, none of {', '.join(PRECISIONS)}")
    return PRECISIONS[given]


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SystemExit(f"{path} does not exist") from None
    settings = yaml.safe_load(text)
    if not isinstance(settings, dict):
        raise SystemExit(f"{path} holds {type(settings).__name__}, not keys and values")
    return settings


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        merged[name] = _laid_over(under, value) if both else value
    return merged


def _put(settings: dict[str, Any], path: list[str], value: Any, *, said: str) -> None:
    for name in path[:-1]:
        settings = settings.get(name)  # type: ignore[assignment]
        if not isinstance(settings, dict):
            raise SystemExit(f"--set {said}: the settings have no section {name!r}")
    if path[-1] not in settings:
        raise SystemExit(f"--set {said}: the settings have no {path[-1]!r}; there are {', '.join(settings)}")
    settings[path[-1]] = value
