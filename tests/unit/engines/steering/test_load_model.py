"""A model folder is loaded whole, or refused by what it lacks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from transformers import AutoConfig

from flatout.engines.run import models as run_models
from flatout.engines.steering.extract.activations import extract
from flatout.engines.steering.load_model import check_model_folder, load_model
from flatout.engines.steering.trials.hooked_trials import HookedTrials
from flatout.engines.steering.trials.steering import Steering
from flatout.engines.steering.trials.trial_engine import TextRow
from flatout.engines.steering.workers.placement import GpuRoom, place_replicas
from flatout.ground.errors import BadInput
from tests.support.steering import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("steering")) / "model"


def test_a_folder_gives_a_model_that_runs(model: Path) -> None:
    loaded = load_model(model)
    assert next(loaded.model.parameters()).dtype == torch.float32
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer("is the sky blue ?")["input_ids"] == [5, 6, 10, 20, 2]
    half = load_model(model, dtype="bfloat16")
    assert next(half.model.parameters()).dtype == torch.bfloat16


def test_what_a_folder_lacks_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no model folder at"):
        check_model_folder(tmp_path / "absent")
    with pytest.raises(BadInput, match=r"no config\.json"):
        check_model_folder(tmp_path)
    without = tmp_path / "model"
    shutil.copytree(model, without)
    for path in without.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(BadInput, match=r"has no tokenizer .*save_pretrained"):
        load_model(without)


def test_a_folder_with_broken_weights_is_named(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    (broken / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(BadInput, match="no causal language model that can be loaded"):
        load_model(broken)


def test_a_model_too_large_for_one_gpu_lies_on_two_and_gives_the_same_numbers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs that are not there: what accelerate lays on the second one lies on the disk instead.

    The map is accelerate's own, made from the memory that we allow; its hooks move hidden states from one
    device's layers to the other's as they do between GPUs.
    """
    weights = sum(parameter.nbytes for parameter in load_model(model).model.parameters())
    rooms = [GpuRoom(name=str(index), free_bytes=int(1.2 * weights), index=index) for index in (0, 1)]
    placed = place_replicas(weights_bytes=weights, gpus=rooms).value
    assert placed.is_sharded and placed.replicas == (tuple(rooms),)
    maps: list[dict[str, int]] = []

    def on_fake_devices(kind: str, folder: Path, **options: Any) -> Any:
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        laid = accelerate.infer_auto_device_map(
            empty, max_memory=options.pop("max_memory"), no_split_module_classes=list(empty._no_split_modules)
        )
        maps.append(laid)
        places = {name: "cpu" if index == 0 else "disk" for name, index in laid.items()}
        options |= {"device_map": places, "offload_folder": str(tmp_path)}
        return load_pretrained(kind, folder, **options)

    load_pretrained = run_models.load_pretrained
    monkeypatch.setattr(run_models, "load_pretrained", on_fake_devices)
    monkeypatch.setattr(run_models, "capability_of", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (rooms[index].free_bytes, weights))
    sharded = load_model(model, gpus=placed.replicas[0], dtype="float32")
    monkeypatch.undo()

    (laid,) = maps
    assert set(laid.values()) == {0, 1}
    assert len({parameter.device for parameter in sharded.model.parameters()}) == 2
    whole = load_model(model, dtype="float32")
    texts = ["is the sky blue ?", "is grass green ?", "the sky"]
    found, expected = (extract(one.model, one.tokenizer, texts).values for one in (sharded, whole))
    assert torch.equal(found, expected)
    steering = Steering(layer=3, direction=torch.randn(expected.shape[2]), amount=3.0)
    rows = [TextRow(prompt=(5, 6, 10, 20, 2), steering=one) for one in (None, steering)]
    written = [HookedTrials(one.model).texts(rows, max_new_tokens=4) for one in (sharded, whole)]
    assert written[0] == written[1]
