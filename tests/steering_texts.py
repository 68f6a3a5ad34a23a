"""A tokenizer of numbered words, and texts, for tiny models whose tokens mean nothing."""

from __future__ import annotations

from typing import Any

from tests.tiny_models import VOCABULARY


def word_tokenizer(*, side: str = "right", start: bool = False) -> Any:
    """Word "t7" is token 7; with `start` every text begins with "t1", as if it were a start token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if start:
        words.post_processor = processors.TemplateProcessing(single="t1 $A", special_tokens=[("t1", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="t2",
        pad_token="t0",
        bos_token="t1" if start else None,
        padding_side=side,
    )


def text_of(tokens: Any) -> str:
    """The text that the tokenizer reads as these tokens."""
    return " ".join(f"t{token}" for token in tokens)
