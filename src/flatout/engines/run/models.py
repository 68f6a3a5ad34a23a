"""A model and its tokenizer, from a folder that `save_pretrained` wrote or from the Hugging Face Hub.

transformers draws the weights that a folder lacks at random, and leaves out layers that the config does not
count; it mentions both in a table among its log lines.  A run on such a model looks like any other, so such a
folder is refused here.

The dtype follows what the device multiplies in hardware: bfloat16 from compute capability 8.0 on; float16
before (a T4 is 7.5); float32 on a CPU and on GPUs without tensor cores.

A model executes no code: weights are read from safetensors files alone, and `trust_remote_code` is off.  The
Hub is asked for configs, tokenizers and safetensors files alone; they stay in its own cache.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput, import_extra
from flatout.hardware.device import half_format

if TYPE_CHECKING:
    import torch
    from torch import nn

# Execute nothing in a folder: no Python file beside the weights, and no pickle, which can hold any call.
SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
FETCHED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
HINT = "give --model a folder that save_pretrained wrote, or OWNER/NAME of a model on the Hugging Face Hub"
DType = Literal["float32", "bfloat16", "float16"]
DTypeOrAuto = Literal["auto", "float32", "bfloat16", "float16"]


def choose_dtype(wanted: DTypeOrAuto, *, capability: tuple[int, int] | None) -> Decision[DType]:
    """Choose the dtype for a device; `capability` is that of a CUDA device, None elsewhere."""
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
    """Return the compute capability of a CUDA device; None for any other."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def is_model_id(name: str) -> bool:
    """Return whether a name is written as OWNER/NAME and its first part is not a folder here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not Path(name).parent.is_dir()


def find_model(name: str | Path, *, extra: str = "evolution") -> Path:
    """Return the folder of a model: the folder of this name, or the Hub's, fetched if it is not here yet."""
    if Path(name).is_dir() or not is_model_id(str(name)):
        return Path(name)
    hub = import_extra("huggingface_hub", extra=extra)
    try:
        return Path(hub.snapshot_download(str(name), allow_patterns=FETCHED))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise BadInput(
            f"no model folder at {name}, and the Hugging Face Hub cannot provide one: {first_line(error)}",
            hint=HINT,
        ) from error


def check_folder(folder: Path) -> Path:
    """Return the folder of a model, or of the Hub's model with this id; refuse any other at once."""
    folder = find_model(folder)
    if not folder.is_dir():
        raise BadInput(f"no model folder at {folder}", hint=HINT)
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} has no config.json", hint=HINT)
    return folder


def load_pretrained(
    kind: str, folder: Path, *, what: str, extra: str, unread: str | None = None, **options: Any
) -> Any:
    """Load a frozen model by transformers' class `kind`, ready for inference; `what` is its name in errors.

    Weights whose names contain `unread` are not used and may be missing.
    """
    import torch

    folder = check_folder(folder)
    transformers = import_extra("transformers", extra=extra)
    try:
        with quietly(extra=extra):
            model, report = getattr(transformers, kind).from_pretrained(
                folder,
                **SAFE,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with their names
                **options,
            )
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a cut file or an odd config makes any line of a model's code raise
        raise BadInput(
            f"{folder} holds no {what} that can be loaded: {first_line(error)}", hint=HINT
        ) from error

    def is_read(name: str) -> bool:
        return unread is None or unread not in name

    if other_shapes := sorted(one for one in report["mismatched_keys"] if is_read(one[0])):
        name, kept, wanted = other_shapes[0]
        raise BadInput(
            f"{folder}: {name} is {list(kept)}, and config.json asks for {list(wanted)}",
            hint="take weights and config.json from one place",
        )
    missing = sorted(filter(is_read, report["missing_keys"]))
    if missing:
        raise BadInput(f"{folder} lacks {len(missing)} weights of its {what}, first {missing[0]}", hint=HINT)
    if left_out := find_left_out_layer(model, filter(is_read, report["unexpected_keys"])):
        name, num_layers = left_out
        raise BadInput(
            f"{folder} has {name}, and config.json asks for {num_layers} layers",
            hint="take weights and config.json from one place",
        )
    return model.requires_grad_(False).eval()


def find_left_out_layer(model: nn.Module, unexpected: Iterable[str]) -> tuple[str, int] | None:
    """Return the first weight of a layer past the end of the model's list of layers, and the list's length.

    Other weights that the model does not read, such as those of a head, do not count as layers.
    """
    import torch

    base = f"{getattr(model, 'base_model_prefix', '')}."  # a file may or may not write it before its names
    lengths = {
        name.removeprefix(base): len(module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
    }
    for name in sorted(unexpected):
        found = re.match(r"(.+?)\.(\d+)\.", name.removeprefix(base))
        if found and found[1] in lengths and int(found[2]) >= lengths[found[1]]:
            return name, lengths[found[1]]
    return None


def open_tokenizer(folder: Path, *, extra: str) -> Any:
    """Load the tokenizer of a model's folder."""
    transformers = import_extra("transformers", extra=extra)
    try:
        return transformers.AutoTokenizer.from_pretrained(find_model(folder), **SAFE)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"{folder} has no tokenizer that can be read: {first_line(error)}",
            hint="save one there with tokenizer.save_pretrained",
        ) from error


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer writes prompts in a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None


def write_chats(texts: Sequence[str], tokenizer: Any, *, system: str | None = None) -> list[str]:
    """Write each text as a user's turn in the tokenizer's chat template, in one call."""
    before = [] if system is None else [{"role": "system", "content": system}]
    messages = [[*before, {"role": "user", "content": text}] for text in texts]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def decode_rows(tokenizer: Any, rows: Sequence[Sequence[int]], *, extra: str) -> list[str]:
    """Return the text of each row without special tokens, in one call of the tokenizer.

    transformers decodes a batch in a loop over its rows; the library below a fast tokenizer decodes rows on
    all cores.  That library is called where the tokenizer adds nothing of its own to it.
    """
    numbers = [list(tokens) for tokens in rows]
    if not numbers:
        return []
    fast = import_extra("transformers", extra=extra).PreTrainedTokenizerFast
    kind = type(tokenizer)
    plain = all(getattr(kind, name, None) is getattr(fast, name) for name in ("decode", "_decode"))
    if not plain or tokenizer.clean_up_tokenization_spaces:
        return list(tokenizer.batch_decode(numbers, skip_special_tokens=True))
    return list(tokenizer.backend_tokenizer.decode_batch(numbers, skip_special_tokens=True))


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__


@contextlib.contextmanager
def quietly(*, extra: str) -> Iterator[None]:
    """Keep transformers' progress bars and reports off stderr, and restore the user's choice."""
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
