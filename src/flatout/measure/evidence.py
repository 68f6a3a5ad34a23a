"""Evidence: what was measured of one job.

One frozen, versioned JSON document.  The doctor reads nothing else, so findings are the same on the
machine that ran the job and on any other.  All seconds are wall-clock seconds; "per step" figures are
means over the steps of the pass that took them.  Unknown is None, with the reason in `Evidence.missing`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from flatout.ground.codec import encode

EVIDENCE_VERSION = 2

# Steps that are not timed, because their instrument slows them.  Any other step name is an arm's label.
INSTRUMENTS = ("count", "stacks", "kernels", "memory", "attribution")
SiteKind = Literal["create", "row", "sync", "copy", "cell", "weights", "call"]
EpisodeKind = Literal["evaluation", "rollout", "checkpoint", "epoch-start", "compilation", "set-up", "other"]
ROLLS_OUT = re.compile(r"roll|collect|play|episode|simul|generat|explor|act\b", re.IGNORECASE)
Ended = Literal["measured", "finished", "crashed", "interrupted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A line of the user's code; `file` is relative to the job's folder if it is inside it."""

    file: str
    line: int
    function: str | None = None

    @property
    def at(self) -> tuple[str, int]:
        """The line itself, because two places on it may name different functions."""
        return self.file, self.line

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A few repeated measurements in seconds."""

    num: int
    mean_s: float
    median_s: float
    p95_s: float
    max_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedJob:
    """What ran, and how it ended."""

    command: tuple[str, ...]
    folder: str  # its name only
    started_at: str
    ended: Ended
    exit_code: int | None
    error: str | None
    device: str  # the type of the device that computes: "cuda", "cpu", "mps"
    device_name: str | None
    python: str
    torch: str
    flatout: str
    rank: int = 0
    world_size: int = 1
    host: str | None = None  # the name of the machine
    node: int | None = None  # its number, by the launcher
    anchor: str | None = None  # what marks a step: "AdamW.step", "flatout.step", "model call"
    warmup_reason: str | None = None
    limit_s: float | None = None  # --seconds; None: the job ran to its end
    framework: str | None = (
        None  # whose loop takes the steps: "transformers", "lightning"; None: the user's own
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The part of the host that the job may use."""

    cores: float | None
    memory_bytes: int | None
    cpu_model: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """The GPU the job computes on."""

    name: str
    memory_bytes: int | None
    compute_capability: str | None
    peak_flops: dict[str, float] = field(default_factory=dict)  # dense, by dtype, from the datasheet
    bandwidth_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step: from the end of the previous one to the end of this one."""

    index: int
    arm: str  # "warmup", one of INSTRUMENTS, "real", or the label of an arm
    block: int  # steps of one arm that ran in a row share a block number
    step_s: float  # on a GPU between two events of its stream, else by the host's clock
    phases_s: dict[str, float]  # by the host's clock, exclusive; keys of PHASES
    device_phases_s: dict[str, float] | None = None  # GPU stream time by phase
    rows: int | None = None  # samples of the batch
    num_batches: int = 1
    num_backwards: int = 1
    num_forwards: int = 1
    epoch_start: bool = False
    kept: bool = True  # False: first of its block, an epoch start, or an outlier; excluded from every mean


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochStart:
    """The cost of starting to iterate a loader, and of ending the previous epoch."""

    iter_s: float  # DataLoader.__iter__: worker processes start here
    first_wait_s: float  # the wait for the first batch
    end_s: float = 0.0  # after the last batch of the previous epoch: worker processes end there


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One worker process of a loader."""

    worker: int
    num_batches: int
    fetch_s: float  # mean per batch
    collate_s: float  # mean per batch
    queue_age_s: float  # mean time a finished batch lay in the queue
    cpu_s: float | None = None  # mean per batch, of fetching and collating
    blocked_s: float | None = None  # mean per batch, neither running nor queued for a core: waits for storage


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Ragged samples and the padding that made them rectangular."""

    num_samples: int
    mean: float
    max: int
    padded_share: float  # of all padded positions, the share that is padding
    bucketed_share: float  # the same if batches were cut from samples sorted by length


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Calls made by one line while one batch was fetched and collated."""

    function: str  # "numpy.concatenate", "torch.stack"
    place: Place
    in_collate: bool
    calls_per_batch: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchLine:
    """A line of the user's code that was innermost on the stack while batches were made."""

    place: Place | None  # None: no line of the user's was on the stack
    in_collate: bool
    samples: int
    library: str | None = None  # the package that it calls: "PIL", "transformers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """A DataLoader the job iterated."""

    place: Place | None  # where it was constructed
    dataset: str
    num_workers: int | None  # None: not a DataLoader, so its workers are unknown
    batch_size: int | None
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None
    num_batches: int | None  # per epoch
    trains: bool  # optimizer steps followed its batches
    wait_s: Spread | None = None  # per batch, epoch starts excluded
    late_s: float | None = (
        None  # mean per batch, of that: until a worker had finished it; the rest hands it over
    )
    fetch_s: Spread | None = None  # per batch, in the process that fetched
    collate_s: Spread | None = None
    cpu_s: float | None = None  # mean per batch, of fetching and collating
    blocked_s: float | None = None  # mean per batch, neither running nor queued for a core: waits for storage
    epochs: tuple[EpochStart, ...] = ()
    workers: tuple[Worker, ...] = ()
    collate_place: Place | None = None
    lengths: Lengths | None = None
    calls: tuple[Call, ...] = ()
    lines: tuple[FetchLine, ...] = ()  # where the time of a batch goes, most first
    streams: bool = False  # an IterableDataset, which gives every worker all samples
    takes_many: bool = False  # its dataset takes all indices of a batch at once
    via: str | None = None  # the library line that makes it; None: the user's own line


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One operation at one line of the user's code."""

    kind: SiteKind
    op: str
    place: Place
    via: str | None  # the library line that the call went through; None: the user's line makes it
    calls_per_step: float
    requires_grad: bool = False
    device: str = "cpu"  # where the tensor lives; for a copy the destination
    host_s: float | None = None  # per step, in the call itself
    backward_s: float | None = None  # per step, in the backward nodes these calls made
    derived_s: float | None = None  # per step, forward and backward of calls that see only these tensors
    phases_s: dict[str, float] = field(default_factory=dict)  # host_s by the phase of the calls
    steps_s: tuple[float, ...] = ()  # host and backward seconds of each attributed step
    bytes_per_step: float | None = None
    pinned: bool | None = None  # for a copy: whether the host side was page-locked
    blocking: bool | None = None  # for a copy: whether the host waits for it (no non_blocking=True)
    wide_bytes_per_step: float | None = None  # for a copy: the part of its bytes in 64-bit floats


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCall:
    """Outermost model calls from one line."""

    module: str
    place: Place
    calls_per_step: float
    rows: int | None  # leading dimension of the first tensor argument; None when it varies
    training: bool
    has_parameters: bool
    autocast: str | None = None  # the dtype of an active autocast
    host_s: float | None = None
    num_alike: int = 1  # called modules of equal shapes, none of which gets another's result
    unused_gradients: bool = False  # gradients are recorded for parameters that no optimizer has
    evaluates: bool = False  # in evaluation mode, without a backward pass; another call trains the same model


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerCalls:
    """Modules inside the model that one line of the user's calls one after the other."""

    module: str
    place: Place
    calls_per_step: float
    num_modules: int
    rows_differ: bool  # they get different numbers of rows, like experts


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSetup:
    """An optimizer as the script made it."""

    name: str
    place: Place | None  # the line that makes it
    num_groups: int  # of parameters
    num_distinct: int  # groups that differ in an option
    num_tensors: int
    # "foreach", "fused"; "for-loop" if the script asks for it, "default" if torch chooses a loop
    way: str | None  # how a step goes through them; None: not one of torch's optimizers


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """The arithmetic and bytes of a step, at the speeds that a product and a copy reach on this device."""

    flops: float  # per step, of matrix products, convolutions and attention
    num_bytes: float  # per step, that operators read and write
    compute_s: float
    memory_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCalls:
    """Operators called by one kind of module, or by an optimizer's step; on a GPU each launches kernels."""

    caller: str  # "Attention", "AdamW.step"
    place: Place | None  # of its forward; None for a library's
    calls_per_step: float  # without the backward pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One kind of kernel (GPU) or operator (CPU), by total time."""

    name: str
    category: str  # matmul, attention, convolution, normalisation, elementwise, reduction, indexing, ...
    calls_per_step: float
    total_s: float  # per step
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Copies by the GPU's copy engines."""

    kind: str  # "HtoD pageable", "HtoD pinned", "DtoH pageable", "DtoD", ...
    calls_per_step: float
    total_s: float  # per step
    bytes_per_step: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The device's side of a step, from the profiler."""

    num_steps: int
    step_s: float  # of the profiled steps, including the profiler's own cost
    busy_share: float | None  # share of the step with at least one kernel running; None without a GPU
    num_kernels: float  # per step; operators without a GPU
    median_kernel_s: float | None
    gap_s: float | None  # per step, no kernel running
    sync_gap_s: float | None  # the part of it caused by the host's waits for the GPU
    num_syncs: float | None  # per step, the host's waits for the GPU
    by_category_s: dict[str, float]  # per step
    matmul_s_by_dtype: dict[str, float]  # per step
    top: tuple[Kernel, ...]
    copies: tuple[Copy, ...] = ()
    optimizer: str | None = None  # "fused", "foreach", "for-loop"
    communication_s: float | None = None  # per step, while a collective ran; None: none was seen
    exposed_s: float | None = None  # of that, while nothing computed


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Tensors made at one line that are still alive steps later."""

    place: Place | None  # where the tensors were made
    holder: str | None  # the name that keeps them alive
    holder_place: Place | None  # the line that puts them there
    bytes_per_step: float
    tensors_per_step: float
    with_graph: bool  # they hold an autograd graph


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphGrowth:
    """An autograd graph that is reachable from a live tensor and grows from step to step."""

    holder: str | None
    holder_place: Place | None
    nodes_per_step: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeTensor:
    """One of the largest tensors that a step makes."""

    place: Place | None
    op: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes over a few steps."""

    num_steps: int
    peak_bytes: int | None  # the allocator's peak on a GPU; the live tensors' peak on a CPU
    growth_bytes_per_step: float
    growth: tuple[Growth, ...] = ()
    graphs: tuple[GraphGrowth, ...] = ()
    flops_by_dtype: dict[str, float] = field(default_factory=dict)  # matrix products, per step
    num_bytes: float | None = None  # per step, that operators read and write
    reserved_bytes: int | None = None  # the allocator's peak including its cache; None without a GPU
    num_alloc_retries: int | None = None  # of the whole job: the GPU was full, its cache was emptied
    largest: tuple[LargeTensor, ...] = ()  # of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class StackPath:
    """The user's lines that were on the training thread's stack together, outermost first."""

    phase: str
    places: tuple[Place, ...]
    samples: int
    library: str | None = None  # the package that the innermost line calls: "tqdm", "torch/nn/modules"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    """Where stack samples of some steps found the training thread."""

    num_steps: int
    samples_by_phase: dict[str, int]
    paths: tuple[StackPath, ...]  # the most frequent ones
    loops: dict[str, tuple[int, ...]] = field(default_factory=dict)  # "file:line" -> outer loops first
    differentiable: tuple[Place, ...] = ()  # lines of these paths that contribute to the loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """Time outside the typical step, attributed to one line of the user's code."""

    kind: EpisodeKind
    place: Place | None
    function: str | None  # what that line calls
    seconds: float  # all occurrences together, beyond what a typical step takes
    times: int
    num_steps: int  # steps that were examined for it
    per_step_s: float | None  # spread over the job's steps; None: paid once, or seen a single time
    with_epoch: bool = False  # it recurs every epoch, and is spread over the epoch's length
    samples: int = 0  # stack samples that found it
    inside: Place | None = None  # the innermost line of at least half of them, if it is another line


