"""The examples run, learn, and say of themselves what is true."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flatout.engines.adapters.settings import AdaptSettings, make_settings, read_settings
from flatout.engines.adapters.tasks.known import known_tasks
from tests.support.warm_python import warm

ROOT = Path(__file__).resolve().parents[2]
FOLDER, PAGE = ROOT / "examples" / "adapters", ROOT / "docs" / "adapters.md"
FIVE = {"sentiment", "qa", "summarisation", "code", "translation"}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_small_config_and_its_encoder_are_as_the_readme_says(tmp_path: Path) -> None:
    """What it learns is in docs/coverage.md, whose commands are tested."""
    done = warm().run("python", FOLDER / "tiny_encoder.py", tmp_path / "tiny", check=True)
    (num_weights,) = re.findall(r"an encoder of ([\d,]+) weights", done.stdout)
    assert 450_000 < int(num_weights.replace(",", "")) < 550_000  # half a million, as the README has it
    assert set(make_settings(read_settings(FOLDER / "generated.yaml")).tasks) == FIVE


def test_a_later_run_of_some_sizes_replaces_only_those_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    figures = importlib.import_module("adapters_figures")
    for date, times in {"2026-01-01": {64: 3.0, 256: 2.0}, "2026-01-02": {256: 4.0}}.items():
        sizes = [
            {"tokens": tokens, "of_base": {"fused": {"ratio": ratio, "low": ratio, "high": ratio}}}
            for tokens, ratio in times.items()
        ]
        found = {"hardware": "gpu", "shapes": [{"real_weights": True, "sizes": sizes}]}
        (tmp_path / f"adapters-minilm_gpu_{date}.json").write_text(json.dumps(found), encoding="utf-8")
    shown = [line.split("|")[1:3] for line in figures.speed(tmp_path).splitlines()[2:]]
    assert shown == [[" MiniLM, gpu, 64 ", " 3.0 [3.0, 3.0] "], [" MiniLM, gpu, 256 ", " 4.0 [4.0, 4.0] "]]


def test_the_real_config_names_what_the_scripts_make() -> None:
    config = make_settings(read_settings(FOLDER / "real.yaml"))
    assert set(config.tasks) == FIVE
    assert all(task.data["path"] == f".flatout/real-data/{name}" for name, task in config.tasks.items())
    assert config.model in (FOLDER / "real.yaml").read_text().partition("model:")[0]


@pytest.mark.timeout(600)
def test_a_step_fits_a_t4_that_is_not_here() -> None:
    """Traced at the sizes of the real config."""
    from transformers import BertConfig

    plan = example("plan_t4")
    config = make_settings(read_settings(FOLDER / "real.yaml"))
    minilm = BertConfig(
        vocab_size=30522,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        type_vocab_size=2,
    )
    estimate = plan.plan(config, minilm)
    assert 1e9 < estimate.process_bytes < 0.5 * 16e9
    assert f"{estimate.process_bytes / 2**30:.1f} GiB" in PAGE.read_text()


def test_every_file_is_in_the_readme() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".yaml")}
    assert len(files) == 5
    text = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in text for name in files)


def test_the_page_names_every_task_and_only_settings_that_exist() -> None:
    text = PAGE.read_text()
    assert all(f"`{name}`" in text for name in known_tasks())
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.M | re.S)
    config = _read(block)
    assert config.phase3.adapter_lr_share == 0.1 and config.tasks["qa"].rank == 24


def _read(text: str) -> AdaptSettings:
    from ruamel.yaml import YAML

    given: dict[str, Any] = YAML(typ="safe").load(text)
    return make_settings(given)
