"""Finding patches for a job, several of them on one file, and their diff."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from flatout.doctor.finding import Finding, Sight
from flatout.measure.evidence import Place
from flatout.tuner.patches.patch import Patch, PatchSite, all_patches, find_sites, patched_texts, read_site
from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.treatment import Dose, treatment_of

LOOP = """import torch

def last(x, lengths):
    rows = []
    for i, n in enumerate(lengths):
        rows.append(x[i, n - 1])
    return torch.stack(rows)
"""


def compiled(text: str) -> ModuleType:
    module = ModuleType("patched")
    exec(compile(text, "patched.py", "exec"), vars(module))
    return module


def rewrite(patch: Patch, text: str, *lines: int) -> str:
    new = patch.rewrite(SourceFile(text), lines)
    ast.parse(new)
    assert new != text
    return new


def finding(file: str, line: int, code: str = "FO302") -> Finding:
    place = Place(file=file, line=line)
    return Finding(
        code=code, name="", place=None, message="", evidence=(), share=None, ceiling=None, fix="",
        safety="exact", also=(Sight(code=code, name="", place=place, share=None),),
    )  # fmt: skip


def test_patches_have_the_names_of_their_files_and_are_doses_like_treatments() -> None:
    assert all_patches()
    for name, each in all_patches().items():
        assert name == each.name and each.safety in ("exact", "reordered") and each.summary
        assert each.rewrite.__module__.rpartition(".")[2] == name.replace("-", "_")
        assert treatment_of(Dose(name=name, value="x.py")).safety == each.safety


def test_a_site_is_written_and_read() -> None:
    for site in (PatchSite(patch="p", file="a/b.py", lines=(3, 9)), PatchSite(patch="p", file="a.py")):
        assert read_site("p", str(site)) == site


def test_sites_are_where_a_finding_is_that_a_patch_answers(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LOOP)
    can, cannot = find_sites(["model.py", "gone.py"], [finding("model.py", 6)], folder=tmp_path)
    assert "rows-at-once" in {site.patch for site in can} and {site.lines for site in can} == {(6,)}
    reasons = {site.patch: reason for site, reason in cannot}
    assert "for each sample" in reasons["one-gather"]
    assert find_sites(["model.py"], [], folder=tmp_path) == ([], [])


def test_patches_of_one_file_find_their_lines_after_each_other(tmp_path: Path) -> None:
    two = LOOP + LOOP.replace("import torch\n", "").replace("def last", "def again")
    (tmp_path / "model.py").write_text(two)
    first, second = (PatchSite(patch="rows-at-once", file="model.py", lines=(line,)) for line in (6, 12))
    ((_, both),) = patched_texts([first, second], folder=tmp_path).values()
    assert "for i, n" in both and ".append" not in both
    with pytest.raises(Refused, match="replaced these lines"):
        patched_texts([first, first], folder=tmp_path)
