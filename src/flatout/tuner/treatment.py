"""A treatment: how to run a job differently without changing its code.

A module below `treatments` holds one `TREATMENT`.  It proposes values for a job whose Evidence is known, and
installs one of them in the job's process before the script starts.  Its safety says how its numbers are
checked: `exact` ones must be equal, `reordered` ones differ by rounding, `lossy` ones are tried on request.

A treatment that can be turned on and off between two steps has a `switch`: it is tried in alternating blocks
of one run, beside others, at a tenth of the price.  `reversible(install)` makes one from an install that
works in a running job and whose patches undo all of it.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Protocol

from flatout.doctor.finding import FixSafety
from flatout.doctor.rule import all_rules
from flatout.ground.errors import BadInput
from flatout.measure.evidence import Evidence
from flatout.measure.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Sequence

Value = bool | int | str


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is known of a job before anything is tried."""

    evidence: Evidence
    source: str  # the text of the user's files

    @property
    def own_step_s(self) -> float | None:
        """The seconds of a step without its wait for a batch, which another treatment may remove."""
        step_s = self.evidence.step_s
        return None if step_s is None else step_s - (self.evidence.phase_s("wait") or 0.0)


class Switch(Protocol):
    """A treatment in a running job, turned on and off on the training thread, between steps."""

    def on(self) -> None: ...

    def off(self) -> None: ...


class _Reinstalled:
    """Installs a treatment each time it is turned on, and undoes it."""

    def __init__(self, install: Callable[[Patches, Value], None], value: Value) -> None:
        self._install, self._value, self._patches = install, value, Patches()

    def on(self) -> None:
        self._install(self._patches, self._value)

    def off(self) -> None:
        self._patches.undo()


def reversible(install: Callable[[Patches, Value], None]) -> Callable[[Patches, Value], Switch]:
    """Make a switch from an install that works at any time and whose patches undo all of it."""
    return lambda _patches, value: _Reinstalled(install, value)


@dataclass(frozen=True, slots=True)
class Treatment:
    """One way to run a job differently."""

    propose: Callable[[Case], Sequence[Value]]  # the likeliest first; none if it does not suit this job
    install: Callable[[Patches, Value], None]
    summary: str  # what it does, as a sentence without its full stop
    _: KW_ONLY
    safety: FixSafety
    name: str = ""  # that of its file, if none is given
    # made before the script starts, off; None if only a separate process shows its effect
    switch: Callable[[Patches, Value], Switch] | None = None
    changes_batches: bool = False  # its batches differ from the job's; the losses judge that
    regroups: bool = False  # a step's samples form other batches: its losses count as one
    redraws: bool = False  # a dataset that draws random numbers draws others
    redraws_masks: bool = False  # its dropout draws others, on the same batches
    begins_late: bool = False  # its gain begins with the second epoch: an epoch does not show it
    moves_reads: bool = False  # the script reads its numbers at other times, by design
    times_kernels: bool = False  # and chooses by that: nothing else may run meanwhile
    likely: float = 1.0  # what it gains where it gains: orders treatments of which nothing is measured yet
    suits_any: bool = False  # proposed without a sign in the evidence: what a job shows signs of goes first

    def __post_init__(self) -> None:
        file = self.install.__module__.rpartition(".")[2]
        object.__setattr__(self, "name", self.name or file.replace("_", "-"))

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules whose cause it removes: their ceiling is its own."""
        return tuple(rule.name for rule in all_rules() if self.name in rule.tune)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dose:
    """A treatment with its value."""

    name: str
    value: Value

    def __str__(self) -> str:
        return self.name if self.value is True else f"{self.name} {self.value}"


@functools.cache
def all_treatments() -> dict[str, Treatment]:
    """Return every treatment by name."""
    package = importlib.import_module("flatout.tuner.treatments")
    modules = [
        module.name
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.ispkg and not module.name.rpartition(".")[2].startswith("_")
    ]
    found = [importlib.import_module(name).TREATMENT for name in modules]
    return {each.name: each for each in sorted(found, key=lambda each: each.name)}


def treatment_of(dose: Dose) -> Treatment:
    """Find the treatment that a dose names."""
    known = all_treatments()
    if dose.name in known:
        return known[dose.name]
    from flatout.tuner.patches.patch import all_patches  # import libcst only if a patch is named

    patch = all_patches().get(dose.name)
    if patch is None:
        names = [*known, *all_patches()]
        near = difflib.get_close_matches(dose.name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known treatments: {', '.join(names)}"
        raise BadInput(f"there is no treatment {dose.name!r}", hint=hint)
    return Treatment(
        name=patch.name,
        safety=patch.safety,
        summary=patch.summary,
        propose=lambda _case: (),
        install=lambda _patches, _value: None,  # its text is served in place of the file
        moves_reads=True,  # a loop that reads lengths one by one becomes one that does not
    )


def read_dose(text: str) -> Dose:
    """Read NAME or NAME=VALUE."""
    name, has_value, value = text.partition("=")
    dose = Dose(name=name, value=(int(value) if value.isdigit() else value) if has_value else True)
    treatment_of(dose)
    return dose


def install(doses: Iterable[Dose], patches: Patches) -> None:
    """Install treatments in this process, which runs the script next."""
    for dose in doses:
        treatment_of(dose).install(patches, dose.value)
