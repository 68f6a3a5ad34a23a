"""The public names of the room: the list is the namespace, and looking at it costs nothing."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

from flatout import multiplex
from flatout.multiplex.rows import Rows


def test_every_public_name_has_a_home_and_resolves() -> None:
    assert dir(multiplex) == sorted(multiplex.__all__) and len(multiplex.__all__) == 20
    for name in multiplex.__all__:
        assert getattr(multiplex, name) is not None
    assert multiplex.Rows is Rows


def test_no_public_name_is_that_of_a_module() -> None:
    """Importing the module would put it in the name's place."""
    modules = {found.name for found in pkgutil.iter_modules(multiplex.__path__)}
    assert modules and not modules & set(multiplex.__all__)


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


def test_triton_on_a_machine_without_a_gpu_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen by the device of the tensors, whatever is installed."""
    import torch

    from flatout.multiplex.decode import fused
    from flatout.multiplex.models.families import read_decoder
    from flatout.multiplex.noise import draws
    from flatout.multiplex.products import linear as operator
    from tests.support.multiplex import fusible_model

    factors = multiplex.Factors(torch.randn(2, 1, 8), torch.randn(2, 1, 4), 1.0)
    x, tables = torch.randn(3, 8), Rows((0, None, 1)).tables()
    found = []
    for installed in (True, False):
        for module in (fused, draws, operator):
            monkeypatch.setattr(module, "HAS_TRITON", installed)
        y = multiplex.linear(
            x,
            weight=torch.ones(4, 8),
            bias=None,
            shrink=factors.shrink,
            expand=factors.expand,
            index=tables.index,
            gain=tables.sign,
        )
        drawn = multiplex.normals(seed=1, epoch=0, parameter="w", side="full", pairs=range(2), count=5)
        chosen = multiplex.Generator(fusible_model(), slots=1, max_tokens=8).decision
        found.append((y, drawn, chosen, fused.why_not_here(read_decoder(fusible_model()))))
    (y, drawn, *said), (same_y, same_drawn, *same_said) = found
    assert torch.equal(y, same_y) and torch.equal(drawn, same_drawn) and said == same_said
    assert said[0].value == "eager" and said[1] == "the model is on cpu"
