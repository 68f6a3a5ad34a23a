"""Write a small encoder with random weights and a tokenizer of its own, for runs of a minute on a CPU.

The tokenizer is trained on the rows that the tasks generate.  The encoder has the shape of MiniLM in small:
what it knows of language is nothing, and the adapters have all to do.

    python examples/adapters/tiny_encoder.py .flatout/tiny-encoder
"""

from __future__ import annotations

import argparse

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from flatout.adapters import known_tasks

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def texts(rows_per_task: int = 400) -> list[str]:
    """What the generated rows of every task say."""
    rows = [row for task in known_tasks().values() for row in task().generated(rows_per_task, seed=0)]
    return [value for row in rows for value in row.values() if isinstance(value, str)]


def tokenizer(vocabulary: int = 1000) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer as BERT's is built."""
    made = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk"]))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL.values()), show_progress=False
    )
    made.train_from_iterator(texts(), trainer)
    ends = [(SPECIAL[name], made.token_to_id(SPECIAL[name])) for name in ("sep", "cls")]
    made.post_processor = processors.BertProcessing(*ends)
    named = {f"{name}_token": token for name, token in SPECIAL.items()}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=256, **named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    torch.manual_seed(0)
    words = tokenizer()
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=given.width,
        intermediate_size=4 * given.width,
        num_hidden_layers=given.layers,
        num_attention_heads=max(1, given.width // 32),
        max_position_embeddings=256,
        initializer_range=0.08,
        pad_token_id=words.pad_token_id,
    )
    model = BertModel(config, add_pooling_layer=False)
    model.save_pretrained(given.folder)
    words.save_pretrained(given.folder)
    print(f"an encoder of {model.num_parameters():,} weights and {len(words)} tokens in {given.folder}")


if __name__ == "__main__":
    main()
