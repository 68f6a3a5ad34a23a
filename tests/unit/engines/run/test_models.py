"""A model is loaded whole and without a word, or one line says what is wrong; rows are decoded together."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import flatout
from flatout.engines.run.models import (
    FETCHED,
    SAFE,
    capability_of,
    check_folder,
    choose_dtype,
    decode_rows,
    find_left_out_layer,
    find_model,
    first_line,
    is_model_id,
    load_pretrained,
    open_tokenizer,
    quietly,
)
from flatout.ground.errors import BadInput
from flatout.hardware.matching import find_datasheet
from tests.support.evolution import save_tiny, tiny_llama
from tests.support.steering import tokenizer

ROWS = [(3, 4, 5), (7,), (), (9, 8)]


def loaded(folder: Path, **options: Any) -> Any:
    return load_pretrained("AutoModelForCausalLM", folder, what="model", extra="steering", **options)


def test_a_whole_folder_is_loaded_quietly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny(tmp_path / "model")
    capfd.readouterr()
    assert loaded(folder).config.num_hidden_layers == 1
    assert capfd.readouterr().err == ""


def test_weights_that_a_folder_lacks_are_not_drawn_at_random(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny(tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 2}))
    capfd.readouterr()
    with pytest.raises(BadInput, match=r"model lacks \d+ weights of its model, first model\.layers\.1"):
        loaded(folder)
    assert "MISSING" not in capfd.readouterr().err
    assert loaded(folder, unread="layers.1.") is not None


@pytest.mark.parametrize("num_layers", [1, 0, -1])
def test_a_config_with_fewer_layers_than_the_weights_is_refused(num_layers: int, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", layers=2)
    config = folder / "config.json"
    assert loaded(folder).config.num_hidden_layers == 2
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": num_layers}))
    first = max(num_layers, 0)
    with pytest.raises(BadInput, match=rf"has model\.layers\.{first}\..*json asks for {first} layers"):
        loaded(folder)


def test_weights_beside_the_layers_are_left_unread() -> None:
    model = tiny_llama()
    beside = ["score.weight", "model.layers.0.extra.weight", "vision.layers.3.weight", "heads.3.weight"]
    assert find_left_out_layer(model, beside) is None
    assert find_left_out_layer(model, [*beside, "model.layers.1.weight"]) == ("model.layers.1.weight", 1)
    assert find_left_out_layer(model.model, ["model.layers.7.weight"]) == ("model.layers.7.weight", 1)
    assert find_left_out_layer(model, ["layers.7.weight"]) == ("layers.7.weight", 1)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", b"", "holds no model that can be loaded: .*header too small"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "header too large"),
        ("config.json", {"hidden_size": 64}, r"model.*\[.*16.*\], and config.json asks for \[.*64.*\]"),
        ("config.json", {"hidden_size": "wide"}, "holds no model that can be loaded: .*hidden_size"),
        ("config.json", {"num_attention_heads": 0}, "holds no model that can be loaded: "),
    ],
)
def test_a_folder_that_is_cut_or_odd_is_named(
    file: str, content: bytes | dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = save_tiny(tmp_path / "model") / file
    if isinstance(content, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    else:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=said) as caught:
        loaded(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_a_folder_executes_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle is not read, and a Python file beside the weights is not imported."""
    pickled = save_tiny(tmp_path / "pickled")
    weights = {name: torch.zeros(1) for name in ("anything",)}
    torch.save(weights, pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"holds no model that can be loaded: .*safetensors"):
        loaded(pickled)
    remote = save_tiny(tmp_path / "remote")
    (remote / "custom.py").write_text("raise SystemExit('executed')")
    config = json.loads((remote / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {"AutoConfig": "custom.Config"}}
    (remote / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="holds no model that can be loaded"):
        loaded(remote)


def test_every_call_that_loads_a_model_says_so() -> None:
    """`from_pretrained` reads no pickle and runs no remote code anywhere, and `torch.load` is not called."""
    source = Path(flatout.__file__).parent
    calls = []
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = ast.unparse(node.func)
                assert not name.endswith(("torch.load", "pickle.load")), path
                if name.endswith(".from_pretrained"):
                    calls.append((path.name, ast.unparse(node)))
    assert {name for name, _ in calls} >= {"models.py", "from_huggingface.py"}
    for name, call in calls:
        assert "**SAFE" in call or "trust_remote_code=False" in call, (name, call)
        assert "Auto" in call or "use_safetensors=True" in call, (name, call)
    assert SAFE["trust_remote_code"] is False and SAFE["local_files_only"] is True


def test_what_is_no_model_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no model folder at .*--model"):
        check_folder(tmp_path / "absent")
    with pytest.raises(BadInput, match=r"has no config\.json"):
        check_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="holds no model that can be loaded: "):
        loaded(tmp_path)
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


