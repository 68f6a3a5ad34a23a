"""Train a small convnet on made-up images with crops, flips and colour changes."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--images", type=int, default=4096)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--mended", choices=["single-process-loading", "augmentation"])
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Augment:
    """Pad and crop, flip, jitter the brightness."""

    def __call__(self, image):
        padded = F.pad(image.unsqueeze(0), (4, 4, 4, 4), mode="reflect").squeeze(0)
        top, left = random.randint(0, 8), random.randint(0, 8)
        image = padded[:, top : top + 32, left : left + 32]
        if random.random() < 0.5:
            image = image.flip(-1)
        image = image * (0.8 + 0.4 * random.random())
        mean, std = image.mean(dim=(1, 2), keepdim=True), image.std(dim=(1, 2), keepdim=True)
        return (image - mean) / (std + 1e-5)


class Images(Dataset):
    def __init__(self, num_images, transform):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(num_images, 3, 32, 32, generator=generator)
        self.labels = torch.randint(0, 10, (num_images,), generator=generator)
        self.transform = transform
        if args.mended == "augmentation":  # once, before training
            self.images = torch.stack([transform(image) for image in self.images])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if args.mended != "augmentation":
            image = self.transform(image)
        return image, self.labels[index]


class ConvNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(w) for w in (width, 2 * width, 2 * width))
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.bn3(self.conv3(x)))
        return self.fc(x.mean(dim=(2, 3)))


def main():
    workers = 2 if args.mended == "single-process-loading" else 0
    loader = DataLoader(
        Images(args.images, Augment()),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    model = ConvNet(args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        model.train()
        running_loss, correct, total = 0.0, 0, 0
        for i, (inputs, targets) in enumerate(loader):
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()

            running_loss += loss.item()
            correct += (outputs.argmax(1) == targets).sum().item()
            total += targets.size(0)
            if i % 50 == 49:
                print(
                    f"epoch {epoch} step {i + 1}: loss {running_loss / (i + 1):.3f} acc {correct / total:.3f}"
                )


if __name__ == "__main__":
    main()
