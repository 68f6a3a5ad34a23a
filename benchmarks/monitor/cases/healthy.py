"""A healthy run: a transformer large enough for its GPU, in bfloat16, fed in time."""

from __future__ import annotations

import torch
from common import DEVICE, for_seconds, seconds_to_train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 8192
WIDTH, LAYERS, TOKENS, ROWS = (2048, 8, 512, 32) if DEVICE == "cuda" else (64, 2, 32, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


def main() -> None:
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCABULARY, (4096, TOKENS))
    loader = DataLoader(
        TensorDataset(tokens),
        batch_size=ROWS,
        num_workers=2,
        persistent_workers=True,
        pin_memory=DEVICE == "cuda",
    )
    for (batch,) in for_seconds(loader, seconds_to_train()):
        batch = batch.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits = model(batch)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
