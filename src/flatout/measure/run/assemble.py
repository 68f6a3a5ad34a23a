"""Turn the observer's notes into one Evidence document."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import platform
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.ground.codec import decode, encode, round_floats
from flatout.ground.torchrun import read_launch
from flatout.ground.units import show_seconds
from flatout.measure.arms.arm import ONE_BATCH, REAL
from flatout.measure.arms.switches.optimizer_step import describe
from flatout.measure.evidence import (
    Counterfactual,
    Ended,
    Episode,
    Evidence,
    Gpu,
    Host,
    Loader,
    ObservedJob,
    Place,
    Precision,
    Roofline,
    Stacks,
    Step,
)
from flatout.measure.lines.live_objects import live_objects
from flatout.measure.loading.fetch_stacks import fetch_lines
from flatout.measure.run.episodes import find_episodes
from flatout.measure.run.observer import Observer
from flatout.measure.run.ranks.other_trainers import describe_other_trainers
from flatout.measure.run.step_rows import build_steps

MOST_SET_UP = 0.5  # of the time; more is worth a word
MORE_STEPS = "give it more steps or epochs"
MOST_SHOWN_LINES = 60  # of a removed block
MOST_SHOWN_PATHS = 40  # paths whose source lines the evidence carries
OF_AN_ARM = ("place", "last_line", "function", "value", "roofline_s", "parent")


@dataclass(slots=True)
class Ending:
    """How the job ended."""

    ended: Ended
    exit_code: int | None = None
    error: str | None = None

    @property
    def is_its_own(self) -> bool:
        """Whether the job came to its own end; a job that was killed has no exit code."""
        return self.ended in ("finished", "crashed") and self.exit_code is not None


@dataclass(slots=True)
class Assembly:
    """Facts fixed at the start, completed with the observer's notes whenever evidence is needed."""

    command: tuple[str, ...]
    folder: str
    started_at: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )

    def evidence(self, observer: Observer, ending: Ending, *, wait: bool = True) -> Evidence:
        """Assemble the evidence; `wait` lets the GPU finish first, so that all step events are readable."""
        if wait and observer.marks is not None:
            import torch

            torch.cuda.synchronize()
        tools = observer.tools
        loaders = _with_lines(observer.loaders.evidence(), tools.stacks)
        modules = tools.found_calls(observer.optimizers)
        episodes = _episodes(observer, loaders)
        notes = observer.sequence.watching()
        steps = build_steps(observer.rows, watching_s=notes.seconds)  # the episodes told which are typical
        counterfactuals = _counterfactuals(observer, steps)
        evidence = Evidence(
            job=self._job(observer, ending),
            host=_host(),
            gpu=_gpu(observer),
            steps=steps,
            loaders=loaders,
            sites=tools.found_sites(),
            module_calls=modules,
            optimizers=tuple(describe(each, observer.made_at.get(each)) for each in observer.optimizers),
            **tools.evidence(),
            episodes=episodes,
            counterfactuals=counterfactuals,
            arms_not_run=observer.sequence.arms_not_run(
                (each.label for each in counterfactuals), job_ended=ending.is_its_own
            ),
            **observer.process.evidence(real_s=sum(row.host_s for row in observer.rows if row.arm == REAL)),
            roofline=_roofline(observer),
            precision=_precision(observer, [call.autocast for call in modules]),
            missing=tuple(_missing(observer, ending)),
        )
        evidence = replace(evidence, sources=observer.user_code.sources(_places(evidence)))
        return decode(Evidence, round_floats(encode(evidence)))

    def _job(self, observer: Observer, ending: Ending) -> ObservedJob:
        return ObservedJob(
            command=self.command,
            folder=Path(self.folder).name,
            started_at=self.started_at,
            ended=ending.ended,
            exit_code=ending.exit_code,
            error=ending.error,
            device=observer.device,
            device_name=_device_name() if observer.device == "cuda" else None,
            python=platform.python_version(),
            torch=importlib.metadata.version("torch"),  # a script that failed early has not imported it
            flatout=__version__,
            rank=read_launch().rank,
            world_size=read_launch().num_ranks,
            host=socket.gethostname(),
            node=read_launch().node,
            anchor=observer.anchor.name,
            warmup_reason=observer.warmup_reason,
            limit_s=observer.options.seconds if math.isfinite(observer.options.seconds) else None,
            framework=observer.framework,
        )


