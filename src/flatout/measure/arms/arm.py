"""An arm: a way to run a step differently, interleaved in blocks with steps as they are.

What the steps of an arm take, beside the steps of its baseline a second before and after, is what the cause
that it takes away really costs.  Each kind of arm has a module with `propose(context)`, which looks at what
the instruments found and yields arms worth a try, each with the share of the step that it may free.  The
schedule runs them, the most suspicious first; what it had no time for is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.measure.evidence import Kernels, Memory, ModuleCall, Place, Site, Stacks

if TYPE_CHECKING:
    from flatout.measure.arms.batches.batch_statements import BatchStatements
    from flatout.measure.arms.knock_out.leave_out import LeaveOut
    from flatout.measure.clock import Clock
    from flatout.measure.loading.loaders import LoaderWatch
    from flatout.measure.patches import Patches
    from flatout.measure.process.watch import ProcessWatch
    from flatout.measure.user_code import UserCode

REAL = "real"  # the label of steps as they are
ONE_BATCH = "one-batch"  # of steps on one and the same batch
COMPILED = "the job runs compiled code, which would be recompiled"  # why an arm is refused


class Arm:
    """One arm of one run; its methods are called on the training thread, between two steps."""

    kind: str = ""
    label: str = ""  # unique in a run; the steps of the arm carry it
    baseline: str = REAL  # the label of the steps it is compared with
    place: Place | None = None
    last_line: int | None = None
    function: str | None = None
    value: float | str | None = None
    roofline_s: float | None = None
    parent: str | None = None
    suspicion: float = 0.0  # the share of the step that it may free
    serves: str | None = None  # "cached", "half", "one": the batches that its steps are given again
    only_baseline: bool = False  # it shows nothing by itself, and runs beside those that need it
    fewest_rounds: int = 1  # also where the first shows no gain
    refusal: str | None = None  # why it cannot run, or gave itself up: its steps do not count from then on
    fell_back: bool = False  # the step under way ran as it is, at least in part: it does not count

    def begin(self) -> None:
        """Before the first step of a block."""

    def step_end(self) -> None:
        """After each step of a block."""

    def end(self) -> None:
        """After the last step of a block: steps run as they are again."""

    def release(self) -> None:
        """On another thread, when a block does not end: let the code run as it is."""

    def refine(self) -> Iterable[Arm]:
        """Arms within this one, asked for once it has shown a gain."""
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmContext:
    """What the instruments found, for those who propose arms."""

    device: str
    step_s: float  # the mean real step
    phases_s: dict[str, float]  # of the real steps, by the host's clock
    stacks: Stacks | None
    sites: tuple[Site, ...]
    module_calls: tuple[ModuleCall, ...]
    kernels: Kernels | None
    memory: Memory | None
    loaders: LoaderWatch
    optimizer: Any
    optimizers: tuple[Any, ...]  # all that stepped
    made_at: Callable[[Any], Place | None]  # the line that made an optimizer
    attributed_step_s: float | None  # the step that the sites' seconds are of
    user_code: UserCode
    clock: Clock
    patches: Patches  # for what is patched for an arm; undone with the instruments
    left_out: LeaveOut
    num_backwards: Callable[[], int]  # so far
    outermost_types: frozenset[type]  # of the modules that the step calls
    seconds_left: float
    batch_statements: BatchStatements
    process: ProcessWatch


Propose = Callable[[ArmContext], Iterable[Arm]]


class Same(Arm):
    """Steps as they are under another name: what is measured of nothing."""

    kind = label = "same"
    suspicion = 1.0
    fewest_rounds = 3
