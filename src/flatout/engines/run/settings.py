"""A YAML file of settings: keys that are known, and one clear line for one that is not."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.errors import BadInput


def read_settings(path: Path, *, names: Sequence[str], verb: str) -> dict[str, Any]:
    """The keys of a YAML file, all of them settings of `verb`."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"no config at {path}", hint="check the path") from None
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise BadInput(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadInput(
            f"{path} holds a {type(found).__name__}", hint="a config is a table of keys and values"
        )
    check_keys(found, names=names, verb=verb, source=str(path))
    return found


def check_keys(given: Mapping[str, Any], *, names: Sequence[str], verb: str, source: str) -> None:
    """BadInput for the first key that is no setting."""
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            raise BadInput(f"{source} sets {key!r}, which is no setting of {verb}", hint=hint)
