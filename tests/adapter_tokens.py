"""A tiny fast WordPiece tokenizer that can write any English text, made in code."""

from __future__ import annotations

import functools
import string
from typing import Any

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = (
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
)
SIGNS = "¶»äöüß"


@functools.cache
def tiny_tokenizer(*, max_length: int = 512) -> Any:
    """Words above are one token, other words are spelled; case and accents are lost, as in BERT's."""
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=max_length,
    )
