"""Write a tiny language model with random weights, for runs of seconds on a CPU.

It has no tokenizer: digit-copy can ask in token numbers.

    python examples/evolution/tiny_model.py .flatout/tiny-model
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    folder = parser.parse_args().folder
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.15,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    print(f"a model of {model.num_parameters()} weights in {folder}")


if __name__ == "__main__":
    main()
