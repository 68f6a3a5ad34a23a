"""The grammar of a rule: one module, documented by its docstring, found by its place or its entry point.

A rule module has a docstring whose first line is `FO301 tensor-created-in-loop`, followed by five sections
(What it does, Why it costs, Evidence, Fix, Fix safety), a function `detect(evidence) -> list[Finding]`, and
`ARMS`: the kinds of arms that prove it, the one closest to the fix first.  Four more names are optional:

- `EXPLAINS`: codes of rules whose findings on the same line, or in the loop that begins there, it replaces.
- `TUNE`: treatments and patches with which `flatout tune` tries its fix.
- `suits(evidence, finding, name)`: whether that treatment or patch can help a finding; without it, all do.
- `NEEDS_PROOF = True`: what the rule sees costs nothing by itself, and the fix is another way to do the same
  work.  Only an arm can tell whether that is faster, so a finding without a measured gain is dropped.

The file's name is the kebab name with underscores.  Tables, `flatout rules` and the docs are generated from
these.  The sections are markdown; a `diff` block in Fix shows lines before and after.  Findings that are not
given another fix say the first sentence of Fix, and their class is the word that Fix safety begins with:
Exact, Reordered or Lossy.

To add a rule, add a file: to a room of `doctor/rules`, or to a package of your own that names it in its
pyproject.toml (other letters before the digits keep its codes apart from Flatout's):

    [project.entry-points."flatout.rules"]
    slow-print = "my_package.slow_print"
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, NotRequired, TypedDict, Unpack

from flatout.doctor.ceilings import prove
from flatout.doctor.finding import SAFETIES, Ceiling, Finding, FixSafety
from flatout.ground.errors import BadInput
from flatout.ground.user_code import load_plugins
from flatout.measure.evidence import Evidence, Place

GROUP = "flatout.rules"
# The meaning of a code's first digit.
FAMILIES = {
    "1": "loading",
    "2": "transfers, waits and the host",
    "3": "Python loops and launches",
    "4": "arithmetic",
    "5": "memory",
    "6": "compilation",
    "7": "several GPUs",
    "8": "outside the step",
    "9": "training itself: mistakes that cost no time",
}
SECTIONS = ("What it does", "Why it costs", "Evidence", "Fix", "Fix safety")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule as its module declares it."""

    code: str
    name: str
    sections: dict[str, str]
    detect: Callable[[Evidence], list[Finding]]
    arms: tuple[str, ...] = ()  # kinds of arms that prove it
    explains: tuple[str, ...] = ()  # codes of rules that say less about the same line
    tune: tuple[str, ...] = ()  # treatments and patches that try its fix
    suits: Callable[[Evidence, Finding, str], bool] | None = None  # whether one of these can help a finding
    needs_proof: bool = False  # drop a finding whose arm shows no certain gain

    def tune_of(self, finding: Finding, evidence: Evidence) -> tuple[str, ...]:
        """Return the treatments and patches that can help a finding."""
        return tuple(name for name in self.tune if self.suits is None or self.suits(evidence, finding, name))

    @property
    def summary(self) -> str:
        """The first sentence of What it does."""
        return _first_sentence(self.sections["What it does"])

    @property
    def example(self) -> tuple[str, ...]:
        """Lines of the fix before and after, marked `-` and `+`; empty if its text shows none."""
        found = re.search(r"```diff\n(.*?)```", self.sections["Fix"], re.DOTALL)
        return tuple(found[1].rstrip("\n").split("\n")) if found else ()


def families(rules: Iterable[Rule]) -> dict[str, list[Rule]]:
    """Group rules by the meaning of their code's hundred, and rules of other packages by its letters."""
    found: dict[str, list[Rule]] = {}
    for rule in rules:
        digit, ours = rule.code[-3], rule.code.startswith("FO")
        name = (
            f"FO{digit}xx {FAMILIES.get(digit, '')}".rstrip()
            if ours
            else f"{rule.code[:-3]} of another package"
        )
        found.setdefault(name, []).append(rule)
    return found


class Said(TypedDict):
    """What a rule adds to the place and message of a finding, as keywords of `Title.finding`."""

    figures: Iterable[str]
    share: NotRequired[float | None]
    fix: NotRequired[str | None]
    safety: NotRequired[FixSafety | None]


