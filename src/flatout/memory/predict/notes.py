"""What an estimate rests on besides PyTorch's own rules, each as a sentence.

Most of a trace follows from shapes and from PyTorch's source.  The workspaces of cuDNN do not: they were
measured on one GPU with one release of cuDNN, and another may choose other kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from flatout.hardware.device import Device
from flatout.hardware.matching import all_datasheets
from flatout.memory.cuda.formulas import ASSUMED_MULTIPROCESSORS
from flatout.memory.trace.make_trace import multiprocessors_of
from flatout.memory.trace.record import Guess, Lean, Trace

MOST_NAMED = 3  # places of a guess
MEASURED_WITH = "cuDNN 9.19 on an H200"
CUDA_RULES = "the rules of CUDA and its libraries were used, which ROCm need not follow"
LEANS: dict[Lean, str] = {
    "convolutions": f"workspaces of convolutions: a table of {MEASURED_WITH}; for models that it was not "
    "made from, reserved bytes were up to 28 % too low",
    "recurrent layers": f"what recurrent layers allocate and keep: a table of {MEASURED_WITH}",
    "narrow recurrent layers": "stacks of recurrent layers whose input is narrower than their state "
    "are assumed to take what the table has for equal widths",
    "dropout of recurrent layers": "the state of their dropout is assumed to be 48 KiB for each "
    f"multiprocessor, as measured with {MEASURED_WITH}",
    "eager": "the model is compiled, and the estimate is for eager execution: of the "
    "compiled steps that were measured, most took less, down to half, and one took a seventh more",
}


def is_not_cuda(device: Device | None) -> bool:
    """Return whether the device is one of a vendor that has no CUDA."""
    name = None if device is None else device.datasheet
    return any(row.name == name and row.vendor != "NVIDIA" for row in all_datasheets())


def notes_of(trace: Trace, device: Device | None) -> tuple[str, ...]:
    """Return everything that an estimate from this trace leans on."""
    leaning = (LEANS[lean] for lean in trace.leans_on)
    return (*leaning, *notes_on_guesses(trace.guesses), *notes_on_device(device))


def notes_on_guesses(guesses: Collection[Guess]) -> Iterator[str]:
    """Yield one sentence for each answer that was given in place of data."""
    places: dict[str, dict[str, None]] = {}
    for guess in guesses:
        places.setdefault(guess.answer, {})[guess.module or guess.op] = None
    for answer, found in sorted(places.items()):
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        yield f"guessed, because it depends on data ({', '.join(sorted(found)[:MOST_NAMED])}{more}): {answer}"


def notes_on_device(device: Device | None) -> Iterator[str]:
    if device is None:
        return
    if is_not_cuda(device):
        yield f"{device.name}: {CUDA_RULES}"
    if multiprocessors_of(device) is None:
        yield (
            f"the number of multiprocessors of {device.name} is unknown; workspaces are assumed to be those "
            f"of {ASSUMED_MULTIPROCESSORS}"
        )
