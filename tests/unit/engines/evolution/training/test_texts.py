"""Prompts in, completions out, and where a completion ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatout.engines.evolution.tasks import Prompt
from flatout.engines.evolution.training.models import open_tokenizer
from flatout.engines.evolution.training.texts import Texts
from flatout.errors import BadInput

WORDS = ["<end>", "<unk>", "one", "two", "\n", "two\n", "user:"]
TEMPLATE = "{% for message in messages %}user: {{ message['content'] }}{% endfor %}"


def tokenizer(*, chat: bool = False) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    words.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>")
    if chat:
        made.chat_template = TEMPLATE
    return made


def asked(text: str) -> Prompt:
    return Prompt(text=text, answer={}, key=text)


NUMBERS = Prompt(token_ids=(4, 5), answer={}, key="numbers")


def test_a_task_of_numbers_needs_no_tokenizer(tmp_path: Path) -> None:
    assert open_tokenizer(tmp_path, prompts=[NUMBERS]) is None
    texts = Texts(None, stop=("\n",), ends=(7,))
    assert texts.ids(NUMBERS) == (4, 5)
    assert texts.text((1, 2)) == "1 2"
    assert texts.ends == (7,)


def test_text_is_encoded_and_read(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    texts = Texts(open_tokenizer(tmp_path, prompts=[asked("one")]))
    assert texts.ids(asked("one two")) == (2, 3)
    assert texts.text((2, 3, 0)) == "onetwo"
    assert texts.ends == (0,)


def test_any_token_that_holds_a_stop_ends_a_row_and_the_text_is_cut_there() -> None:
    texts = Texts(tokenizer(), stop=("\n",), ends=(1,))
    assert texts.ends == (0, 1, 4, 5)
    assert texts.text((2, 5)) == "onetwo"
    assert texts.text((4, 2)) == ""


def test_a_chat_template_is_used_where_there_is_one() -> None:
    prompt = asked("two")
    assert Texts(tokenizer(chat=True)).ids(prompt) == (6, 3)
    assert Texts(tokenizer(chat=True), chat=False).ids(prompt) == (3,)
    assert Texts(tokenizer()).ids(prompt) == (3,)
    with pytest.raises(BadInput, match="no chat template"):
        Texts(tokenizer(), chat=True)
