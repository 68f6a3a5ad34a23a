from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatout.measure.patches import Patches
from flatout.measure.process.redirect import redirect_torch, redirect_writes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder in which a script runs whose writes are redirected."""
    here = tmp_path / "project"
    (here / "earlier" / "run").mkdir(parents=True)
    (here / "earlier" / "run" / "result.txt").write_text("precious")
    (here / "log.txt").write_text("before\n")
    before = (here / "log.txt").stat()
    monkeypatch.chdir(here)
    patches = Patches()
    redirect_torch(patches, redirect_writes(patches, tmp_path / "scratch"))
    try:
        yield here
    finally:
        patches.undo()
    assert (here / "earlier" / "run" / "result.txt").read_text() == "precious"
    assert (here / "log.txt").stat() == before
    assert entries(here) == ["earlier", "log.txt"]


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder))


def test_files_of_the_user_stay_as_they_are_and_the_script_reads_its_own(folder: Path) -> None:
    with open("log.txt", "a") as file:
        file.write("added\n")
    assert Path("log.txt").read_text() == "before\nadded\n"
    os.makedirs("runs/a", exist_ok=True)
    os.makedirs("runs/a", exist_ok=True)
    assert os.path.isdir("runs/a")
    torch.save({"x": torch.ones(2)}, "runs/a/model.pt")
    assert torch.load("runs/a/model.pt", weights_only=True)["x"].tolist() == [1, 1]
    save_file({"x": torch.ones(2)}, "runs/a/model.safetensors")
    Path("runs/a/notes.md").write_text("words")
    os.replace("runs/a/notes.md", "runs/a/better.md")
    assert Path("runs/a/better.md").read_text() == "words"
    os.remove("log.txt")
    assert sorted(os.listdir("runs/a")) == ["better.md", "model.pt", "model.safetensors"]
    assert load_file(folder.parent / "scratch" / str(folder)[1:] / "runs/a/model.safetensors")[
        "x"
    ].tolist() == [1, 1]


def test_nothing_is_left_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "project"
    here.mkdir()
    (here / "log.txt").write_text("before\n")
    monkeypatch.chdir(here)
    patches = Patches()
    redirect_torch(patches, redirect_writes(patches, tmp_path / "scratch"))
    try:
        with open("log.txt", "a") as file:
            file.write("added")
        os.mkdir("new")
        torch.save(1, "model.pt")
        os.unlink("log.txt")
        with pytest.raises(FileNotFoundError):
            open("missing/file.txt", "w")  # noqa: SIM115
    finally:
        patches.undo()
    assert entries(here) == ["log.txt"]
    assert (here / "log.txt").read_text() == "before\n"


def test_the_temporary_folder_and_devices_are_written_as_they_are(folder: Path, tmp_path: Path) -> None:
    with open(os.devnull, "w") as file:
        file.write("x")
    other = tmp_path / "elsewhere.txt"
    other.write_text("temporary")
    assert other.name in entries(tmp_path)


def test_a_folder_that_the_script_removes_is_gone_for_the_script_alone(folder: Path) -> None:
    shutil.rmtree("earlier")
    assert not os.path.exists("earlier/run/result.txt") and not Path("earlier").is_dir()
    with pytest.raises(FileNotFoundError):
        open("earlier/model.pt", "w")  # noqa: SIM115
    os.makedirs("earlier/new")
    Path("earlier/new/model.pt").write_text("weights")
    assert entries(Path("earlier")) == ["new"]
    shutil.rmtree("earlier/new")  # a folder of its own
    assert entries(Path("earlier")) == []
    with pytest.raises(FileNotFoundError):
        shutil.rmtree("earlier/new")
    shutil.rmtree("earlier/new", ignore_errors=True)


def test_a_temporary_folder_is_removed_with_what_it_holds(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.makedirs(os.path.join(name, "a", "b"))
        Path(name, "a", "b", "source.cpp").write_text("int main() {}")
    assert not os.path.exists(name)


def test_copies_and_links_and_modes_are_made_in_the_scratch_folder(folder: Path) -> None:
    shutil.copy("log.txt", "copy.txt")
    shutil.copy2("log.txt", "same.txt")
    shutil.copytree("earlier", "later")
    assert Path("later/run/result.txt").read_text() == "precious"
    os.chmod("log.txt", 0o600)
    os.utime("log.txt", (1, 1))
    os.truncate("log.txt", 0)
    os.chmod("earlier", 0o700)
    os.symlink("copy.txt", "latest")
    os.symlink("earlier/run", "run")
    os.link("same.txt", "other.txt")
    assert Path("latest").read_text() == "before\n" == Path("other.txt").read_text()
    assert Path("run/result.txt").read_text() == "precious" and os.path.islink("latest")
    assert os.path.getsize("log.txt") == 0 and os.access("copy.txt", os.R_OK)
    found = ["copy.txt", "earlier", "later", "latest", "log.txt", "other.txt", "run", "same.txt"]
    assert sorted(os.listdir()) == found == sorted(glob.glob("*"))
    with os.scandir() as scan:
        assert sorted(entry.name for entry in scan) == found


def test_looks_at_files_cost_next_to_nothing_until_something_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some jobs look at files in every step: resolving links each time would make their steps slower."""
    real, resolved = os.path.realpath, 0

    def counted(path: str, *, strict: bool = False) -> str:
        nonlocal resolved
        resolved += 1
        return real(path, strict=strict)

    (folder.parent / "scratch").mkdir()
    monkeypatch.setattr(os.path, "realpath", counted)
    assert os.path.exists("log.txt") and os.stat("log.txt").st_size == 7 and not resolved
    os.utime(folder.parent / "scratch", (1, 1))  # long ago
    resolved = 0
    assert os.path.exists("log.txt") and os.path.exists("log.txt") and not resolved
    worker = os.fork()
    if not worker:
        Path("log.txt").write_text("of a worker")
        os._exit(0)
    os.waitpid(worker, 0)
    assert os.stat("log.txt").st_size == len("of a worker")
    resolved = 0
    assert os.stat("earlier/run/result.txt").st_size == len("precious") and resolved == 1


@pytest.mark.parametrize(
    ("variable", "inside"),
    [
        ("HOME", ".triton/cache"),
        ("TRITON_HOME", ".triton/cache"),
        ("TRITON_CACHE_DIR", ""),
        ("TORCHINDUCTOR_CACHE_DIR", ""),
        ("XDG_CACHE_HOME", "torch_extensions"),
        ("TORCH_EXTENSIONS_DIR", ""),
    ],
)
def test_compiled_code_is_written_where_the_linker_loads_it(
    variable: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "project"
    here.mkdir()
    monkeypatch.chdir(here)
    for each in ("TRITON_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(variable, str(here / "own"))
    library = here / "own" / inside / "kernels.so"
    patches = Patches()
    redirect_writes(patches, tmp_path / "scratch")
    try:
        os.makedirs(library.parent, exist_ok=True)
        library.with_suffix(".new").write_bytes(b"code")
        os.replace(library.with_suffix(".new"), library)
        (here / "own" / "notes.txt").touch()
    finally:
        patches.undo()
    assert library.read_bytes() == b"code"
    assert (here / "own" / "notes.txt").exists() == (not inside)  # what lies beside is redirected
