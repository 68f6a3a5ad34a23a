"""Convolutional models in plain PyTorch: ResNet-50 and (held out) U-Nets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.memory.configuration import Configuration, Subject, image_batch


class Bottleneck(nn.Module):
    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(num_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, num_out, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.body(images) + self.shortcut(images), inplace=True)


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, width_in = [], 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for position in range(depth):
                blocks.append(Bottleneck(width_in, width, stride if position == 0 else 1))
                width_in = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(2048, 1000)
        self.checkpointed = False

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.checkpointed = True

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class ResidualUnit(nn.Module):
    """Group norm, SiLU and convolution twice, with a shift from the time of the diffusion."""

    def __init__(self, num_in: int, num_out: int, time_width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, num_in), nn.SiLU(), nn.Conv2d(num_in, num_out, 3, padding=1)
        )
        self.shift = nn.Linear(time_width, num_out)
        self.second = nn.Sequential(
            nn.GroupNorm(8, num_out), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(num_out, num_out, 3, padding=1)
        )
        self.shortcut = nn.Conv2d(num_in, num_out, 1) if num_in != num_out else nn.Identity()

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(images) + self.shift(F.silu(time))[:, :, None, None]
        result: Tensor = self.second(hidden) + self.shortcut(images)
        return result


class SpatialAttention(nn.Module):
    def __init__(self, width: int, *, num_heads: int = 4) -> None:
        super().__init__()
        self.norm, self.num_heads = nn.GroupNorm(8, width), num_heads
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, images: Tensor) -> Tensor:
        batch, width, rows, columns = images.shape
        packed = self.qkv(self.norm(images)).reshape(
            batch, 3, self.num_heads, width // self.num_heads, rows * columns
        )
        query, key, value = packed.transpose(3, 4).unbind(1)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return images + self.out(mixed.transpose(2, 3).reshape(batch, width, rows, columns))


class DiffusionUNet(nn.Module):
    """Predicts the noise in an image: three scales, attention at the smallest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        time_width, widths = 4 * width, (width, 2 * width, 4 * width)
        self.time = nn.Sequential(nn.Linear(1, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.entry = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        num_in = width
        for num_out in widths:
            self.down.append(ResidualUnit(num_in, num_out, time_width))
            self.shrink.append(nn.Conv2d(num_out, num_out, 3, 2, 1))
            num_in = num_out
        self.middle = ResidualUnit(num_in, num_in, time_width)
        self.attention = SpatialAttention(num_in)
        self.up = nn.ModuleList()
        for num_out in reversed(widths):
            self.up.append(ResidualUnit(num_in + num_out, num_out, time_width))
            num_in = num_out
        self.exit = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        moment, hidden, skips = self.time(time[:, None]), self.entry(images), []
        for unit, shrink in zip(self.down, self.shrink, strict=True):
            hidden = unit(hidden, moment)
            skips.append(hidden)
            hidden = shrink(hidden)
        hidden = self.attention(self.middle(hidden, moment))
        for unit in self.up:
            hidden = F.interpolate(hidden, scale_factor=2.0, mode="nearest")
            hidden = unit(torch.cat([hidden, skips.pop()], dim=1), moment)
        result: Tensor = self.exit(hidden)
        return result


def _double(num_in: int, num_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (num_in, num_out):
        layers += [
            nn.Conv2d(width, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class SegmentationUNet(nn.Module):
    """The classic: four poolings, transposed convolutions on the way up, a class for every pixel."""

    def __init__(self, width: int, num_classes: int = 21) -> None:
        super().__init__()
        widths = [width * 2**scale for scale in range(5)]
        self.down = nn.ModuleList(
            [_double(num_in, num_out) for num_in, num_out in zip([3, *widths], widths, strict=False)]
        )
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(widths[scale + 1], widths[scale], 2, 2) for scale in reversed(range(4))]
        )
        self.up = nn.ModuleList([_double(2 * widths[scale], widths[scale]) for scale in reversed(range(4))])
        self.exit = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        hidden, skips = images, []
        for position, block in enumerate(self.down):
            hidden = block(hidden if position == 0 else F.max_pool2d(hidden, 2))
            skips.append(hidden)
        skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            hidden = block(torch.cat([skips.pop(), grow(hidden)], dim=1))
        logits: Tensor = self.exit(hidden)
        return logits


def _classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def _noisy(*, batch_size: int, image: int) -> dict[str, Tensor]:
    images = torch.randn(batch_size, 3, image, image)
    return {"images": images, "noise": torch.randn_like(images), "time": torch.rand(batch_size)}


def _denoise(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["images"] + batch["noise"], batch["time"]), batch["noise"])


def _pixels(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 3, image, image),
        "labels": torch.randint(0, 21, (batch_size, image, image)),
    }


def _segment(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def _channels_last_batch(*, batch_size: int, image: int) -> dict[str, Tensor]:
    batch = image_batch(batch_size=batch_size, image=image)
    batch["pixel_values"] = batch["pixel_values"].contiguous(memory_format=torch.channels_last)
    return batch


def _image(image: int) -> dict[str, int]:
    return {"image": image}


def _resnet() -> list[Configuration]:
    plain = Subject(
        family="resnet", name="resnet50", make_model=ResNet50, make_batch=image_batch, loss=_classify
    )
    last = Subject(
        family="resnet",
        name="resnet50-channels-last",
        make_model=lambda: ResNet50().to(memory_format=torch.channels_last),
        make_batch=_channels_last_batch,
        loss=_classify,
    )
    return [
        plain.at(64, sizes=_image(224), precision="fp32", optimizer="sgd-momentum", cap_gib=12),
        plain.at(128, sizes=_image(224), precision="bf16", cap_gib=16),
        plain.at(128, sizes=_image(224), precision="tf32", checkpointing=True, optimizer="sgd"),
        last.at(128, sizes=_image(224), precision="fp16", optimizer="sgd-momentum", cap_gib=8),
        last.at(256, sizes=_image(224), precision="bf16", mode="evaluate"),
    ]


def _u_net() -> list[Configuration]:
    diffusion = Subject(
        family="u-net",
        name="unet-diffusion",
        make_model=lambda: DiffusionUNet(128),
        make_batch=_noisy,
        loss=_denoise,
    )
    segmentation = Subject(
        family="u-net",
        name="unet-segmentation",
        make_model=lambda: SegmentationUNet(64),
        make_batch=_pixels,
        loss=_segment,
    )
    return [
        diffusion.at(32, sizes=_image(64), precision="fp32", clip_norm=1.0, cap_gib=8),
        diffusion.at(64, sizes=_image(64), precision="bf16", optimizer="adamw-fused"),
        segmentation.at(8, sizes=_image(256), precision="bf16", cap_gib=8),
        segmentation.at(4, sizes=_image(320), precision="tf32", optimizer="sgd-momentum"),
    ]


CONFIGURATIONS = [*_resnet(), *_u_net()]
