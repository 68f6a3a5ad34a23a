"""Fine-tune a small BERT with the Trainer on made-up sentences padded to one length."""

import argparse
import random
import tempfile

import torch
from torch.utils.data import Dataset

try:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
except ImportError:
    raise SystemExit("skipped: this script needs transformers and accelerate") from None

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--max-length", type=int, default=64)
parser.add_argument("--mended", choices=["unbucketed-padding"])
args = parser.parse_args()


class Reviews(Dataset):
    def __init__(self, num):
        rng = random.Random(0)
        self.rows = []
        for _ in range(num):
            length = max(4, min(args.max_length, int(rng.lognormvariate(2.6, 0.5))))
            self.rows.append(([rng.randrange(5, 1000) for _ in range(length)], rng.randrange(2)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids, label = self.rows[index]
        if args.mended == "unbucketed-padding":
            return {"input_ids": ids, "labels": label}
        padding = args.max_length - len(ids)
        return {
            "input_ids": torch.tensor(ids + [0] * padding),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
            "labels": torch.tensor(label),
        }


def pad_to_longest(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[i, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}


def main():
    config = BertConfig(
        vocab_size=1000,
        hidden_size=args.dim,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        intermediate_size=4 * args.dim,
        max_position_embeddings=args.max_length,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch_size,
            num_train_epochs=100,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=BertForSequenceClassification(config),
            args=arguments,
            train_dataset=Reviews(4000),
            data_collator=pad_to_longest if args.mended == "unbucketed-padding" else None,
        )
        trainer.train()


if __name__ == "__main__":
    main()
