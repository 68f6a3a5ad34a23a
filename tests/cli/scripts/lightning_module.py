"""Lightning: every optimizer step gets a closure that holds forward and backward."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.work = torch.randn(256, 256)
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))

    def training_step(self, batch, _number):
        inputs, targets = batch
        for _ in range(4):
            self.work @ self.work  # of no model: neither forward nor optimizer
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
loader = DataLoader(TensorDataset(torch.randn(640, 64), torch.randn(640, 1)), batch_size=32)
trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=1000,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), loader)
