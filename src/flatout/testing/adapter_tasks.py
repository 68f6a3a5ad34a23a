"""The contract of an adapter task, as a test class.

    from flatout.testing.adapter_tasks import AdapterTaskContract
    from my_package.shout import Shout

    class TestShout(AdapterTaskContract):
        task = Shout()

pytest then holds the task to what the engine relies on: padding changes nothing, the loss is a mean over
single targets, rows without an answer teach nothing, shapes depend on padded sizes only.  States are made up,
so no encoder is needed; they depend on a row's own tokens only, as an encoder's do.
"""

from __future__ import annotations

import functools
import string
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flatout.engines.adapters.tasks.data_rows import Record
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.adapters.tasks.task import (
    IGNORED,
    AdapterTask,
    Example,
    Prediction,
    TaskBatch,
    encode_all,
)
from flatout.ground.errors import BadInput

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = [
    "the",
    "and",
    "return",
    "def",
    "is",
    "in",
    "of",
    "a",
    "lives",
    "keeps",
    "film",
    "story",
    "man",
    "sieht",
]
SIGNS = "¶»äöüß"
WIDTH = 16


@functools.cache
def tiny_tokenizer() -> Any:
    """Make a fast WordPiece tokenizer that can write any English text.

    The words above are one token, others are spelled; case and accents are lost, as in BERT's.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase + string.digits
    signs = string.punctuation + SIGNS
    vocabulary = [*SPECIAL, *WORDS, *letters, *(f"##{letter}" for letter in letters), *signs]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])],
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=512,
    )


def make_head(task: AdapterTask) -> nn.Module:
    """Make a head with random weights, on a decoder if the task writes text."""
    torch.manual_seed(0)
    tokenizer, decoder = tiny_tokenizer(), None
    if task.needs_decoder:
        words = torch.randn(len(tokenizer), WIDTH)
        decoder = TextDecoder(
            words, end_id=tokenizer.sep_token_id, pad_id=tokenizer.pad_token_id, dropout=0.0
        ).eval()
    torch.manual_seed(0)
    head = task.head(WIDTH, decoder=decoder)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.5)
    return head.eval()


def make_examples(task: AdapterTask, count: int) -> tuple[list[Record], list[Example]]:
    """Generate records, each with something to learn, and encode them."""
    records = task.generated(count, seed=1)
    examples, _ = encode_all(task, records, tiny_tokenizer(), max_length=400, training=True)
    assert len(examples) == count
    return records, examples


def make_states(batch: TaskBatch, *, at_padding: float | None = None) -> Tensor:
    """Make states that depend on a row's own tokens only; `at_padding` is what padding holds instead."""
    table = torch.randn(len(tiny_tokenizer()), WIDTH, generator=torch.Generator().manual_seed(0))
    places = torch.randn(batch.block.length, WIDTH, generator=torch.Generator().manual_seed(1))
    states = table[batch.block.ids] + places
    if at_padding is None:
        return states
    return torch.where(batch.block.mask()[..., None], states, torch.full_like(states, at_padding))


