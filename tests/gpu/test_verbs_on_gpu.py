"""The engines' verbs on a GPU, from the command line to their files, and generation beside `generate`.

`adapt` in float16 is in test_adapters_on_gpu, `plan --profile` in test_coverage_on_gpu.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.steering.report.record import load_record
from flatout.multiplex.decode.generator import generate
from flatout.multiplex.decode.steppers import Mode
from tests.support.evolution import save_tiny_texts
from tests.support.invoke import invoke
from tests.support.multiplex import prompts_of, reference_tokens, tiny_model
from tests.support.steering import write_tiny

pytestmark = pytest.mark.gpu

OTHERS = ("gemma", "gemma2", "gemma3", "gpt2", "gpt-neox", "gpt-neox-serial")  # have no hand-written step


def flatout(*arguments: object, exit_codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code in exit_codes, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("mode", ["auto", "graph", "eager"])
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_generate_what_transformers_does(family: str, mode: Mode) -> None:
    model = tiny_model(family).cuda()
    prompts = prompts_of((5, 9, 14, 3, 8))
    expected = [reference_tokens(model, prompt, max_new_tokens=20) for prompt in prompts]
    found = generate(model, prompts, max_new_tokens=20, slots=3, mode=mode)
    assert [tuple(one) for one in found] == expected


def test_evolve_trains_on_a_file_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "gpu_rewards.py").write_text(
        "def sevens(completions, **columns):\n    return [text.count('7') / 4 for text in completions]\n"
    )
    save_tiny_texts(tmp_path / "model")
    rows = [json.dumps({"prompt": f"{a}+{b}=", "total": a + b}) for a in range(12) for b in range(12)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    told = ("--task-option", "reward=gpu_rewards:sevens", "--task-option", "max_new_tokens=4")
    sizes = ("--population", 128, "--prompts", 4, "--sigma", 0.1, "--lr", 1.0, "--epochs", 30)
    run = ("evolve", "--model", "model", "--task", "sums.jsonl", *told, *sizes, "--out", "run")
    done = flatout(*run, "--device", "cuda")
    assert done["score"] > done["untrained_score"] + 0.2
    again = flatout("evolve", "run", "--resume", "--epochs", 31)
    assert again["last"]["epoch"] == 31 and again["last"]["plain_share"] > 0


def test_a_search_with_a_judge_finds_the_planted_direction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "gpu_judges.py").write_text(
        "def says_yes(question, text):\n    return text.split().count('yes') / max(1, len(text.split()))\n"
    )
    write_tiny(tmp_path / "tiny")
    told = ("--judge", "gpu_judges:says_yes", "--max-new-tokens", 4, "--strength", "0:1.5", "--trials", 16)
    given = ("--model", "tiny/model", "--questions", "tiny/questions.jsonl", "--out", "run")
    flatout("steer", "search", *given, *told, "--device", "cuda")
    record = load_record(tmp_path / "run")
    assert record.retest is not None and record.retest.difference.value > 0.2
    assert record.device != "CPU"


def test_plan_lets_the_gpu_choose_its_kernels(tmp_path: Path) -> None:
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(bert))
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True}
    (tmp_path / "args.json").write_text(json.dumps(arguments))
    found = flatout(
        *("plan", "show", tmp_path / "args.json", "--model", tmp_path, "--native"), exit_codes=(0, 1)
    )
    assert found["native"] is True