@dataclass(frozen=True, kw_only=True, slots=True)
class OfAnArm:
    """The arm that a record belongs to."""

    kind: str  # what is done to the steps: "cached", "half", "knock-out", ...
    label: str  # the name of its steps
    place: Place | None = None  # the first line of the removed block
    last_line: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Counterfactual(OfAnArm):
    """Steps without one cause, interleaved with steps that have it."""

    baseline: str  # the label of the steps it is compared with: "real" or "cached"
    step_s: float
    baseline_step_s: float
    speedup: float  # baseline_step_s / step_s
    speedup_low: float  # 95 % interval by bootstrap over blocks and steps
    speedup_high: float
    num_blocks: int
    num_steps: int
    function: str | None = None  # the function around it, or that it equals
    value: float | str | None = None  # of the changed setting: 4 workers, "bfloat16"
    roofline_s: float | None = None  # what a fix must still spend on the block; None: unknown
    parent: str | None = None  # the label of the arm whose block holds this one


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmNotRun(OfAnArm):
    """An arm that was proposed but brought no figure."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledFunction:
    """A function that torch.compile compiled in unchanged steps."""

    function: str
    place: Place | None  # the line whose value forced a recompilation, else its first line; None: a library's
    num_compiled: int
    num_recompiled: int
    compile_s: float  # all compilations together
    late_s: float  # of these, recompilations after warm-up
    num_late_steps: int  # steps after warm-up in which it was compiled again
    reasons: tuple[str, ...]  # guards that failed
    gave_up: bool  # it hit the recompile limit and runs uncompiled since


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphBreak:
    """A line at which a compiled graph ends, and why."""

    place: Place
    reason: str
    times: int  # compilations that ended there


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """What torch.compile did, by dynamo's own records."""

    functions: tuple[CompiledFunction, ...]
    breaks: tuple[GraphBreak, ...]
    num_steps: int  # real ones, after warm-up
    steps_s: float  # all of them together


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """Pauses of Python's garbage collector in unchanged steps."""

    num_steps: int
    steps_s: float  # all of them together
    pauses_s: float  # of that, collecting
    num_paused: int  # the fewest steps that hold nine tenths of the pauses
    asked_s: float = 0.0  # of the pauses, caused by calls of gc.collect
    place: Place | None = None  # of such a call