class AdapterTaskContract:
    """Subclass it as `Test...` and set `task`."""

    task: ClassVar[AdapterTask]

    def test_padding_changes_neither_loss_nor_predictions(self) -> None:
        task, head, tokenizer = self.task, make_head(self.task), tiny_tokenizer()
        records, examples = make_examples(task, 5)
        tight = task.collate(examples, adapter=2, pad_id=0)
        wide = task.collate(examples, adapter=2, pad_id=0, row_multiple=8, length_multiple=16)
        assert wide.block.num_rows == 8 and wide.block.length % 16 == 0
        assert wide.indices == tight.indices == list(range(5))
        assert wide.count == tight.count > 0
        other = make_states(wide, at_padding=7.0)
        torch.testing.assert_close(task.loss(head, other, wide), task.loss(head, make_states(tight), tight))
        said = task.predict(head, make_states(tight), tight, tokenizer=tokenizer, records=records)
        assert task.predict(head, other, wide, tokenizer=tokenizer, records=records) == said

    def test_the_loss_is_the_mean_over_single_targets(self) -> None:
        task, head = self.task, make_head(self.task)
        _, examples = make_examples(task, 4)
        together = task.collate(examples, adapter=0, pad_id=0)
        singles = [task.collate([example], adapter=0, pad_id=0) for example in examples]
        losses = [task.loss(head, make_states(batch), batch) * batch.count for batch in singles]
        expected = torch.stack(losses).sum() / together.count
        torch.testing.assert_close(task.loss(head, make_states(together), together), expected)

    def test_a_batch_without_targets_has_no_loss_and_no_gradient(self) -> None:
        task, head, tokenizer = self.task, make_head(self.task), tiny_tokenizer()
        asked = [{name: row[name] for name in task.inputs} for row in task.generated(3, seed=0)]
        examples, left_out = encode_all(task, asked, tokenizer, max_length=400, training=False)
        assert left_out == 0 and not any(example.trainable for example in examples)
        assert encode_all(task, asked, tokenizer, max_length=400, training=True) == ([], 3)
        batch = task.collate(examples, adapter=0, pad_id=0)
        states = make_states(batch).requires_grad_()
        loss = task.loss(head, states, batch)
        loss.backward()
        assert loss == 0 and batch.count == 0
        assert states.grad is not None and not states.grad.any()
        said = task.predict(head, states, batch, tokenizer=tokenizer, records=asked)
        assert all(isinstance(prediction.text, str) for prediction in said)

    def test_real_tokens_and_the_head_get_gradients_and_padding_gets_none(self) -> None:
        task, head = self.task, make_head(self.task)
        _, examples = make_examples(task, 6)
        batch = task.collate(examples, adapter=0, pad_id=0, row_multiple=8)
        states = make_states(batch).requires_grad_()
        task.loss(head, states, batch).backward()
        assert states.grad is not None
        touched = states.grad.abs().sum(2) > 0
        assert not touched[~batch.block.mask()].any() and not touched[6:].any()
        assert touched[:6].any(1).all()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())

    def test_targets_go_by_rows_or_are_listed(self) -> None:
        """Check that rows can be picked on the device, and that batches of one shape can share a step."""
        _, examples = make_examples(self.task, 6)
        batch = self.task.collate(examples, adapter=0, pad_id=0, row_multiple=4)
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

    def test_a_head_is_called_once_for_all_rows_and_places(self) -> None:
        task, head = self.task, make_head(self.task)
        batch = task.collate(make_examples(task, 6)[1], adapter=0, pad_id=0)
        parts = [*head.modules(), *getattr(head, "decoder", head).modules()]
        calls: list[nn.Module] = []
        for linear in dict.fromkeys(part for part in parts if isinstance(part, nn.Linear)):
            linear.register_forward_hook(lambda module, *_: calls.append(module))
        task.loss(head, make_states(batch), batch)
        assert calls and len(calls) == len(set(calls))

    def test_a_right_answer_gets_all_points_and_metric_is_a_score(self) -> None:
        task = self.task
        records = task.generated(5, seed=0)
        right = [Prediction(text=str(row[task.answers[0]]), num_correct=3, num_targets=3) for row in records]
        wrong = [Prediction(text="zzz", num_correct=0, num_targets=3) for _ in records]
        best, worst = task.score(right, records), task.score(wrong, records)
        assert task.metric in best and best.keys() == worst.keys()
        assert all(abs(value - 100) < 1e-4 for value in best.values())
        assert all(value < 1 for value in worst.values())

    def test_generated_rows_are_the_same_for_the_same_seed_and_can_be_read_back(self) -> None:
        task = self.task
        assert task.generated(9, seed=3) == task.generated(9, seed=3) != task.generated(9, seed=4)
        for record in task.generated(9, seed=3):
            assert task.record_of(record) == record
            assert set(task.record_of(record, answered=False)) == set(task.inputs)

    def test_a_field_that_is_missing_is_named(self) -> None:
        task = self.task
        (record,) = task.generated(1, seed=0)
        without_input = {key: value for key, value in record.items() if key != task.inputs[0]}
        assert f"'{task.inputs[0]}' is missing" in _refusal(task, without_input)
        without_answers = {key: value for key, value in record.items() if key in task.inputs}
        assert task.answers[0] in _refusal(task, without_answers)


def _refusal(task: AdapterTask, row: Record) -> str:
    try:
        task.record_of(row)
    except BadInput as error:
        return str(error)
    raise AssertionError(f"{task.name} takes {row}")