class Title(NamedTuple):
    """What all findings of a rule share, read from its docstring, with its arms; it makes the findings."""

    code: str
    name: str
    fix: str  # what to do, in one sentence
    safety: FixSafety
    arms: tuple[str, ...] = ()

    def finding(
        self,
        place: Place | None,
        message: str,
        *,
        figures: Iterable[str],
        fix: str | None = None,
        safety: FixSafety | None = None,
        share: float | None = None,
        ceiling: Ceiling | None = None,
        no_ceiling: str | None = None,
    ) -> Finding:
        """Make a finding: one cause at one place, with the figures it rests on.

        `fix` and `safety` are those of the rule's docstring unless given.
        """
        return Finding(
            code=self.code,
            name=self.name,
            place=place,
            message=message,
            evidence=tuple(figures),
            share=share,
            ceiling=ceiling,
            fix=fix or self.fix,
            safety=safety or self.safety,
            no_ceiling=no_ceiling,
        )

    def proven(
        self,
        evidence: Evidence,
        place: Place | None,
        message: str,
        *,
        arms: tuple[str, ...] | None = None,
        observed_share: float | None = None,
        proved_at: Place | None = None,
        **said: Unpack[Said],
    ) -> list[Finding]:
        """Make the finding of a cause of lost time, with what the arms measured there; none without a gain.

        `arms` are the rule's own unless given.  If all that the cause can hold was observed, such as the wait
        for a loader, the ceiling frees at most `observed_share` of the step.  `proved_at` is the arms' place,
        if it is another one.
        """
        proof = prove(
            evidence,
            self.arms if arms is None else arms,
            place=proved_at or place,
            observed_share=observed_share,
        )
        if proof.refuted:
            return []
        return [self.finding(place, message, ceiling=proof.ceiling, no_ceiling=proof.reason, **said)]


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Return every rule by code: those of this package, and those that other packages add."""
    package = importlib.import_module("flatout.doctor.rules")
    found_modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = [importlib.import_module(module.name) for module in found_modules if not module.ispkg]
    found: dict[str, Rule] = {}
    for module in (*modules, *load_plugins(GROUP).values()):
        rule = read_rule(module)
        if rule.code in found:
            raise BadInput(
                f"{module.__name__} has the code {rule.code} of {found[rule.code].name}",
                hint="give it a code of its own, with letters of its own",
            )
        found[rule.code] = rule
    return tuple(found[code] for code in sorted(found))


def rule_by_code(code_or_name: str) -> Rule:
    """Find a rule by its code, in any case, or by its name."""
    for rule in all_rules():
        if code_or_name.lower() in (rule.code.lower(), rule.name):
            return rule
    known = ", ".join(rule.code for rule in all_rules())
    raise BadInput(f"no rule {code_or_name!r}", hint=f"known rules: {known}")


def read_rule(module: ModuleType) -> Rule:
    """Read a rule from its module; refuse a docstring that breaks the grammar."""
    file_name = module.__name__.rpartition(".")[2]
    title = title_of(module.__doc__)
    found = _sections_of(module.__doc__)
    heads, sections = tuple(head for head, _ in found), dict(found)
    if title.name.replace("-", "_") != file_name:
        raise _broken(file_name, f"names {title.name!r}: the file's name is the rule's with underscores")
    if heads != SECTIONS:
        raise _broken(file_name, f"has the sections {', '.join(heads) or 'none'}")
    if empty := [head for head, text in sections.items() if not text]:
        raise _broken(file_name, f"says nothing under {', '.join(empty)}")
    if not callable(getattr(module, "detect", None)):
        raise BadInput(f"the rule {file_name} has no detect(evidence)", hint="add the function")
    given = {field: tuple(getattr(module, field.upper(), ())) for field in ("arms", "explains", "tune")}
    return Rule(
        code=title.code,
        name=title.name,
        sections=sections,
        detect=module.detect,
        suits=getattr(module, "suits", None),
        needs_proof=getattr(module, "NEEDS_PROOF", False),
        **given,
    )


def title_of(docstring: str | None, *, arms: tuple[str, ...] = ()) -> Title:
    """Read a rule's docstring for its findings: code, name, fix and its safety; add the rule's arms."""
    title = (docstring or "").strip().partition("\n")[0].strip()
    code, _, name = title.partition(" ")
    if not re.fullmatch(r"[A-Z]{2,}\d{3}", code) or not name:
        raise _broken("", f"starts with {title!r}")
    sections = dict(_sections_of(docstring))
    return Title(
        code, name, _fix_of(sections.get("Fix", "")), _safety_of(sections.get("Fix safety", "")), arms
    )


def _sections_of(docstring: str | None) -> list[tuple[str, str]]:
    """Split a rule's docstring at the names of sections, in their order there."""
    body = (docstring or "").strip().partition("\n")[2]
    parts = re.split(rf"^({'|'.join(SECTIONS)})$", body, flags=re.MULTILINE)
    return [
        (head, textwrap.dedent(text).strip()) for head, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


def _fix_of(section: str) -> str:
    """Return the first sentence of Fix as a finding says it, without markdown; empty if code comes first."""
    if section.startswith("```"):
        return ""
    sentence = _first_sentence(section.partition("\n\n")[0]).rstrip(".:")
    begins_with_code = re.match(r"`|\w+\.\w", sentence)
    plain = sentence.replace("`", "")
    return plain if begins_with_code else plain[:1].lower() + plain[1:]


def _safety_of(section: str) -> FixSafety:
    """Return the class that Fix safety begins with; a fix without one counts as lossy."""
    return next((each for each in SAFETIES if section.lower().startswith(each)), "lossy")


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def _broken(file_name: str, how: str) -> BadInput:
    whose = f"the docstring of the rule {file_name}" if file_name else "a rule's docstring"
    return BadInput(
        f"{whose} {how}",
        hint=f"begin with a title such as 'FO301 tensor-created-in-loop'; sections: {', '.join(SECTIONS)}",
    )
