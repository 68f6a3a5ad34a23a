"""What every task promises, held for all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatout.engines.adapters.tasks.known import known_tasks, task_named
from flatout.engines.adapters.tasks.task import AdapterTask, at_rest
from flatout.ground.errors import BadInput
from flatout.testing.adapter_tasks import (
    WIDTH,
    AdapterTaskContract,
    make_examples,
    make_head,
    tiny_tokenizer,
)

NAMES = sorted(known_tasks())


class TestSentiment(AdapterTaskContract):
    task = task_named("sentiment")


class TestQuestionAnswering(AdapterTaskContract):
    task = task_named("qa")


class TestSummarisation(AdapterTaskContract):
    task = task_named("summarisation")


class TestCodeGeneration(AdapterTaskContract):
    task = task_named("code")


class TestTranslation(AdapterTaskContract):
    task = task_named("translation")


class TestClassification(AdapterTaskContract):
    task = task_named("classification", labels=["food", "music", "sport"])


class TestRegression(AdapterTaskContract):
    task = task_named("regression", mean=2.5, deviation=1.7)


class TestSimilarity(AdapterTaskContract):
    task = task_named("similarity", mean=2.0, deviation=1.4)


HELD = [each for each in AdapterTaskContract.__subclasses__() if each.__module__ == __name__]


def test_every_known_task_is_held_to_the_contract() -> None:
    assert sorted(each.task.name for each in HELD) == NAMES and len(NAMES) == 8


@pytest.mark.parametrize("name", NAMES)
def test_there_is_a_score_beside_the_metric(name: str) -> None:
    from flatout.engines.adapters.tasks.task import Prediction

    task = task_named(name)
    (record,) = task.generated(1, seed=0)
    said = Prediction(text=str(record[task.answers[0]]), num_correct=3, num_targets=3)
    assert len(task.score([said], [record])) >= 2


def test_a_task_without_targets_and_without_its_own_encoding_says_so() -> None:
    with pytest.raises(BadInput, match="QuestionAnswering has neither targets_of nor encode"):
        AdapterTask.targets_of(task_named("qa"), {}, None)


def test_modules_at_rest_go_on_as_they_were() -> None:
    outer, inner = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), nn.Dropout()
    outer.train()
    outer[1].eval()
    inner.eval()
    with at_rest(outer, inner):
        assert not outer.training and not outer[0].training and not torch.is_grad_enabled()
    assert outer.training and outer[0].training and not outer[1].training and not inner.training
    assert torch.is_grad_enabled()


def test_rows_of_other_tasks_enter_neither_loss_nor_gradient() -> None:
    """All tasks in one pass of an encoder: other rows elsewhere change nothing here."""
    from transformers import BertConfig, BertModel

    from flatout.engines.adapters.lora.bank import AdapterBank, AdapterSpec
    from flatout.engines.adapters.lora.encoder import PackedEncoder

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = BertModel(config)
    bank = AdapterBank(model, [AdapterSpec(name=name, rank=2) for name in NAMES])
    torch.nn.init.normal_(bank.factors, std=0.1)
    tasks = sorted((each.task for each in HELD), key=lambda task: task.name)
    heads = [make_head(task) for task in tasks]
    examples = [make_examples(task, 6)[1] for task in tasks]

    def trained(chosen: dict[int, slice]) -> tuple[list[Tensor], Tensor]:
        batches = [
            task.collate(examples[number][chosen[number]], adapter=number, pad_id=0)
            for number, task in enumerate(tasks)
        ]
        bank.zero_gradients()
        with PackedEncoder(model, bank) as encoder:
            states = encoder(tuple(batch.block for batch in batches))
            losses = [
                task.loss(head, state, batch)
                for task, head, state, batch in zip(tasks, heads, states, batches, strict=True)
            ]
            torch.stack(losses).sum().backward()
        return losses, bank.gradients.clone()

    first, second = slice(0, 3), slice(3, 6)
    losses, gradients = trained(dict.fromkeys(range(len(NAMES)), first))
    assert all(gradient.any() for gradient in gradients)
    for own in range(len(NAMES)):
        others, other_gradients = trained(
            {number: first if number == own else second for number in range(len(NAMES))}
        )
        torch.testing.assert_close(others[own], losses[own])
        torch.testing.assert_close(other_gradients[own], gradients[own], rtol=1e-4, atol=1e-6)
        assert not any(
            torch.allclose(others[number], losses[number]) for number in range(len(NAMES)) if number != own
        )
