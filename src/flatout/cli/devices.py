"""`flatout devices`: the GPUs and the share of the host that a job may use.

Without a GPU it says why there is none and shows the host; that is an answer, so it ends with 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.cli import flags
from flatout.cli.output import facts_table, plain_console, plain_table, print_document
from flatout.ground.errors import BadInput
from flatout.ground.units import show, show_bytes, show_share

if TYPE_CHECKING:
    from rich.console import Console

    from flatout.hardware.datasheet import Datasheet
    from flatout.hardware.device import Device
    from flatout.hardware.host import HostFacts
    from flatout.hardware.snapshot import GpuSnapshot, Snapshot

MAX_PROCESSES = 10
WIDE = 100  # columns of a terminal with room for the PCIe link
WHOLE = "the machine"  # as HostFacts names a limit that is none


def devices(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help='A GPU that is not here: "A100-80GB", "RTX 4090", or its memory, "24GB".'
        ),
    ] = None,
    datasheet: Annotated[
        bool, typer.Option("--datasheet", "--all", help="List every GPU in the datasheets.")
    ] = False,
    json_output: flags.Json = False,
) -> None:
    """Show the GPUs and the share of the host that a job may use.

    \b
    Examples:
      flatout devices
      flatout devices "RTX 4090"
      flatout devices --datasheet
    """
    import flatout.api as api

    if name is not None and datasheet:
        raise BadInput("a device name and --datasheet exclude each other", hint="give one of them")
    if name is not None:
        device = api.simulated_device(name)
        if json_output:
            _print_document(devices=[device])
        else:
            _print_device(plain_console(), device)
    elif datasheet:
        rows = api.all_datasheets()
        if json_output:
            _print_document(datasheets=[_datasheet_document(row) for row in rows])
        else:
            _print_datasheets(plain_console(), rows)
    else:
        snapshot, host = api.read_machine()
        if json_output:
            _print_document(host=host, snapshot=snapshot, devices=snapshot.devices)
        else:
            _print_machine(plain_console(), snapshot=snapshot, host=host)


def _print_document(**asked: Any) -> None:
    """Print one JSON document, with the same keys for every question; what was not asked for is null."""
    parts = ("host", "snapshot", "devices", "datasheets")
    print_document("flatout-devices", **{part: asked.get(part) for part in parts})


def _datasheet_document(row: Datasheet) -> dict[str, Any]:
    from flatout.ground.codec import encode

    return {**encode(row), "memory_bytes": row.memory_bytes, "bf16": row.bf16}


def _print_machine(console: Console, *, snapshot: Snapshot, host: HostFacts) -> None:
    if snapshot.gpus:
        _print_gpus(console, snapshot)
    else:
        console.print(f"no GPU: {snapshot.why_no_gpu}")
    console.print()
    _print_host(console, host)


def _print_gpus(console: Console, snapshot: Snapshot) -> None:
    numbers = ("busy", "power", "SM clock", "temp")
    wide = console.width >= WIDE
    columns = ("#", "GPU", "memory used", *numbers, *(("PCIe",) if wide else ()))
    table = plain_table(*columns, right=numbers, whole=(*numbers, "memory used", "PCIe"))
    rows = [part for gpu in snapshot.gpus for part in (gpu, *gpu.instances)]
    for gpu in rows:
        table.add_row(*(cell for column, cell in _gpu_cells(gpu).items() if column in columns))
    console.print(table)
    console.print()
    _print_processes(console, rows)
    by_name = {device.name: device for device in snapshot.devices}
    for device in by_name.values():
        console.print(facts_table([(device.name, ""), *_peak_facts(device)]))
        console.print()
    versions = f"{show(snapshot.driver_version)}, CUDA up to {show(snapshot.cuda_version)}"
    reasons = {f"GPU {_number(gpu)}": gpu.missing for gpu in rows} | {"driver": snapshot.missing}
    held = [(gpu, gpu.throttle_reasons) for gpu in rows if gpu.throttle_reasons]
    facts = [("driver", versions)]
    facts += [("clocks held", f"GPU {_number(gpu)}: {', '.join(reasons)}") for gpu, reasons in held]
    facts += [("note", note) for note in snapshot.notes]
    console.print(facts_table(facts))
    _print_missing(console, reasons)


def _gpu_cells(gpu: GpuSnapshot) -> dict[str, str]:
    link = f"gen {show(gpu.pcie_generation)} x{show(gpu.pcie_width)}"
    return {
        "#": _number(gpu),
        "GPU": f"{show(gpu.name)}{' (lost)' if gpu.lost else ''}",
        "memory used": f"{show_bytes(gpu.memory_used_bytes)}/{show_bytes(gpu.memory_total_bytes)}",
        "busy": show_share(gpu.utilisation_share),
        "power": _pair(gpu.power_w, gpu.power_limit_w, unit="W"),
        "SM clock": _pair(gpu.sm_clock_hz, gpu.sm_clock_max_hz, unit="MHz", scale=1e-6),
        "temp": show(gpu.temperature_c, "{:.0f} °C"),
        "PCIe": link if gpu.pcie_width or gpu.pcie_generation else show(None),
    }


def _print_processes(console: Console, gpus: Sequence[GpuSnapshot]) -> None:
    found = [(gpu, process) for gpu in gpus for process in gpu.processes or ()]
    if not found:
        return
    found.sort(key=lambda pair: -(pair[1].used_bytes or 0))
    table = plain_table("#", "process", "name", "memory", "kind", right=("process", "memory"))
    for gpu, process in found[:MAX_PROCESSES]:
        table.add_row(
            _number(gpu), str(process.pid), show(process.name), show_bytes(process.used_bytes), process.kind
        )
    console.print(table)
    if len(found) > MAX_PROCESSES:
        console.print(f"and {len(found) - MAX_PROCESSES} more processes; --json lists all")
    console.print()


def _print_device(console: Console, device: Device) -> None:
    console.print(f"{device.name} (simulated)", style="bold")
    console.print(facts_table(_peak_facts(device)))
    if device.missing:
        _print_missing(console, {"": device.missing})


def _peak_facts(device: Device) -> list[tuple[str, str]]:
    peaks = ", ".join(f"{dtype} {_tera(rate)}" for dtype, rate in device.peak_flops.items())
    bandwidth = device.bandwidth_bytes_per_s
    facts = [
        ("  memory", show_bytes(device.memory_bytes)),
        ("  bandwidth", show(bandwidth and bandwidth / 1e9, "{:,.0f} GB/s")),
        ("  compute capability", show(device.compute_capability)),
        ("  bf16", {True: "yes", False: "no", None: show(None)}[device.bf16]),
        ("  dense peak, TFLOP/s", peaks or show(None)),
    ]
    return [*facts, ("  source", device.source)] if device.source else facts


def _print_datasheets(console: Console, rows: Sequence[Datasheet]) -> None:
    from flatout.hardware.datasheet import DTYPES

    table = plain_table("GPU", "cc", "memory", "GB/s", *DTYPES, right=("cc", "memory", "GB/s", *DTYPES))
    for row in rows:
        peaks = (row.peak_flops.get(dtype) for dtype in DTYPES)
        table.add_row(
            row.name + ("*" if row.half_rate_accumulate else ""),
            row.compute_capability or "-",
            show_bytes(row.memory_bytes),
            f"{row.bandwidth_bytes_per_s / 1e9:.0f}",
            *("-" if peak is None else _tera(peak) for peak in peaks),
        )
    console.print(table)
    console.print()
    console.print("Peaks are dense, in TFLOP/s (int8: TOP/s), with sums in fp32; --json names the sources.")
    console.print("* sums in fp32 at half the rate that the vendor advertises.")


def _print_host(console: Console, host: HostFacts) -> None:
    cores = show(host.cores, "{:g} usable")
    if host.cores_limited_by not in (None, WHOLE):
        cores += f" of {show(host.machine_cores)}, limited by {host.cores_limited_by}"
    memory = f"{show_bytes(host.memory_used_bytes)} of {show_bytes(host.memory_bytes)} used"
    if host.memory_limited_by not in (None, WHOLE):
        memory += f", limited by {host.memory_limited_by}"
        memory += f" (the machine has {show_bytes(host.machine_memory_bytes)})"
    shared = f"{show_bytes(host.shm_free_bytes)} of {show_bytes(host.shm_bytes)} free"
    facts = [
        ("host", show(host.cpu_model)),
        ("  cores", cores),
        ("  memory", memory),
        ("  /dev/shm", shared),
    ]
    console.print(facts_table(facts))
    _print_missing(console, {"host": host.missing})


def _print_missing(console: Console, reasons: dict[str, dict[str, str]]) -> None:
    """Say why values are n/a, in one line for all devices that lack the same fields for the same reason."""
    subjects: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for subject, missing in reasons.items():
        for reason in dict.fromkeys(missing.values()):
            fields = tuple(field for field in missing if missing[field] == reason)
            subjects.setdefault((reason, fields), []).append(subject)
    for (reason, fields), names in subjects.items():
        of = f"{', '.join(names)}: " if any(names) else ""
        console.print(f"n/a {of}{', '.join(fields)} ({reason})", style="dim")


def _number(gpu: GpuSnapshot) -> str:
    return str(gpu.index) if gpu.mig_index is None else f"{gpu.index}:{gpu.mig_index}"


def _pair(value: float | None, limit: float | None, *, unit: str, scale: float = 1.0) -> str:
    if value is None and limit is None:
        return show(None)
    shown = (show(None if each is None else each * scale, "{:.0f}") for each in (value, limit))
    return f"{'/'.join(shown)} {unit}"


def _tera(rate: float) -> str:
    value = rate / 1e12
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
