"""Evolution on a GPU: every way to run a step, a run whose memory runs out, and the verb end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatout.engines.evolution.training.records import read_log
from flatout.engines.evolution.training.trainer import evolve
from flatout.engines.evolution.verify import verify_evolution
from flatout.multiplex.decode import generator
from tests.support.evolution import tiny_settings
from tests.support.multiplex import FUSIBLE, SIZES, tiny_model

pytestmark = pytest.mark.gpu


def settings(folder: Path, *, family: str = "llama", **changes: Any) -> dict[str, Any]:
    tiny_model(family, **(SIZES if family in FUSIBLE else {})).save_pretrained(folder / "model")
    given = tiny_settings(folder / "model", folder / "run", device="cuda", dtype="float32", **changes)
    return {**given, "task_options": {"length": 6, "token_ids": True}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
def test_every_optimisation_holds(family: str, dtype: str, tmp_path: Path) -> None:
    found = verify_evolution({**settings(tmp_path, family=family, rank=2), "dtype": dtype})
    assert found.holds, found
    steps = {check.name for check in found.checks if check.name.startswith("steps")}
    wanted = {"steps: compiled", "steps: graph", "steps: fused"}
    assert steps == (wanted if family in FUSIBLE else wanted - {"steps: fused"})


def test_a_run_that_runs_out_of_memory_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(tmp_path)
    evolve(given)
    made, notes = generator.Generator.__init__, []

    def too_small(self: Any, *arguments: Any, **options: Any) -> None:
        if options["slots"] > 8:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")  # a petabyte
        made(self, *arguments, **options)

    monkeypatch.setattr(generator.Generator, "__init__", too_small)
    evolve({**given, "out": str(tmp_path / "less")}, on_progress=notes.append)
    assert any("out of memory with 16 rows" in note for note in notes)
    kept = [
        tmp_path / out / "checkpoints" / "epoch-000004" / "tensors.safetensors" for out in ("run", "less")
    ]
    one, other = map(load_file, kept)
    assert all(one[name].equal(other[name]) for name in one)


def test_step_sizes_change_without_another_capture(tmp_path: Path) -> None:
    """Sigma reaches a captured step through the rows' signs."""
    changes = {"sigma_schedule": "linear", "lr_schedule": "cosine", "epochs": 3}
    evolve(settings(tmp_path, **changes))
    assert [record.sigma for record in read_log(tmp_path / "run")[1:]] == pytest.approx([0.1, 0.07, 0.04])