@dataclass(frozen=True, kw_only=True, slots=True)
class Threads:
    """Threads that a CPU operator uses."""

    num: int
    place: Place | None = None  # the user's line that sets the number


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Losses of warm-up steps."""

    num: int
    num_not_finite: int  # in a row, at the end
    place: Place | None = None  # of the backward call


@dataclass(frozen=True, kw_only=True, slots=True)
class Untrained:
    """Parameters of an optimizer that never got a gradient, by the user's module that holds them."""

    module: str
    place: Place | None  # of its forward
    names: tuple[str, ...]  # some of them
    num: int
    num_steps: int  # of that optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class RateSchedule:
    """A learning-rate schedule that ends after some steps."""

    name: str
    argument: str  # the argument that sets the number of steps
    place: Place | None
    horizon: int
    num_steps: int  # of the schedule so far
    num_optimizer_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What training itself showed: losses, parameters, schedules."""

    losses: Losses
    untrained: tuple[Untrained, ...] = ()
    schedules: tuple[RateSchedule, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Number formats the job computes in."""

    parameter_dtypes: tuple[str, ...]
    autocast: str | None
    tf32_matmul: bool | None
    bf16_supported: bool | None
    scales_loss: bool | None = None  # a gradient scaler is in use; None: unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One process of a distributed job."""

    rank: int
    step_s: float | None
    phases_s: dict[str, float]
    ended: Ended
    host: str | None = None
    node: int | None = None  # two nodes may have one host: agents that share a machine
    communication_share: float | None = None  # of the step, while a collective ran
    exposed_share: float | None = None  # of the step, while a collective ran and nothing computed
    link: str | None = None  # the network device that leads to other nodes
    link_bytes_per_s: float | None = None  # its nominal speed, one way
    meets_in: tuple[str, ...] = ()  # phases with collectives, besides backward and the optimizer
    own_low_s: float | None = None  # of its mean time per step in the other phases; None: too few steps
    own_high_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """An all-reduce of two sizes over all ranks, between two steps."""

    backend: str
    num_ranks: int
    small_bytes: int
    small_s: float
    large_bytes: int
    large_s: float
    bus_bytes_per_s: float | None  # through the slowest link, one way; None: both sizes took the same time
    link: str | None = None
    link_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What was measured of one job."""

    job: ObservedJob
    host: Host
    gpu: Gpu | None = None
    steps: tuple[Step, ...] = ()
    loaders: tuple[Loader, ...] = ()
    sites: tuple[Site, ...] = ()
    module_calls: tuple[ModuleCall, ...] = ()
    inner_calls: tuple[InnerCalls, ...] = ()
    optimizers: tuple[OptimizerSetup, ...] = ()  # those that stepped
    operator_calls: tuple[OperatorCalls, ...] = ()  # the most frequent callers
    attributed_step_s: float | None = None  # the mean step under attribution, which slows it
    attributed_calls_s: dict[str, float] = field(default_factory=dict)  # of it, by phase, in torch's calls
    attributed_backward_s: float | None = None  # of attributed_step_s, in all backward nodes
    kernels: Kernels | None = None
    memory: Memory | None = None
    network: Network | None = None  # of a job of several ranks
    meets_in: tuple[str, ...] = ()  # phases in which it calls collectives, besides backward and the optimizer
    stacks: Stacks | None = None
    episodes: tuple[Episode, ...] = ()  # time outside the typical step
    counterfactuals: tuple[Counterfactual, ...] = ()
    arms_not_run: tuple[ArmNotRun, ...] = ()
    compilation: Compilation | None = None  # None: nothing was compiled
    garbage: Garbage | None = None  # None: nothing was collected
    threads: Threads | None = None
    training: Training | None = None
    precision: Precision | None = None
    roofline: Roofline | None = None
    ranks: tuple[Rank, ...] = ()
    sources: dict[str, dict[str, str]] = field(default_factory=dict)  # file -> line number -> text
    missing: tuple[str, ...] = ()
    version: int = EVIDENCE_VERSION

    def counterfactual(self, kind: str) -> Counterfactual | None:
        """Return the counterfactual of this kind; if there are several, the one with the largest gain."""
        found = (each for each in self.counterfactuals if each.kind == kind)
        return max(found, key=lambda each: each.speedup, default=None)

    @property
    def not_measured(self) -> tuple[str, ...]:
        """List what is missing, and the arms without a figure."""
        return (*self.missing, *(f"{arm.label}: {arm.reason}" for arm in self.arms_not_run))

    def kept(self, arm: str) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.arm == arm and step.kept)

    @property
    def step_s(self) -> float | None:
        """The mean real step; of warm-up steps if the job ended before a real one."""
        for arm in ("real", "warmup"):
            steps = self.kept(arm)
            if steps:
                return sum(step.step_s for step in steps) / len(steps)
        return None

    def phase_s(self, phase: str) -> float | None:
        """Return the mean host seconds of one phase over the real steps."""
        steps = self.kept("real") or self.kept("warmup")
        if not steps:
            return None
        return sum(step.phases_s.get(phase, 0.0) for step in steps) / len(steps)

    @property
    def outside_s(self) -> float:
        """Seconds outside the typical step, spread over the job's steps."""
        return sum(episode.per_step_s or 0.0 for episode in self.episodes)

    def job_share(self, per_step_s: float) -> float | None:
        """Return the share of the job's time after set-up that `per_step_s` per step takes."""
        return per_step_s / (self.step_s + self.outside_s) if self.step_s else None

    def to_json(self) -> dict[str, Any]:
        return {"format": "flatout-evidence", **encode(self)}
