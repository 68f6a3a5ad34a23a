"""The public names: the list is the namespace, and looking at it costs nothing."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import flatout
from flatout.ground.errors import FlatoutError


def test_the_public_names_are_these() -> None:
    assert set(flatout.__all__) == {
        "Decision",
        "Diagnosis",
        "Evidence",
        "Finding",
        "FlatoutError",
        "JobFit",
        "MemoryEstimate",
        "__version__",
        "adapt",
        "diagnose",
        "evolve",
        "fit",
        "load_evidence",
        "plan",
        "steer",
        "step",
        "watch",
    }
    assert dir(flatout) == sorted(flatout.__all__)


@pytest.mark.parametrize("name", flatout.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(flatout, name) is not None


def test_a_name_is_the_object_of_its_home() -> None:
    assert flatout.FlatoutError is FlatoutError


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'tune_everything'"):
        _ = flatout.tune_everything  # type: ignore[attr-defined]


def test_import_pulls_in_no_heavy_package() -> None:
    modules = "flatout, flatout.adapters, flatout.evolution, flatout.steering"
    code = f"import sys, {modules}; print(sorted({{'torch', 'numpy', 'rich', 'typer'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_version_is_that_of_the_distribution() -> None:
    assert flatout.__version__ == importlib.metadata.version("flatout")
