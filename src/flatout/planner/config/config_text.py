"""Config text with the position of every scalar, and edits of the values at those positions.

A config is edited by characters, so what is needed of it is not an object but a map: which characters of
the text are the value at `training.trainer.precision`?  YAML is composed by ruamel.yaml into nodes that
carry their positions; JSON is walked here.  Values follow the loaders that training jobs use (PyYAML, and
with it OmegaConf, jsonargparse and transformers): the last of two equal keys counts, `yes` is true.  One
thing is read as people mean it and not as YAML 1.1 has it: `2e-4` is a number.

An edit replaces the characters of a value; comments, quotes, order, duplicate keys, anchors, line ends and a
missing newline at the end stay byte for byte.  A value keeps its kind of quotes, so that `"45"` stays a
string to a loader that wanted one.  The edited text is parsed again: if any other value moved, nothing is
handed out.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatout.ground.errors import BadInput, FlatoutError

Value = int | float | bool | str | None
Quotes = Literal["plain", "single", "double", "block"]
Format = Literal["yaml", "json"]
MAX_SCALARS = 20_000  # a text of a few lines can unfold into billions of values through aliases
QUOTES: dict[str | None, Quotes] = {None: "plain", "'": "single", '"': "double", "|": "block", ">": "block"}
BYTE_ORDER_MARK = "\ufeff"
KEYED = "give a YAML or JSON file of keys and values"

_WORDS: dict[str, Value] = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WORDS |= {"null": None, "~": None, "": None}
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_OCTAL = re.compile(r"[-+]?0o?[0-7_]+")
_HEXADECIMAL = re.compile(r"[-+]?0x[0-9a-fA-F][0-9a-fA-F_]*")
_BINARY = re.compile(r"[-+]?0b[01][01_]*")
_HEADER = re.compile(r"^#\s*@package\s+(\S+)\s*$", flags=re.MULTILINE)
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """One value: `text[start:end]` are its characters, quotes included, tag and anchor not."""

    key: str  # dotted
    value: Value
    start: int
    end: int
    quotes: Quotes
    line: int  # counted from 1
    alias_of: str | None = None  # the key whose characters these are: reached through *alias or <<
    num_aliases: int = 0  # other keys that take their value from here
    num_ignored: int = 0  # earlier keys of the same name, which loaders drop


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A config text and where its values are."""

    name: str
    text: str
    format: Format
    scalars: dict[str, Scalar] = field(default_factory=dict)
    sections: dict[str, Literal["mapping", "list"]] = field(default_factory=dict)

    def find(self, key: str) -> Scalar:
        """Return the scalar at a dotted key; BadInput names what is there instead."""
        found = self.scalars.get(key)
        if found is not None:
            return found
        if key in self.sections:
            inside = [name for name in self.scalars if name.startswith(f"{key}.")]
            raise BadInput(
                f"{key} in {self.name} is a {self.sections[key]}, not a value",
                hint=f"it holds {', '.join(inside[:4])}" if inside else "it is empty",
            )
        raise BadInput(f"{self.name} has no key {key}", hint=nearest_hint(key, self.scalars))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One file of a config, and the package (dotted prefix) its values are put under."""

    path: Path
    document: Document
    package: str = ""


def is_hydra(document: Document) -> bool:
    """Return whether a `defaults` list says which files the config is made of."""
    return document.sections.get("defaults") == "list"


def package_header(document: Document) -> str | None:
    """Return the package of `# @package name`; "" for _global_."""
    match = _HEADER.search(document.text)
    if match is None or match[1] == "_group_":
        return None
    return "" if match[1] == "_global_" else match[1].removeprefix("_global_.")


def nearest_hint(key: str, keys: dict[str, Scalar] | list[str]) -> str:
    """Return a hint with the closest keys; one of the same last name comes first."""
    names = list(keys)
    if not names:
        return "it holds no values at all"
    last = key.rpartition(".")[2]
    same = [name for name in names if name.rpartition(".")[2] == last]
    spelt = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    lasts = {name.rpartition(".")[2]: name for name in reversed(names)}
    spelt += [lasts[found] for found in difflib.get_close_matches(last, lasts, n=3, cutoff=0.7)]
    nearest = list(dict.fromkeys([*same, *spelt]))[:4]
    return f"nearest: {', '.join(nearest)}" if nearest else f"it holds {', '.join(names[:6])}"


def read_document(path: Path, *, name: str | None = None) -> Document:
    """Read and map a config file."""
    shown = name or str(path)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise BadInput(f"{shown} is not a file, but a pipe or a device, which a plan cannot write back")
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"no config at {shown}", hint="check the path") from None
    except IsADirectoryError:
        raise BadInput(f"{shown} is a folder, not a config file") from None
    except OSError as error:
        raise BadInput(f"{shown} cannot be read: {error.strerror}") from None
    if path.suffix.casefold() == ".toml":
        raise BadInput(f"{shown} is TOML, which a plan cannot write back with its comments", hint=KEYED)
    return parse_document(decode_text(data, name=shown), name=shown, format=format_of(path))


def format_of(path: Path) -> Format:
    return "json" if path.suffix.casefold() == ".json" else "yaml"


def decode_text(data: bytes, *, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None


def parse_document(text: str, *, name: str, format: Format) -> Document:  # noqa: A002
    """Map a text; BadInput names the line that cannot be parsed."""
    found = _json_scalars(text, name) if format == "json" else _yaml_scalars(text, name)
    document = Document(name=name, text=text, format=format)
    for key, item in found:
        if isinstance(item, Scalar):
            document.scalars[key] = item
        else:
            document.sections[key] = item
    return document


def plain_value(text: str) -> Value:
    """Return the value of an unquoted scalar."""
    word = text.strip()
    if word.casefold() in _WORDS:
        return _WORDS[word.casefold()]
    for pattern, base in ((_DECIMAL, 10), (_OCTAL, 8), (_HEXADECIMAL, 16), (_BINARY, 2)):
        if pattern.fullmatch(word):
            return int(re.sub(r"(?<=[-+0])o", "", word).replace("_", "") or "0", base)
    if _FLOAT.fullmatch(word):
        return float(word.replace("_", ""))
    return text


# YAML


def _yaml_scalars(text: str, name: str) -> Iterator[tuple[str, Scalar | Literal["mapping", "list"]]]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        root = YAML(typ="safe", pure=True).compose(text)
        # A node's mark begins at its tag or anchor, a token's at its own characters.
        tokens = {
            token.end_mark.index: token.start_mark.index
            for token in YAML(typ="safe", pure=True).scan(text)
            if type(token).__name__ == "ScalarToken"
        }
    except YAMLError as error:
        if (second := _second_document(text)) is not None:
            raise BadInput(
                f"{name} holds several YAML documents (the second starts at line {second}); a plan reads one",
                hint="keep one; stages are files in a folder curriculum/, or a list called stages",
            ) from None
        problem = _first_problem(error)
        hint = "write spaces instead of the tab" if r"'\t'" in problem else None
        raise BadInput(f"{name} is not valid YAML: {problem}", hint=hint) from None
    except RecursionError:
        raise BadInput(f"{name} is nested too deeply") from None
    except (ValueError, IndexError) as error:  # the composer's own way of giving up
        raise BadInput(f"{name} is not valid YAML: {type(error).__name__}") from None
    if root is None:
        raise BadInput(f"{name} is empty")
    if root.id == "scalar":
        raise BadInput(f"{name} holds one value and no keys", hint=KEYED)
    yield from _YamlWalk(tokens, name).walk(root)


def _second_document(text: str) -> int | None:
    """Return the line of the second `---` that something stands before, counted from 1."""
    lines = text.splitlines()
    begins = [number for number, line in enumerate(lines, start=1) if re.match(r"---(\s|$)", line)]
    told = [number for number in begins if any(re.match(r"\s*[^#\s-]", line) for line in lines[: number - 1])]
    return told[0] if told else None


def _first_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)


class _YamlWalk:
    """Turns nodes into scalars.  A node met a second time is an alias of the first."""

    def __init__(self, tokens: dict[int, int], name: str) -> None:
        self.tokens = tokens
        self.name = name
        self.num_scalars = 0
        self.first_key: dict[int, str] = {}
        self.open: set[int] = set()

    def walk(self, root: Any) -> Iterator[tuple[str, Scalar | Literal["mapping", "list"]]]:
        found = list(self._walk(root, "", 0))
        uses: dict[str, int] = {}
        for _, item in found:
            if isinstance(item, Scalar) and item.alias_of is not None:
                uses[item.alias_of] = uses.get(item.alias_of, 0) + 1
        for key, item in found:
            if isinstance(item, Scalar) and item.alias_of is None and key in uses:
                yield key, dataclasses.replace(item, num_aliases=uses[key])
            else:
                yield key, item

    def _walk(self, node: Any, key: str, num_ignored: int) -> Iterator[tuple[str, Any]]:
        if node.id == "scalar":
            yield key, self._scalar(node, key, num_ignored)
            return
        if id(node) in self.open:  # an anchor inside itself: there is nothing more to find
            return
        self.open.add(id(node))
        if key:
            yield key, "mapping" if node.id == "mapping" else "list"
        if node.id == "mapping":
            for name, (value, dropped) in _entries(node).items():
                yield from self._walk(value, f"{key}.{name}" if key else name, dropped)
        else:
            for i, value in enumerate(node.value):
                yield from self._walk(value, f"{key}.{i}" if key else str(i), 0)
        self.open.remove(id(node))

    def _scalar(self, node: Any, key: str, num_ignored: int) -> Scalar:
        self.num_scalars += 1
        if self.num_scalars > MAX_SCALARS:
            raise BadInput(f"{self.name} unfolds into more than {MAX_SCALARS:,} values")
        first = self.first_key.setdefault(id(node), key)
        end = node.end_mark.index
        quotes = QUOTES[node.style]
        start = self.tokens.get(end, end) if quotes != "block" else node.start_mark.index
        value = plain_value(node.value) if quotes == "plain" else node.value
        return Scalar(
            key=key,
            value=value,
            start=start,
            end=end,
            quotes=quotes,
            line=node.start_mark.line + 1,
            alias_of=None if first == key else first,
            num_ignored=num_ignored,
        )


def _entries(mapping: Any) -> dict[str, tuple[Any, int]]:
    """Name -> (the value that counts, how many earlier ones it hides); merged keys first, own ones over."""
    own: dict[str, tuple[Any, int]] = {}
    merged: dict[str, tuple[Any, int]] = {}
    for key, value in mapping.value:
        if key.id == "scalar" and key.value == "<<" and key.style is None:
            sources = value.value if value.id == "sequence" else [value]
            for source in reversed(sources):  # the first of several counts
                merged |= _entries(source) if source.id == "mapping" else {}
            continue
        name = key.value if key.id == "scalar" else "?"
        own[name] = (value, own[name][1] + 1 if name in own else 0)
    return merged | own


# JSON

_SPACE = re.compile(r"[ \t\r\n]*")


def _json_scalars(text: str, name: str) -> Iterator[tuple[str, Scalar | Literal["mapping", "list"]]]:
    begin = 1 if text.startswith(BYTE_ORDER_MARK) else 0
    try:
        root = json.loads(text[begin:])
    except json.JSONDecodeError as error:
        raise BadInput(f"{name} is not valid JSON: line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise BadInput(f"{name} is nested too deeply") from None
    if not isinstance(root, (dict, list)):
        raise BadInput(f"{name} holds one value and no keys", hint=KEYED)
    found, _ = _json_walk(text, _skip(text, begin), "", 0)
    yield from found.items()


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _json_walk(text: str, at: int, key: str, num_ignored: int) -> tuple[dict[str, Any], int]:
    """Return what is found from `at` on, by key, and where it ends, in a text known to be JSON."""
    if text[at] not in "{[":
        value, end = json.JSONDecoder().raw_decode(text, at)
        quotes: Quotes = "double" if text[at] == '"' else "plain"
        line = text.count("\n", 0, at) + 1
        return {
            key: Scalar(
                key=key, value=value, start=at, end=end, quotes=quotes, line=line, num_ignored=num_ignored
            )
        }, end
    is_object = text[at] == "{"
    parts: dict[str, dict[str, Any]] = {}
    ignored: dict[str, int] = {}
    at = _skip(text, at + 1)
    while text[at] not in "}]":
        name = str(len(parts))
        if is_object:
            name, at = json.JSONDecoder().raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)  # past the colon
        ignored[name] = ignored.get(name, -1) + 1
        parts[name], at = _json_walk(text, at, f"{key}.{name}" if key else name, ignored[name])
        at = _skip(text, at)
        at = _skip(text, at + 1) if text[at] == "," else at
    found: dict[str, Any] = {key: "mapping" if is_object else "list"} if key else {}
    for part in parts.values():
        found |= part
    return found, at + 1


# Edits

# Plain YAML text that no loader takes for anything but a string.
_PLAIN_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./+-]*|[0-9]+[A-Za-z_-][A-Za-z0-9_./+-]*")
_DATE = re.compile(r"[0-9]{4}-[0-9]+-[0-9]+.*")  # which YAML 1.1 makes a date
_ESCAPED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Edited:
    """A text after its edits, and the warnings about them."""

    text: str
    warnings: tuple[str, ...] = ()


def edit_scalars(document: Document, changes: Mapping[str, Value]) -> Edited:
    """Return the text of `document` with the values at these dotted keys replaced."""
    found = {key: check_editable(document, key) for key in changes}
    text = document.text
    for key, scalar in sorted(found.items(), key=lambda item: -item[1].start):
        text = (
            text[: scalar.start]
            + write_value(changes[key], over=scalar, document=document)
            + text[scalar.end :]
        )
    _check_nothing_else_moved(document, text, changes)
    return Edited(text=text, warnings=tuple(_warnings(document, found)))


def check_editable(document: Document, key: str) -> Scalar:
    """Return the value at a key; BadInput if its characters must not be replaced."""
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


def write_value(value: Value, *, over: Scalar, document: Document) -> str:
    """Return the characters of `value` in the place of `over`."""
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
    """Return whether a value read back is the wanted one; a quoted number counts as that number."""
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
                "and is changed"
            )
        if scalar.num_aliases:
            others = "1 other value" if scalar.num_aliases == 1 else f"{scalar.num_aliases} other values"
            warnings.append(f"{others} of {document.name} follow {key} through an alias and change with it")
        comment = _comment_beside(document, scalar)
        if comment is not None and re.search(rf"(?<![\w.]){re.escape(str(scalar.value))}(?![\w.])", comment):
            warnings.append(
                f"the comment beside {key} ({document.name}:{scalar.line}) mentions {scalar.value}"
            )
    return warnings
