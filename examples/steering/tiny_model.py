"""Write a tiny language model with random weights, a tokenizer of words, and questions to steer it by.

The model knows nothing, but its embedding is its output as well: the direction from "no" to "yes" in its
residual stream is one that a search can find, in seconds on a CPU.

    python examples/steering/tiny_model.py .flatout/tiny-steering
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SUBJECTS = ("sky", "sea", "grass", "snow", "night", "road", "house", "train", "river", "stone")
QUALITIES = ("blue", "green", "cold", "old", "long", "loud", "near", "deep")
WORDS = ("[pad]", "[end]", "?", "yes", "no", "is", "the", "perhaps", "certainly", "never")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    model = write_model(folder / "model")
    questions = write_questions(folder / "questions.jsonl")
    print(f"a model of {model.num_parameters()} weights and {questions} questions in {folder}")


def write_model(folder: Path) -> LlamaForCausalLM:
    vocabulary = {word: number for number, word in enumerate((*WORDS, *SUBJECTS, *QUALITIES))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[pad]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[pad]", eos_token="[end]")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def write_questions(path: Path) -> int:
    lines = [
        json.dumps({"prompt": f"is the {subject} {quality} ?", "positive": "yes", "negative": "no"})
        for subject, quality in itertools.product(SUBJECTS, QUALITIES)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    main()
