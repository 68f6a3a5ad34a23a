"""A model by its id on the Hugging Face Hub: `HuggingFaceTB/SmolLM2-135M`.

What is fetched lies in the Hub's own cache and is fetched once; only configs, tokenizers and safetensors
files are: nothing that could hold code.
"""

from __future__ import annotations

import re
from pathlib import Path

from flatout.ground.errors import BadInput, import_extra

FETCHED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
HINT = "give --model a folder that save_pretrained wrote, or OWNER/NAME of a model on the Hugging Face Hub"


def is_model_id(name: str) -> bool:
    """Whether a name is written as OWNER/NAME and its first part is not a folder here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not Path(name).parent.is_dir()


def find_model(name: str | Path, *, extra: str = "evolution") -> Path:
    """The folder of a model: the one that is named, or the Hub's, fetched if it is not here yet."""
    if Path(name).is_dir() or not is_model_id(str(name)):
        return Path(name)
    hub = import_extra("huggingface_hub", extra=extra)
    try:
        return Path(hub.snapshot_download(str(name), allow_patterns=FETCHED))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise BadInput(
            f"no model folder at {name}, and the Hugging Face Hub cannot provide one: {reason}", hint=HINT
        ) from error
