"""The Hugging Face Trainer with a tiny model made from a configuration, offline."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        ids = torch.arange(12).add(index).remainder(50)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": index % 2}


model = BertForSequenceClassification(
    BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=8,
    max_steps=100_000,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    logging_strategy="no",
)
Trainer(model=model, args=arguments, train_dataset=Sentences()).train()