def _counterfactuals(observer: Observer, steps: tuple[Step, ...]) -> tuple[Counterfactual, ...]:
    found = []
    for arm in observer.sequence.arms.values():
        counts = arm.refusal is None and not arm.only_baseline and not arm.is_internal
        measured = observer.sequence.result_of(arm) if counts else None
        if measured is not None and measured.baseline == ONE_BATCH:
            measured = _with_waits(measured, steps)
        if measured is not None:
            found.append(replace(measured, **{name: getattr(arm, name) for name in OF_AN_ARM}))
    return tuple(found)


def _with_lines(loaders: tuple[Loader, ...], stacks: Stacks | None) -> tuple[Loader, ...]:
    """Add fetch lines from the training thread's own samples, if that process makes the batches itself."""
    trained = [loader for loader in loaders if loader.trains]
    if stacks is None or len(trained) != 1 or trained[0].num_workers:
        return loaders
    lines = fetch_lines(stacks, collate=trained[0].collate_place)
    return tuple(replace(each, lines=lines) if each is trained[0] else each for each in loaders)


def _episodes(observer: Observer, loaders: tuple[Loader, ...]) -> tuple[Episode, ...]:
    watch, rows = observer.stack_watch, observer.rows
    trained = [loader for loader in loaders if loader.trains and loader.num_batches]
    num_batches = sum(row.num_batches for row in rows if row.arm == "real" and not row.epoch_start)
    num_steps = sum(row.arm == "real" and not row.epoch_start for row in rows)
    steps_per_epoch = None
    if len(trained) == 1 and trained[0].num_batches and num_batches:
        steps_per_epoch = trained[0].num_batches * num_steps / num_batches
    return find_episodes(
        rows,
        watch.looks,
        stacks=observer.tools.stacks,
        loops=observer.user_code.loops_around,
        steps_per_epoch=steps_per_epoch,
        started_at_s=watch.started_at_s,
        has_loader=any(loader.trains for loader in loaders),
        seconds={step.index: step.step_s for step in build_steps(rows)} if observer.marks is not None else {},
    )


def _with_waits(found: Counterfactual, steps: tuple[Step, ...]) -> Counterfactual:
    """Convert a gain over steps on a single batch to a gain over real steps, which also wait for batches."""
    real = [step for step in steps if step.arm == REAL and step.kept]
    if not real:
        return found
    real_s = sum(step.step_s for step in real) / len(real)
    wait_s = min(real_s, sum(step.phases_s.get("wait", 0.0) for step in real) / len(real))

    def without(speedup: float) -> float:
        return wait_s + (real_s - wait_s) / speedup

    return replace(
        found,
        step_s=without(found.speedup),
        baseline_step_s=real_s,
        speedup=real_s / without(found.speedup),
        speedup_low=real_s / without(found.speedup_low),
        speedup_high=real_s / without(found.speedup_high),
    )


def _host() -> Host:
    from flatout.hardware.host import read_host

    facts = read_host()
    return Host(cores=facts.cores, memory_bytes=facts.memory_bytes, cpu_model=facts.cpu_model)


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def _gpu(observer: Observer) -> Gpu | None:
    if observer.device != "cuda":
        return None
    import torch

    from flatout.hardware.matching import find_datasheet

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    sheet = find_datasheet(properties.name, memory_bytes=int(properties.total_memory))
    return Gpu(
        name=properties.name,
        memory_bytes=int(properties.total_memory),
        compute_capability=f"{properties.major}.{properties.minor}",
        peak_flops=dict(sheet.peak_flops) if sheet is not None else {},
        bandwidth_bytes_per_s=sheet.bandwidth_bytes_per_s if sheet is not None else None,
    )


def _roofline(observer: Observer) -> Roofline | None:
    """Return what a step needs at this device's speeds; None if its arithmetic was not counted."""
    memory = observer.tools.memory
    if memory is None or memory.num_bytes is None or observer.device not in ("cpu", "cuda"):
        return None
    from flatout.measure.arms.knock_out.roofline import device_speeds

    compute_s = bytes_per_s = 0.0
    with observer.tools.guard("roofline"):
        speeds = {dtype: device_speeds(observer.device, dtype) for dtype in {*memory.flops_by_dtype, "fp32"}}
        known = {dtype: speed for dtype, speed in speeds.items() if speed is not None}
        compute_s = sum(
            flops / known.get(dtype, known["fp32"])[0] for dtype, flops in memory.flops_by_dtype.items()
        )
        bytes_per_s = known["fp32"][1]
    if not bytes_per_s:
        return None
    return Roofline(
        flops=sum(memory.flops_by_dtype.values()),
        num_bytes=memory.num_bytes,
        compute_s=compute_s,
        memory_s=memory.num_bytes / bytes_per_s,
    )


