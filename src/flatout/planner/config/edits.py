"""Change values of a config by their characters alone.

Everything that is not the value stays byte for byte: comments, quotes, order, duplicate keys, anchors,
line ends, a missing newline at the end.  A value keeps its kind of quotes, so that `"45"` stays a string to
a loader that wanted one.  The edited text is parsed again before it is handed out: if any other value moved,
nothing is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from flatout.errors import BadInput, FlatoutError
from flatout.planner.config.documents import Document, Scalar, Value, parse_document, plain_value

# Plain YAML text that no loader takes for anything but a string.
_PLAIN_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./+-]*|[0-9]+[A-Za-z_-][A-Za-z0-9_./+-]*")
_DATE = re.compile(r"[0-9]{4}-[0-9]+-[0-9]+.*")  # which YAML 1.1 makes a date
_ESCAPED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Edited:
    """A text after its edits, and what its owner should know about them."""

    text: str
    warnings: tuple[str, ...] = ()


def edit_scalars(document: Document, changes: Mapping[str, Value]) -> Edited:
    """The text of `document` with the values at these dotted keys replaced."""
    found = {key: check_editable(document, key) for key in changes}
    text = document.text
    for key, scalar in sorted(found.items(), key=lambda item: -item[1].start):
        text = (
            text[: scalar.start] + written(changes[key], over=scalar, document=document) + text[scalar.end :]
        )
    _check_nothing_else_moved(document, text, changes)
    return Edited(text=text, warnings=tuple(_warnings(document, found)))


def check_editable(document: Document, key: str) -> Scalar:
    """The value at a key; BadInput where its characters are not to be replaced."""
    scalar = document.find(key)
    where = f"{key} in {document.name} (line {scalar.line})"
    if scalar.alias_of is not None:
        raise BadInput(
            f"{where} is an alias: its characters stand at {scalar.alias_of}",
            hint=f"give it a value of its own, or change {scalar.alias_of}",
        )
    if scalar.quotes == "block":
        raise BadInput(f"{where} is a block scalar, which is not edited", hint="write it on one line")
    if scalar.start == scalar.end:
        raise BadInput(f"{where} has no value to replace", hint=f"write one, such as {key}: 1")
    return scalar


def written(value: Value, *, over: Scalar, document: Document) -> str:
    """The characters of `value` in the place of `over`."""
    bare = _bare(value)
    if over.quotes == "single":
        if _ESCAPED.search(bare):
            return _double_quoted(bare)
        return "'" + bare.replace("'", "''") + "'"
    if over.quotes == "double":
        return _double_quoted(bare)
    if not isinstance(value, str):
        return bare
    text_alone = _PLAIN_TEXT.fullmatch(bare) and not _DATE.fullmatch(bare) and plain_value(bare) == value
    return bare if document.format == "yaml" and text_alone else _double_quoted(bare)


def _bare(value: Value) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadInput(f"{value} is not a number that a config can hold")
        # YAML 1.1 takes 2e-05 for a string and 2.0e-05 for a number.
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    return str(value)


def _double_quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)


def _check_nothing_else_moved(before: Document, text: str, changes: Mapping[str, Value]) -> None:
    after = parse_document(text, name=before.name, format=before.format)
    shared = {
        key
        for key, scalar in before.scalars.items()
        if key in changes or (scalar.alias_of is not None and scalar.alias_of in changes)
    }
    same = before.scalars.keys() == after.scalars.keys() and all(
        after.scalars[key].value == scalar.value and after.scalars[key].quotes == scalar.quotes
        for key, scalar in before.scalars.items()
        if key not in shared
    )
    arrived = same and all(means(after.scalars[key].value, value) for key, value in changes.items())
    if not arrived:
        raise FlatoutError(
            f"changing {', '.join(changes)} in {before.name} would change other values too",
            hint="nothing was written; change it by hand",
        )


def means(found: Value, wanted: Value) -> bool:
    """Whether a value read back is the wanted one; in quotes, a number is its characters."""
    if isinstance(found, str) and not isinstance(wanted, str):
        found = plain_value(found)
    return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)


def _comment_beside(document: Document, scalar: Scalar) -> str | None:
    rest = document.text[scalar.end :].partition("\n")[0]
    return rest.partition("#")[2] if document.format == "yaml" and "#" in rest else None


def _warnings(document: Document, found: Mapping[str, Scalar]) -> list[str]:
    warnings = []
    for key, scalar in found.items():
        if scalar.num_ignored:
            times = scalar.num_ignored + 1
            warnings.append(
                f"{key} is given {times} times in {document.name}; the last one (line {scalar.line}) counts "
                "and is the one that is changed"
            )
        if scalar.num_aliases:
            others = "1 other value" if scalar.num_aliases == 1 else f"{scalar.num_aliases} other values"
            warnings.append(f"{others} of {document.name} follow {key} through an alias and change with it")
        comment = _comment_beside(document, scalar)
        if comment is not None and re.search(rf"(?<![\w.]){re.escape(str(scalar.value))}(?![\w.])", comment):
            warnings.append(
                f"the comment beside {key} ({document.name}:{scalar.line}) speaks of {scalar.value}"
            )
    return warnings
