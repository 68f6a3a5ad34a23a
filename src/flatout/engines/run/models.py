"""A model and its tokenizer from a folder as `save_pretrained` writes it: quietly, whole, in a fitting dtype.

transformers draws the weights that a folder lacks at random, and says so in a table among its log lines.
What runs on such a model looks like any other result, so it is refused here.

A dtype is chosen by what the device multiplies in hardware: bfloat16 from compute capability 8.0 on; float16
before (a T4 is 7.5); float32 on a CPU and on GPUs without tensor cores.

A folder executes no code: weights are read from safetensors files alone, and `trust_remote_code` is off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.engines.run.hub import HINT, find_model
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput, import_extra
from flatout.hardware.device import half_format

if TYPE_CHECKING:
    import torch

# Nothing in a folder is executed: no Python file beside the weights, and no pickle, which can hold any call.
SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
DType = Literal["float32", "bfloat16", "float16"]
DTypeOrAuto = Literal["auto", "float32", "bfloat16", "float16"]


def choose_dtype(wanted: DTypeOrAuto, *, capability: tuple[int, int] | None) -> Decision[DType]:
    """The dtype for a device; `capability` is that of a CUDA device, None elsewhere."""
    if wanted != "auto":
        return Decision(value=wanted, reason="as given", source="assumed")
    if capability is None:
        return Decision(value="float32", reason="a CPU gains nothing from fewer bits", source="assumed")
    name = f"compute capability {capability[0]}.{capability[1]}"
    form = half_format(f"{capability[0]}.{capability[1]}")
    if form is None:
        return Decision(value="float32", reason=f"{name} has no tensor cores", source="datasheet")
    more = " and has no bfloat16" if form == "float16" else ""
    return Decision(value=form, reason=f"{name} multiplies it in hardware{more}", source="datasheet")


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None for any other."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def check_folder(folder: Path) -> Path:
    """The folder of a model, or of the Hub's model with this id; what cannot be one is refused at once."""
    folder = find_model(folder)
    if not folder.is_dir():
        raise BadInput(f"no model folder at {folder}", hint=HINT)
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} has no config.json", hint=HINT)
    return folder


def load_pretrained(
    kind: str, folder: Path, *, what: str, extra: str, unread: str | None = None, **options: Any
) -> Any:
    """Load a frozen model by transformers' class `kind`, ready for inference; `what` names it to people.

    Weights whose names hold `unread` are read by nobody here, and may be missing.
    """
    folder = check_folder(folder)
    transformers = import_extra("transformers", extra=extra)
    try:
        with quietly(extra=extra):
            model, report = getattr(transformers, kind).from_pretrained(
                folder, **SAFE, use_safetensors=True, output_loading_info=True, **options
            )
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"{folder} holds no {what} that can be loaded: {first_line(error)}", hint=HINT
        ) from error
    missing = sorted(name for name in report["missing_keys"] if unread is None or unread not in name)
    if missing:
        raise BadInput(f"{folder} lacks {len(missing)} weights of its {what}, first {missing[0]}", hint=HINT)
    return model.requires_grad_(False).eval()


def open_tokenizer(folder: Path, *, extra: str) -> Any:
    """Load the tokenizer beside a model."""
    transformers = import_extra("transformers", extra=extra)
    try:
        return transformers.AutoTokenizer.from_pretrained(find_model(folder), **SAFE)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"{folder} has no tokenizer that can be read: {first_line(error)}",
            hint="save one there with tokenizer.save_pretrained",
        ) from error


def first_line(error: Exception) -> str:
    """Why, in one line."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__


@contextlib.contextmanager
def quietly(*, extra: str) -> Iterator[None]:
    """Keep transformers' bars and reports off stderr, and leave the user's choice as it was."""
    logging = import_extra("transformers.utils.logging", extra=extra)
    enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if enabled:
            logging.enable_progress_bar()
