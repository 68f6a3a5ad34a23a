"""Live GPU state through NVML, the library behind nvidia-smi.

`GpuReader` holds the connection; each `snapshot()` is a frozen picture of every GPU that CUDA would show to
this process.  NVML needs no CUDA context and takes no GPU memory, so watching a job costs it nothing.

Half of NVML's questions are refused somewhere: laptops have no power limit, containers hide processes, MIG
instances have no clocks, old drivers miss functions.  So every question is asked by itself, and a refusal
becomes None with NVML's own reason.  A GPU that falls off the bus while it is being read keeps what it had
said until then.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flatout.hardware.nvml_questions import INSTANCE_REASON, Questions, read_gpu_fields, reason_of, text_of
from flatout.hardware.snapshot import GpuSnapshot, Snapshot
from flatout.hardware.visible import VARIABLE, GpuIdentity, MigIdentity, Selection, select_visible

ORDER_VARIABLE = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A GPU whose identity alone was read; if it has no handle, `refusal` says why."""

    index: int
    handle: Any
    refusal: str | None
    lost: str | None
    identity: GpuIdentity
    mig_enabled: bool | None
    mig_handles: tuple[tuple[int, Any], ...] = ()


class GpuReader:
    """Reads the GPUs again and again; use it as a context manager, or call `close`."""

    def __init__(
        self,
        nvml: Any = None,
        *,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.nvml = nvml
        self._environ = environ
        self._clock = clock
        self._open = False
        self.refusal: str | None = None  # why there is nothing to read
        self._connect()

    def _connect(self) -> None:
        if self.nvml is None:
            try:
                self.nvml = importlib.import_module("pynvml")
            except ModuleNotFoundError:
                self.refusal = "the package nvidia-ml-py is not installed"
                return
        try:
            self.nvml.nvmlInit()
        except self.nvml.NVMLError as error:
            self.refusal = _why_not_connected(self.nvml, error)
        else:
            self._open = True

    def __enter__(self) -> GpuReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a snapshot taken afterwards says so."""
        if self._open:
            self._open = False
            self.refusal = "the reader was closed"
            try:
                self.nvml.nvmlShutdown()
            except self.nvml.NVMLError:
                return  # nothing is left to let go

    def snapshot(self, *, hidden: bool = False) -> Snapshot:
        """Read all visible GPUs; with `hidden`, also those that CUDA_VISIBLE_DEVICES hides."""
        taken_at_s = self._clock()
        if self.refusal is not None:
            reasons = dict.fromkeys(("gpus", "driver_version", "cuda_version"), self.refusal)
            return Snapshot(taken_at_s=taken_at_s, missing=reasons)
        system = Questions(self.nvml)
        driver = system.ask(("driver_version",), ("nvmlSystemGetDriverVersion",))
        cuda = system.ask(
            ("cuda_version",), ("nvmlSystemGetCudaDriverVersion_v2",), ("nvmlSystemGetCudaDriverVersion",)
        )
        num_gpus = system.ask(("gpus",), ("nvmlDeviceGetCount",))
        found = [_find(self.nvml, index) for index in range(num_gpus or 0)]
        value = self._environ.get(VARIABLE)
        selection = select_visible(value, gpus=[gpu.identity for gpu in found])
        gpus = tuple(
            gpu
            for one in found
            if (gpu := _read(self.nvml, one, selection=selection, hidden=hidden)) is not None
        )
        return Snapshot(
            taken_at_s=taken_at_s,
            gpus=gpus,
            driver_version=text_of(driver),
            cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            notes=_notes(gpus, selection=selection, environ=self._environ),
            missing=system.missing,
        )


def read_gpus() -> Snapshot:
    """Take one snapshot of this machine's GPUs."""
    with GpuReader() as reader:
        return reader.snapshot()


def _why_not_connected(nvml: Any, error: Exception) -> str:
    value = getattr(error, "value", None)
    if value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver: the NVML library is not on this machine"
    if value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "the NVIDIA driver is installed but not loaded"
    return f"NVML does not start: {reason_of(error)}"


def _find(nvml: Any, index: int) -> _Found:
    opening = Questions(nvml)
    handle = opening.ask(("handle",), ("nvmlDeviceGetHandleByIndex", index))
    if handle is None:
        return _Found(
            index=index,
            handle=None,
            refusal=opening.missing["handle"],
            lost=opening.lost,
            identity=GpuIdentity(uuid=None),
            mig_enabled=None,
        )
    questions = Questions(nvml, handle)
    uuid = text_of(questions.ask((), ("nvmlDeviceGetUUID",)))
    mode = questions.ask((), ("nvmlDeviceGetMigMode",))
    # A GPU that does not know MIG refuses the question, which is an answer.
    enabled = bool(mode[0]) if mode is not None else None if questions.lost else False
    handles = tuple(_mig_handles(questions)) if enabled else ()
    instances = tuple(_mig_identity(nvml, handle) for _, handle in handles)
    return _Found(
        index=index,
        handle=handle,
        refusal=None,
        lost=questions.lost,
        identity=GpuIdentity(uuid=uuid, instances=instances),
        mig_enabled=enabled,
        mig_handles=handles,
    )


def _mig_handles(questions: Questions) -> list[tuple[int, Any]]:
    num_slots = questions.ask((), ("nvmlDeviceGetMaxMigDeviceCount",)) or 0
    # Slots without an instance answer "not found".
    asked = ((n, questions.ask((), ("nvmlDeviceGetMigDeviceHandleByIndex", n))) for n in range(num_slots))
    return [(number, handle) for number, handle in asked if handle is not None]


def _mig_identity(nvml: Any, handle: Any) -> MigIdentity:
    questions = Questions(nvml, handle)
    return MigIdentity(
        uuid=text_of(questions.ask((), ("nvmlDeviceGetUUID",))),
        gpu_instance=questions.ask((), ("nvmlDeviceGetGpuInstanceId",)),
        compute_instance=questions.ask((), ("nvmlDeviceGetComputeInstanceId",)),
    )


def _read(nvml: Any, found: _Found, *, selection: Selection, hidden: bool) -> GpuSnapshot | None:
    """Read a selected GPU with the named MIG instances, or with all of them if none is named."""
    order = {(place.gpu, place.instance): number for number, place in enumerate(selection.devices)}
    named = {instance for gpu, instance in order if gpu == found.index and instance is not None}
    whole = (found.index, None) in order
    if not (whole or named or hidden):
        return None
    gpu = _read_whole(nvml, found)
    if not found.mig_enabled:
        cuda_index = order.get((found.index, None))
        missing = (
            gpu.missing if cuda_index is not None else gpu.missing | {"cuda_index": f"hidden by {VARIABLE}"}
        )
        return replace(gpu, cuda_index=cuda_index, missing=missing)
    instances = tuple(
        _read_instance(nvml, found, position, cuda_index=order.get((found.index, position)))
        for position in range(len(found.mig_handles))
        if whole or hidden or position in named
    )
    reason = "CUDA computes on the instances of a GPU in MIG mode, not on the GPU"
    return replace(gpu, instances=instances, missing=gpu.missing | {"cuda_index": reason})


def _read_whole(nvml: Any, found: _Found) -> GpuSnapshot:
    if found.handle is None:
        reasons = dict.fromkeys(("name", "uuid", "mig_enabled"), found.refusal or "no handle")
        return GpuSnapshot(
            index=found.index, name=None, uuid=None, lost=found.lost is not None, missing=reasons
        )
    questions = Questions(nvml, found.handle)
    questions.lost = found.lost
    fields = read_gpu_fields(questions)
    if found.mig_enabled is None:
        questions.missing["mig_enabled"] = questions.lost or "NVML did not report it"
    return GpuSnapshot(
        index=found.index,
        **fields,
        mig_enabled=found.mig_enabled,
        lost=questions.lost is not None,
        missing=questions.missing,
    )


def _read_instance(nvml: Any, found: _Found, position: int, *, cuda_index: int | None) -> GpuSnapshot:
    number, handle = found.mig_handles[position]
    questions = Questions(nvml, handle)
    fields = read_gpu_fields(questions, instance=True)
    if fields["name"] is not None and " MIG " not in fields["name"]:
        fields["name"] += f" MIG {number}"  # old drivers give an instance the name of its GPU
    if cuda_index is None:
        questions.missing["cuda_index"] = (
            f"a CUDA process uses one MIG instance; name its id in {VARIABLE} to choose which"
        )
    questions.missing["mig_enabled"] = INSTANCE_REASON
    return GpuSnapshot(
        index=found.index,
        **fields,
        mig_index=number,
        cuda_index=cuda_index,
        lost=questions.lost is not None,
        missing=questions.missing,
    )


def _notes(
    gpus: tuple[GpuSnapshot, ...], *, selection: Selection, environ: Mapping[str, str]
) -> tuple[str, ...]:
    notes = [selection.note] if selection.note else []
    kinds = {gpu.name for gpu in gpus}
    if len(kinds) > 1 and environ.get(ORDER_VARIABLE) != "PCI_BUS_ID":
        notes.append(
            f"the GPUs differ, and CUDA numbers the fastest first unless {ORDER_VARIABLE}=PCI_BUS_ID; "
            "the numbers here follow the PCI bus"
        )
    return tuple(notes)
