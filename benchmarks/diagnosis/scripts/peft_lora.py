"""Fine-tune a small Llama with LoRA on made-up conversations, and look at its token accuracy."""

import argparse
import random

import torch
from torch.utils.data import DataLoader, Dataset

try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup
except ImportError:
    raise SystemExit("skipped: this script needs peft and transformers") from None

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--max-length", type=int, default=48)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--mended", choices=["accuracy", "checkpointing", "no-mixed-precision"])
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, IGNORED = 1000, -100


class Conversations(Dataset):
    def __init__(self, num):
        rng = random.Random(0)
        self.rows = []
        for _ in range(num):
            prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(4, 12))]
            answer = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(8, args.max_length - len(prompt)))]
            self.rows.append((prompt, answer))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        prompt, answer = self.rows[index]
        ids = prompt + answer
        labels = [IGNORED] * len(prompt) + answer
        padding = args.max_length - len(ids)
        return {
            "input_ids": torch.tensor(ids + [0] * padding),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
            "labels": torch.tensor(labels + [IGNORED] * padding),
        }


def token_accuracy(logits, labels):
    predictions = logits.argmax(-1)
    if args.mended == "accuracy":
        counted = labels[:, 1:] != IGNORED
        return ((predictions[:, :-1] == labels[:, 1:]) & counted).sum() / counted.sum()
    right = total = 0
    for row_predictions, row_labels in zip(predictions, labels):
        for i in range(1, len(row_labels)):
            if row_labels[i] != IGNORED:
                total += 1
                right += int(row_predictions[i - 1] == row_labels[i])
    return right / max(1, total)


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=args.dim,
        intermediate_size=3 * args.dim,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        max_position_embeddings=args.max_length,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    if args.mended != "checkpointing":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).to(device)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    loader = DataLoader(Conversations(2000), batch_size=args.batch_size, shuffle=True, drop_last=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, args.epochs * len(loader))
    model.train()
    for epoch in range(args.epochs):
        total_loss = 0.0
        for step, batch in enumerate(loader):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=args.mended == "no-mixed-precision"):
                outputs = model(**batch)
            outputs.loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total_loss += outputs.loss.detach().float()
            accuracy = token_accuracy(outputs.logits, batch["labels"])
            if step % 20 == 0:
                print(
                    f"epoch {epoch} step {step} loss {total_loss / (step + 1):.3f} accuracy {float(accuracy):.3f}"
                )


if __name__ == "__main__":
    main()
