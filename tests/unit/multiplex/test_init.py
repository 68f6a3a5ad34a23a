"""The public names of the room: the list is the namespace, and looking at it costs nothing."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

from flatout import multiplex
from flatout.multiplex.rows import Rows


def test_every_public_name_has_a_home_and_resolves() -> None:
    assert set(multiplex.__all__) == set(multiplex._HOMES)
    assert dir(multiplex) == sorted(multiplex.__all__)
    for name in multiplex.__all__:
        assert getattr(multiplex, name) is not None
    assert multiplex.Rows is Rows


def test_no_public_name_is_that_of_a_module() -> None:
    """Importing the module would put it in the name's place."""
    modules = {found.name for found in pkgutil.iter_modules(multiplex.__path__)}
    assert modules >= {home.partition(".")[0] for home in multiplex._HOMES.values()}
    assert not modules & set(multiplex.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Column'"):
        _ = multiplex.Column  # type: ignore[attr-defined]


def test_import_pulls_in_no_heavy_package() -> None:
    code = (
        "import sys; from flatout.multiplex import Request, Rows, Sampling;"
        "print(sorted({'torch', 'numpy', 'transformers', 'triton'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