def _precision(observer: Observer, autocasts: list[str | None]) -> Precision:
    dtypes: set[str] = set()
    if observer.optimizer is not None:
        parameters: Iterable[Any] = (p for group in observer.optimizer.param_groups for p in group["params"])
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    tf32_matmul = bf16_supported = None
    if observer.device == "cuda":
        import torch

        tf32_matmul = torch.get_float32_matmul_precision() != "highest"
        bf16_supported = torch.cuda.is_bf16_supported(including_emulation=False)
    return Precision(
        parameter_dtypes=tuple(sorted(dtypes)),
        autocast=next((dtype for dtype in autocasts if dtype is not None), None),
        tf32_matmul=tf32_matmul,
        bf16_supported=bf16_supported,
        scales_loss=_scales_loss() if "float16" in autocasts else None,
    )


def _scales_loss() -> bool:
    """Return whether the job has an active gradient scaler."""
    import torch

    kinds = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
    return any(each.is_enabled() for each in live_objects(kinds))


def _missing(observer: Observer, ending: Ending) -> list[str]:
    missing = list(dict.fromkeys(observer.tools.missing))
    if observer.loaders.mutated:
        missing.append("cached batches: the script changes its batches in place, so some were fetched again")
    unwatched = None if observer.rows else describe_other_trainers(ended=not observer.out_of_time)
    if unwatched is not None:
        missing.append(unwatched)
    advice = f"; {MORE_STEPS}" if ending.is_its_own else ""
    sequence = observer.sequence
    if observer.warm_up is not None:
        missing.append(f"every pass after warm-up: the job ended before its steps were steady{advice}")
    elif sequence.rounds is None and sequence.blocks and not (observer.finished or observer.out_of_time):
        done, total = sequence.number, len(sequence.blocks)
        missing.append(f"the job ended after {done} of {total} planned blocks{advice}")
    set_up_s = observer.deadline.set_up_s
    if set_up_s > MOST_SET_UP * observer.options.seconds:
        missing.append(
            f"much of the time: imports and set-up took {show_seconds(set_up_s)} until the first step, "
            f"of --seconds {observer.options.seconds:.0f}"
        )
    if observer.out_of_time:
        missing.append("the remaining passes: the time was up (--seconds)")
    return missing


def _places(evidence: Evidence) -> list[Place | None]:
    places: list[Place | None] = [site.place for site in evidence.sites]
    places += [call.place for call in evidence.module_calls]
    places += [calls.place for calls in evidence.operator_calls]
    places += [calls.place for calls in evidence.inner_calls]
    places += [optimizer.place for optimizer in evidence.optimizers]
    if evidence.compilation is not None:
        places += [function.place for function in evidence.compilation.functions]
        places += [found.place for found in evidence.compilation.breaks]
    if evidence.garbage is not None:
        places.append(evidence.garbage.place)
    if evidence.threads is not None:
        places.append(evidence.threads.place)
    if evidence.training is not None:
        places.append(evidence.training.losses.place)
        places += [untrained.place for untrained in evidence.training.untrained]
        places += [schedule.place for schedule in evidence.training.schedules]
    for loader in evidence.loaders:
        places += [loader.place, loader.collate_place, *(call.place for call in loader.calls)]
    if evidence.stacks is not None:
        places += [place for path in evidence.stacks.paths[:MOST_SHOWN_PATHS] for place in path.places]
        places += _loop_headers(evidence.stacks)
    places += [place for episode in evidence.episodes for place in (episode.place, episode.inside)]
    if evidence.memory is not None:
        for growth in evidence.memory.growth:
            places += [growth.place, growth.holder_place]
        places += [graph.holder_place for graph in evidence.memory.graphs]
    for found in evidence.counterfactuals:
        places += _lines(found)
    return places


def _loop_headers(stacks: Stacks) -> list[Place | None]:
    """Return the first lines of the loops in which the training thread was found."""
    lines = {place: stacks.loops.get(str(place), ()) for path in stacks.paths for place in path.places}
    return [replace(place, line=line) for place, headers in lines.items() for line in headers]


def _lines(found: Counterfactual) -> list[Place | None]:
    """Return every line of an arm's block, as far as a page shows it."""
    place = found.place
    if place is None:
        return []
    last = min(found.last_line or place.line, place.line + MOST_SHOWN_LINES)
    return [replace(place, line=line) for line in range(place.line, last + 1)]
