"""An arm: a way to run a step differently, interleaved in blocks with unchanged steps.

An arm removes one cause.  Its steps run within a second of baseline steps, and the difference is what that
cause really costs.  Each kind of arm has a module with `propose(context)`, which looks at what the
instruments found and yields arms worth a try, each with the share of the step that it may free.  The
schedule runs them, the most suspicious first, and names those it had no time for.
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

REAL = "real"  # the label of unchanged steps
ONE_BATCH = "one-batch"  # the label of steps that all run on the same batch
UNWATCHED = "unwatched"  # the label of steps of which only the end is noted
DEPENDS = "an input is computed from an earlier result"  # why calls cannot be one
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
    serves: str | None = None  # "cached", "half", "one": which kept batches its steps are given
    only_baseline: bool = False  # it shows nothing by itself and runs only for the arms that need it
    is_internal: bool = False  # it shows what the measurement costs, and is in no report
    fewest_rounds: int = 1  # run at least this many, even if the first shows no gain
    refusal: str | None = None  # why it cannot run, or gave up; its steps do not count from then on
    fell_back: bool = False  # the current step ran unchanged, at least in part, so it does not count

    def begin(self) -> None:
        """Set up before the first step of a block."""

    def step_end(self) -> None:
        """Act after each step of a block."""

    def end(self) -> None:
        """Undo after the last step of a block: the next steps run unchanged."""

    def release(self) -> None:
        """Let the code run unchanged; called on another thread when a block hangs."""

    def refine(self) -> Iterable[Arm]:
        """Return arms for parts of this one; called once it has shown a gain."""
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmContext:
    """What the instruments found, for proposers of arms."""

    device: str
    step_s: float  # the mean real step
    phases_s: dict[str, float]  # of the real steps, on the host's clock
    stacks: Stacks | None
    sites: tuple[Site, ...]
    module_calls: tuple[ModuleCall, ...]
    kernels: Kernels | None
    memory: Memory | None
    loaders: LoaderWatch
    optimizer: Any
    optimizers: tuple[Any, ...]  # all optimizers that stepped
    made_at: Callable[[Any], Place | None]  # the line that made an optimizer
    attributed_step_s: float | None  # the mean step that the sites' seconds were measured in
    user_code: UserCode
    clock: Clock
    patches: Patches  # for an arm's patches; undone with the instruments
    left_out: LeaveOut
    num_backwards: Callable[[], int]  # so far
    outermost_types: frozenset[type]  # types of the modules that the step calls directly
    seconds_left: float
    batch_statements: BatchStatements
    process: ProcessWatch


Propose = Callable[[ArmContext], Iterable[Arm]]


class Same(Arm):
    """Unchanged steps under another label, to measure the noise."""

    kind = label = "same"
    suspicion = 1.0
    fewest_rounds = 3