def test_what_the_user_chose_of_bars_and_words_stays(tmp_path: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    with quietly(extra="steering"):
        assert logging.get_verbosity() == logging.ERROR
    assert logging.get_verbosity() == before


@pytest.mark.parametrize(("gpu", "expected"), [("T4", "float16"), ("H200", "bfloat16")])
def test_a_gpu_gets_what_its_cores_multiply(gpu: str, expected: str) -> None:
    sheet = find_datasheet(gpu)
    assert sheet is not None
    major, minor = map(int, sheet.compute_capability.split("."))
    chosen = choose_dtype("auto", capability=(major, minor))
    assert (chosen.value, chosen.source) == (expected, "datasheet")
    assert sheet.compute_capability in chosen.reason


def test_before_tensor_cores_and_on_a_cpu_it_is_float32() -> None:
    assert choose_dtype("auto", capability=(6, 1)).value == "float32"
    assert choose_dtype("auto", capability=capability_of(torch.device("cpu"))).value == "float32"


def test_a_dtype_that_is_given_is_taken() -> None:
    assert choose_dtype("bfloat16", capability=None).value == "bfloat16"
    assert choose_dtype("float32", capability=(9, 0)).reason == "as given"


def test_a_folder_without_a_tokenizer_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no tokenizer that can be read: .*save_pretrained") as raised:
        open_tokenizer(save_tiny(tmp_path / "model"), extra="steering")
    assert "\n" not in str(raised.value)


def test_a_folder_is_itself_and_no_question_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    for name in ("models/mine", "models/typo", str(tmp_path / "absent"), "../up/there", "plain"):
        assert not is_model_id(name) or Path(name).is_dir()
        assert find_model(name) == Path(name)


def test_an_id_is_fetched_without_anything_that_could_hold_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any]] = []

    def fetched(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert find_model("owner/some-model") == tmp_path
    assert asked == [("owner/some-model", FETCHED)]
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in FETCHED)


def test_without_a_network_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand more of it")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(BadInput, match=r"no model folder at owner/name, .*: no connection") as told:
        find_model(Path("owner/name"))
    assert "more of it" not in str(told.value)


def test_many_rows_are_decoded_as_each_alone() -> None:
    alone = [tokenizer().decode(list(row), skip_special_tokens=True) for row in ROWS]
    assert decode_rows(tokenizer(), ROWS, extra="steering") == alone
    assert decode_rows(tokenizer(), [], extra="steering") == []


def test_rows_are_not_decoded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("a row was decoded alone")

    plain = tokenizer()
    expected = decode_rows(plain, ROWS, extra="steering")
    for kind in type(plain).__mro__:
        if "decode" in vars(kind) and "_decode" in vars(kind):
            monkeypatch.setattr(kind, "_decode", refuse)
    assert decode_rows(plain, ROWS, extra="steering") == expected


def test_a_tokenizer_of_another_kind_is_asked_itself() -> None:
    class Shouting(type(tokenizer())):  # type: ignore[misc]
        def _decode(self, *given: object, **options: object) -> str:
            return str(super()._decode(*given, **options)).upper()

    loud = Shouting(tokenizer_object=tokenizer().backend_tokenizer, unk_token="w0")
    assert decode_rows(loud, ROWS[:2], extra="steering") == ["W3 W4 W5", "W7"]
