"""The grammar of a rule: one file of `doctor/rules`, found by its place, documented by its docstring.

A rule module has a docstring whose first line is `FO301 tensor-created-in-loop`, followed by five
sections (What it does, Why it costs, Evidence, Fix, Fix safety), and a function
`detect(evidence) -> list[Finding]`.  The file's name is the kebab name with underscores.  Tables,
`flatout rules` and the docs are made from these; adding a rule is adding a file.  The sections are
markdown, so that an example of a fix can be shown as code.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from flatout.doctor.finding import Finding
from flatout.errors import BadInput
from flatout.measure.evidence import Evidence

SECTIONS = ("What it does", "Why it costs", "Evidence", "Fix", "Fix safety")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule as its module declares it."""

    code: str
    name: str
    sections: dict[str, str]
    detect: Callable[[Evidence], list[Finding]]

    @property
    def summary(self) -> str:
        """The first sentence of What it does."""
        return re.split(r"(?<=\.)\s", " ".join(self.sections["What it does"].split()), maxsplit=1)[0]


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule of the package, by code."""
    package = importlib.import_module("flatout.doctor.rules")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    rules = [read_rule(importlib.import_module(f"{package.__name__}.{name}")) for name in names]
    return tuple(sorted(rules, key=lambda rule: rule.code))


def rule_by_code(code_or_name: str) -> Rule:
    for rule in all_rules():
        if code_or_name.lower() in (rule.code.lower(), rule.name):
            return rule
    known = ", ".join(rule.code for rule in all_rules())
    raise BadInput(f"no rule {code_or_name!r}", hint=f"known rules: {known}")


def read_rule(module: ModuleType) -> Rule:
    """Parse a rule module; a docstring that breaks the grammar is an error of ours."""
    code, name = title_of(module.__doc__)
    body = (module.__doc__ or "").strip().partition("\n")[2]
    parts = re.split(rf"^({'|'.join(SECTIONS)})$", body, flags=re.MULTILINE)
    sections = {
        head: textwrap.dedent(text).strip() for head, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    file_name = module.__name__.rpartition(".")[2]
    assert name.replace("-", "_") == file_name, f"{file_name}: the docstring names {name!r}"
    assert tuple(parts[1::2]) == SECTIONS, f"{file_name}: sections are {tuple(parts[1::2])}"
    assert all(sections.values()), f"{file_name}: a section is empty"
    return Rule(code=code, name=name, sections=sections, detect=module.detect)


def title_of(docstring: str | None) -> tuple[str, str]:
    """The code and the name in the first line of a rule's docstring."""
    title = (docstring or "").strip().partition("\n")[0].strip()
    code, _, name = title.partition(" ")
    assert re.fullmatch(r"FO\d{3}", code) and name, f"a rule's docstring starts with {title!r}"
    return code, name
