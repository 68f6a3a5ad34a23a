"""A tokenizer of numbered words, and texts, for tiny models whose tokens mean nothing."""

from __future__ import annotations

from typing import Any

from tests.tiny_models import VOCABULARY


def word_tokenizer(*, side: str = "right", start: bool = False) -> Any:
    """Word "t07" is token 7; with `start` every text begins with "t01", as if it were a start token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i:02d}": i for i in range(VOCABULARY)}, unk_token="t02"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if start:
        words.post_processor = processors.TemplateProcessing(single="t01 $A", special_tokens=[("t01", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="t02",
        pad_token="t00",
        bos_token="t01" if start else None,
        padding_side=side,
    )


def text_of(tokens: Any) -> str:
    """The text that the tokenizer reads as these tokens."""
    return " ".join(f"t{token:02d}" for token in tokens)
