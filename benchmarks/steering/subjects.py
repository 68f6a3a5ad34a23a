"""Models to measure: a folder with real weights, or a published shape with random ones, and texts for them.

Speed depends on shapes and lengths, not on what a text says: texts are words drawn at random, of lengths that
differ as those of questions do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
TEXT = (
    "the river runs past an old mill and under three stone bridges while rain falls on many hills far away "
    "people ask what time it is when bread will rise who wrote this book why winter came early how much "
    "salt water needs before snow turns to ice and whether a train leaves from here every morning or not"
)
WORDS = TEXT.split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model that is measured, and what turns text into its tokens."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def num_layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @property
    def is_large(self) -> bool:
        """Whether one pass over its weights takes milliseconds on any device."""
        return bool(sum(one.numel() for one in self.model.parameters()) > 1e9)

    @property
    def width(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def open_subject(name: str, *, device: str) -> Subject:
    """A folder that `save_pretrained` wrote, or a shape; bfloat16 on a GPU, float32 elsewhere."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if name in SHAPES:
        return Subject(name=name, model=_random(SHAPES[name], device, dtype), tokenizer=_word_tokenizer())
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    model = model.eval().requires_grad_(False).to(device)
    return Subject(name=Path(name).resolve().name, model=model, tokenizer=tokenizer)


def _random(shape: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """Made where it will run and in the type it will run in: nothing is copied or converted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, max_position_embeddings=2048, tie_word_embeddings=False)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def _word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["[pad]", "[end]", *WORDS]))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[pad]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[pad]", eos_token="[end]")


def texts_of(count: int, *, longest: int, seed: int) -> list[str]:
    """Distinct texts of an eighth of `longest` words to `longest`, short ones more often than long ones."""
    drawn = random.Random(seed)
    least = max(2, longest // 8)
    made = []
    for _ in range(count):
        words = min(longest, max(least, round(drawn.lognormvariate(0.0, 0.6) * longest / 3)))
        made.append(" ".join(drawn.choices(WORDS, k=words)))
    return made


def prompts_of(subject: Subject, count: int, *, tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of exactly so many tokens."""
    texts = texts_of(count, longest=8 * tokens, seed=seed)
    rows = subject.tokenizer([f"{text} {text}" for text in texts], add_special_tokens=False)["input_ids"]
    return [tuple((row * (tokens // len(row) + 1))[:tokens]) for row in rows]
