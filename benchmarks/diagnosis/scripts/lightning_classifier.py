"""Train a classifier with Lightning on made-up features, and log its metrics."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning
except ImportError:
    raise SystemExit("skipped: this script needs lightning") from None

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--hidden", type=int, default=512)
parser.add_argument("--classes", type=int, default=10)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--mended", choices=["metric"])
args = parser.parse_args()


def per_class_accuracy(predictions, targets, num_classes):
    """The accuracy of each class in the batch."""
    if args.mended == "metric":
        right = torch.bincount(targets[predictions == targets], minlength=num_classes)
        total = torch.bincount(targets, minlength=num_classes)
        return right / total.clamp(min=1)
    correct, total = [0] * num_classes, [0] * num_classes
    for prediction, target in zip(predictions, targets):
        total[target.item()] += 1
        if prediction.item() == target.item():
            correct[target.item()] += 1
    return torch.tensor([c / max(1, t) for c, t in zip(correct, total)])


class Classifier(lightning.LightningModule):
    def __init__(self, hidden, num_classes):
        super().__init__()
        self.num_classes = num_classes
        self.net = nn.Sequential(
            nn.Linear(128, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        accuracy = per_class_accuracy(logits.argmax(-1), y, self.num_classes)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", accuracy.mean(), prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    lightning.seed_everything(0)
    x, y = torch.randn(8192, 128), torch.randint(0, args.classes, (8192,))
    loader = DataLoader(TensorDataset(x, y), batch_size=args.batch_size, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(args.hidden, args.classes), loader)


if __name__ == "__main__":
    main()
