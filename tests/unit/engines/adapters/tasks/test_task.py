"""What every task promises, held for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatout.engines.adapters.tasks import (
    DataOptions,
    Example,
    Task,
    TaskBatch,
    encode_all,
    known_tasks,
    task_named,
)
from flatout.engines.adapters.tasks.decoder import Decoder
from flatout.engines.adapters.tasks.task import IGNORED, at_rest, tensor_on
from flatout.errors import BadInput
from tests.support.adapters import tiny_tokenizer

WIDTH = 16
NAMES = sorted(known_tasks())


def decoder(*, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer()
    embedding = torch.randn(len(tokenizer), WIDTH)
    made = Decoder(embedding, end_id=tokenizer.sep_token_id, pad_id=tokenizer.pad_token_id, dropout=0.0)
    return made.eval()


def head_of(task: Task, *, seed: int = 0) -> nn.Module:
    shared = decoder(seed=seed) if task.needs_decoder else None
    torch.manual_seed(seed)
    head = task.head(WIDTH, decoder=shared)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.5)
    return head.eval()


def rows_of(task: Task, count: int) -> tuple[list[dict[str, Any]], list[Example]]:
    records = task.generated(count, seed=1)
    examples, _ = encode_all(task, records, tiny_tokenizer(), max_length=400, training=True)
    assert len(examples) == count
    return records, examples


def states_of(batch: TaskBatch, *, seed: int = 0) -> Tensor:
    """States that depend on a row's own tokens only, as an encoder's do."""
    table = torch.randn(len(tiny_tokenizer()), WIDTH, generator=torch.Generator().manual_seed(seed))
    places = torch.randn(batch.block.length, WIDTH, generator=torch.Generator().manual_seed(seed + 1))
    return table[batch.block.ids] + places[: batch.block.length]


def padded(batch: TaskBatch) -> Tensor:
    """The same states with other numbers at every place that is padding."""
    states = states_of(batch)
    return torch.where(batch.block.mask()[..., None], states, torch.full_like(states, 7.0))


@pytest.mark.parametrize("name", NAMES)
def test_padding_rows_and_lengths_change_neither_loss_nor_predictions(name: str) -> None:
    task = task_named(name)
    head = head_of(task)
    records, examples = rows_of(task, 5)
    tight = task.collate(examples, adapter=2, pad_id=0)
    wide = task.collate(examples, adapter=2, pad_id=0, row_multiple=8, length_multiple=16)
    assert wide.block.num_rows == 8 and wide.block.length % 16 == 0
    assert wide.indices == tight.indices == list(range(5))
    assert wide.count == tight.count > 0
    loss = task.loss(head, states_of(tight), tight)
    torch.testing.assert_close(task.loss(head, padded(wide), wide), loss)
    said = task.predict(head, states_of(tight), tight, tokenizer=tiny_tokenizer(), records=records)
    assert task.predict(head, padded(wide), wide, tokenizer=tiny_tokenizer(), records=records) == said


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_mean_over_single_targets(name: str) -> None:
    task = task_named(name)
    head = head_of(task)
    _, examples = rows_of(task, 4)
    together = task.collate(examples, adapter=0, pad_id=0)
    singles = [task.collate([example], adapter=0, pad_id=0) for example in examples]
    losses = [task.loss(head, states_of(batch), batch) * batch.count for batch in singles]
    expected = torch.stack(losses).sum() / together.count
    torch.testing.assert_close(task.loss(head, states_of(together), together), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_targets_has_no_loss_and_no_gradient(name: str) -> None:
    task = task_named(name)
    head = head_of(task)
    asked = [
        {name: value for name, value in record.items() if name in task.inputs}
        for record in task.generated(3, seed=0)
    ]
    examples, left_out = encode_all(task, asked, tiny_tokenizer(), max_length=400, training=False)
    assert left_out == 0 and not any(example.trainable for example in examples)
    assert encode_all(task, asked, tiny_tokenizer(), max_length=400, training=True) == ([], 3)
    batch = task.collate(examples, adapter=0, pad_id=0)
    states = states_of(batch).requires_grad_()
    loss = task.loss(head, states, batch)
    loss.backward()
    assert loss == 0 and batch.count == 0
    assert states.grad is not None and not states.grad.any()
    said = task.predict(head, states, batch, tokenizer=tiny_tokenizer(), records=asked)
    assert all(isinstance(prediction.text, str) for prediction in said)


@pytest.mark.parametrize("name", NAMES)
def test_real_tokens_and_the_head_get_gradients_and_padding_gets_none(name: str) -> None:
    task = task_named(name)
    head = head_of(task)
    _, examples = rows_of(task, 6)
    batch = task.collate(examples, adapter=0, pad_id=0, row_multiple=8)
    states = states_of(batch).requires_grad_()
    task.loss(head, states, batch).backward()
    assert states.grad is not None
    touched = states.grad.abs().sum(2) > 0
    assert not touched[~batch.block.mask()].any() and not touched[6:].any()
    assert touched[:6].any(1).all()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_targets_go_by_rows_or_are_listed(name: str) -> None:
    """Rows can be picked on the device, and batches of one shape can share a recorded step."""
    task = task_named(name)
    _, examples = rows_of(task, 6)
    batch = task.collate(examples, adapter=0, pad_id=0, row_multiple=4)
    targets = dict(batch.targets)
    if "places" in targets:
        places, labels = targets.pop("places"), targets.pop("labels")
        real = labels != IGNORED
        assert torch.equal(targets["ids"].flatten()[places[real]], labels[real])
        assert real.sum() == batch.count == sum(example.num_targets for example in examples)
    else:
        first = next(iter(targets.values()))
        assert (first != IGNORED).sum() == batch.count
    assert all(len(values) == batch.block.num_rows == 8 for values in targets.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_head_is_called_once_for_all_rows_and_places(name: str) -> None:
    task = task_named(name)
    head = head_of(task)
    batch = task.collate(rows_of(task, 6)[1], adapter=0, pad_id=0)
    linears = [
        part
        for module in (head, getattr(head, "decoder", head))
        for part in module.modules()
        if isinstance(part, nn.Linear)
    ]
    calls: list[nn.Module] = []
    for linear in dict.fromkeys(linears):
        linear.register_forward_hook(lambda module, *_: calls.append(module))
    task.loss(head, states_of(batch), batch)
    assert calls and len(calls) == len(set(calls))


@pytest.mark.parametrize("name", NAMES)
def test_a_right_answer_gets_all_points_and_metric_is_a_score(name: str) -> None:
    from flatout.engines.adapters.tasks import Prediction

    task = task_named(name)
    records = task.generated(5, seed=0)
    right = [Prediction(text=record[task.answers[0]], num_correct=3, num_targets=3) for record in records]
    wrong = [Prediction(text="zzz", num_correct=0, num_targets=3) for _ in records]
    best, worst = task.score(right, records), task.score(wrong, records)
    assert task.metric in best and best.keys() == worst.keys() and len(best) >= 2
    assert all(value == pytest.approx(100) for value in best.values())
    assert all(value < 1 for value in worst.values())


@pytest.mark.parametrize("name", NAMES)
def test_generated_rows_are_the_same_for_the_same_seed(name: str) -> None:
    task = task_named(name)
    assert task.generated(9, seed=3) == task.generated(9, seed=3) != task.generated(9, seed=4)
    for record in task.generated(9, seed=3):
        assert task.record_of(record) == record
        assert set(task.record_of(record, answered=False)) == set(task.inputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_field_that_is_missing_is_named(name: str) -> None:
    task = task_named(name)
    (record,) = task.generated(1, seed=0)
    with pytest.raises(BadInput, match=f"'{task.inputs[0]}' is missing"):
        task.record_of({key: value for key, value in record.items() if key != task.inputs[0]})
    with pytest.raises(BadInput, match=task.answers[0]):
        task.record_of({key: value for key, value in record.items() if key in task.inputs})


def test_options_as_a_settings_file_gives_them() -> None:
    options = DataOptions.of({"path": "~/rows", "num_train": 5}, task="qa")
    assert options.path == Path("~/rows").expanduser() and options.num_train == 5
    for given, said in (
        ({"pth": "x"}, "did you mean path"),
        ({"path": 3}, "path=3 is no path"),
        ({"source": "web"}, "source='web'.*known: auto, generated"),
        ({"num_test": 0}, "num_test=0 is no number of rows"),
        ({"num_test": "9"}, "num_test='9' is no number of rows"),
        ({"test": "x.jsonl"}, "need a path to train on"),
    ):
        with pytest.raises(BadInput, match=said):
            DataOptions.of(given, task="qa")


def test_modules_at_rest_go_on_as_they_were() -> None:
    outer, inner = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), nn.Dropout()
    outer.train()
    outer[1].eval()
    inner.eval()
    with at_rest(outer, inner):
        assert not outer.training and not outer[0].training and not torch.is_grad_enabled()
    assert outer.training and outer[0].training and not outer[1].training and not inner.training
    assert torch.is_grad_enabled()


def test_arrays_keep_their_values_and_types() -> None:
    assert torch.equal(tensor_on(np.array([1, 2]), "cpu"), torch.tensor([1, 2]))
    assert tensor_on(np.array(2.5, dtype=np.float32), "cpu").dtype == torch.float32


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
    tasks = [task_named(name) for name in NAMES]
    heads = [head_of(task) for task in tasks]
    examples = [rows_of(task, 6)[1] for task in tasks]

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
    losses, gradients = trained(dict.fromkeys(range(5), first))
    assert all(gradient.any() for gradient in gradients)
    for own in range(5):
        others, other_gradients = trained({number: first if number == own else second for number in range(5)})
        torch.testing.assert_close(others[own], losses[own])
        torch.testing.assert_close(other_gradients[own], gradients[own], rtol=1e-4, atol=1e-6)
        assert not any(torch.allclose(others[number], losses[number]) for number in range(5) if number != own)
