"""Third unseen set, images: joined features, hourglasses, flows, critics, warps, kernels made on the spot."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject


def _images(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 3, image, image),
        "labels": torch.randint(0, 200, (batch_size,)),
    }


def _class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], label_smoothing=0.1)


def _channels_last_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    images = batch["images"].contiguous(memory_format=torch.channels_last)
    return F.cross_entropy(model(images), batch["labels"])


class Joining(nn.Module):
    """Each layer reads everything before it, joined along the channels."""

    def __init__(self, *, growth: int = 24, blocks: tuple[int, ...] = (6, 8, 8)) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 2 * growth, 7, 2, 3, bias=False)
        channels, self.blocks, self.less = 2 * growth, nn.ModuleList(), nn.ModuleList()
        for count in blocks:
            layers = nn.ModuleList()
            for _ in range(count):
                layers.append(
                    nn.Sequential(
                        *(
                            nn.BatchNorm2d(channels),
                            nn.ReLU(),
                            nn.Conv2d(channels, 4 * growth, 1, bias=False),
                        ),
                        *(nn.BatchNorm2d(4 * growth), nn.ReLU()),
                        nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
                    )
                )
                channels += growth
            self.blocks.append(layers)
            self.less.append(
                nn.Sequential(
                    nn.BatchNorm2d(channels), nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)
                )
            )
            channels //= 2
        self.head = nn.Linear(channels, 200)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.enter(x), 3, 2, 1)
        for layers, less in zip(self.blocks, self.less, strict=True):
            for layer in layers:  # type: ignore[attr-defined]
                x = torch.cat([x, layer(x)], dim=1)
            x = less(x)
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


class Bottleneck(nn.Module):
    def __init__(self, width: int, *, squeeze: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(width, width // 2, 1), nn.BatchNorm2d(width // 2), nn.ReLU()),
            *(nn.Conv2d(width // 2, width // 2, 3, padding=1), nn.BatchNorm2d(width // 2), nn.ReLU()),
            *(nn.Conv2d(width // 2, width, 1), nn.BatchNorm2d(width)),
        )
        self.gate = (
            nn.Sequential(
                nn.Linear(width, width // 16), nn.ReLU(), nn.Linear(width // 16, width), nn.Sigmoid()
            )
            if squeeze
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        inside = self.layers(x)
        if self.gate is not None:
            inside = inside * self.gate(inside.mean(dim=(2, 3)))[..., None, None]
        return F.relu(x + inside)


class Hourglass(nn.Module):
    """Down and up again, twice, with a heat map of joints after each."""

    def __init__(self, width: int = 128, *, depth: int = 3, stacks: int = 2, joints: int = 16) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3), nn.BatchNorm2d(width), nn.ReLU(), Bottleneck(width)
        )
        self.side, self.down, self.up = (
            nn.ModuleList(nn.ModuleList(Bottleneck(width) for _ in range(depth)) for _ in range(stacks))
            for _ in range(3)
        )
        self.maps = nn.ModuleList(nn.Conv2d(width, joints, 1) for _ in range(stacks))
        self.back = nn.ModuleList(nn.Conv2d(joints, width, 1) for _ in range(stacks))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, found = self.enter(x), []
        for side, down, up, heat, back in zip(
            self.side, self.down, self.up, self.maps, self.back, strict=True
        ):
            kept, inside = [], x
            for keep, lower in zip(side, down, strict=True):  # type: ignore[call-overload]
                kept.append(keep(inside))
                inside = lower(F.max_pool2d(inside, 2))
            for upper in up:  # type: ignore[attr-defined]
                inside = F.interpolate(upper(inside), scale_factor=2.0, mode="nearest") + kept.pop()
            found.append(heat(inside))
            x = x + inside + back(found[-1])
        return found


def _joints(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 3, image, image),
        "heat": torch.rand(batch_size, 16, image // 2, image // 2),
    }


def _heat_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = [F.mse_loss(found, batch["heat"]) for found in model(batch["images"])]
    return torch.stack(losses).sum()


class Squeezed(nn.Module):
    """Bottlenecks whose channels are weighed, channels last."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, width, 4, 4)]
        for at in range(3):
            stages += [Bottleneck(width * 2**at, squeeze=True) for _ in range(3)]
            stages += [
                nn.Conv2d(width * 2**at, width * 2 ** (at + 1), 3, 2, 1),
                nn.BatchNorm2d(width * 2 ** (at + 1)),
            ]
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(8 * width, 200)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.stages(x).mean(dim=(2, 3)))
        return scores


class MadeKernels(nn.Module):
    """A kernel for each place, made from that place, shared by the channels of a group."""

    def __init__(self, width: int, *, side: int = 5, group: int = 16) -> None:
        super().__init__()
        self.side, self.num_groups = side, width // group
        self.make = nn.Sequential(
            *(nn.Conv2d(width, width // 4, 1), nn.BatchNorm2d(width // 4), nn.ReLU()),
            nn.Conv2d(width // 4, side * side * self.num_groups, 1),
        )
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, high, wide = x.shape
        kernels = self.make(x).view(batch, self.num_groups, 1, self.side**2, high, wide)
        around = F.unfold(x, self.side, padding=self.side // 2)
        around = around.view(batch, self.num_groups, width // self.num_groups, self.side**2, high, wide)
        return x + F.relu(self.norm((kernels * around).sum(dim=3).view(batch, width, high, wide)))


class Involved(nn.Module):
    def __init__(self, width: int = 64, num_layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.layers = nn.Sequential(*(MadeKernels(width) for _ in range(num_layers)))
        self.head = nn.Linear(width, 200)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.enter(x)).mean(dim=(2, 3)))
        return scores


class Coupling(nn.Module):
    """Half of the channels scales and shifts the other half; a matrix mixes them before."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(channels) + 0.01 * torch.randn(channels, channels))
        self.net = nn.Sequential(
            *(nn.Conv2d(channels // 2, width, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, channels, 3, padding=1)),
        )

    def forward(self, x: Tensor, density: Tensor) -> tuple[Tensor, Tensor]:
        x = F.conv2d(x, self.mix[..., None, None])
        first, second = x.chunk(2, dim=1)
        shift, scale = self.net(first).chunk(2, dim=1)
        scale = torch.sigmoid(scale + 2)
        volume = torch.linalg.slogdet(self.mix.float())[1] * x.shape[2] * x.shape[3]
        density = density + scale.float().log().sum(dim=(1, 2, 3)) + volume
        return torch.cat([first, (second + shift) * scale], dim=1), density


class Flow(nn.Module):
    def __init__(self, *, width: int = 256, steps: int = 8, levels: int = 2) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            nn.ModuleList(Coupling(12 * 2**at, width) for _ in range(steps)) for at in range(levels)
        )

    def forward(self, x: Tensor) -> Tensor:
        density = torch.zeros(x.shape[0], device=x.device)
        for level in self.levels:
            x = F.pixel_unshuffle(x, 2)
            for step in level:  # type: ignore[attr-defined]
                x, density = step(x, density)
            x, aside = x.chunk(2, dim=1)
            density = density - 0.5 * aside.float().square().sum(dim=(1, 2, 3))
        density = density - 0.5 * x.float().square().sum(dim=(1, 2, 3))
        return -density.mean()


def _flow_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["images"])
    return loss


class Critic(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for at in range(4):
            wide = min(width * 2**at, 512)
            layers += [nn.LeakyReLU(0.2), nn.Conv2d(wide, min(2 * wide, 512), 4, 2, 1)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(512, 1)

    def forward(self, x: Tensor) -> Tensor:
        score: Tensor = self.head(self.layers(x).mean(dim=(2, 3)))
        return score


def _two_images(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {name: torch.randn(batch_size, 3, image, image) for name in ("real", "made")}


def _penalised_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A critic whose slope between real and made images is held near one: a gradient of a gradient."""
    real, made = batch["real"], batch["made"]
    share = torch.rand(real.shape[0], 1, 1, 1, device=real.device)
    between = (share * real + (1 - share) * made).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return model(made).mean() - model(real).mean() + 10 * penalty


class Sharper(nn.Module):
    """Residual blocks without norms at a low resolution, then pixels are shuffled into more of them."""

    def __init__(self, width: int = 96, num_blocks: int = 12) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
            )
            for _ in range(num_blocks)
        )
        self.grow = nn.Sequential(
            *(nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2)),
            *(nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2)),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.enter(x)
        for block in self.blocks:
            x = x + 0.1 * block(x)
        found: Tensor = self.grow(x + first)
        return found


def _sharp_images(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "small": torch.rand(batch_size, 3, image, image),
        "large": torch.rand(batch_size, 3, 4 * image, 4 * image),
    }


def _sharp_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.l1_loss(model(batch["small"]), batch["large"])


class Warped(nn.Module):
    """Two images, the motion between them at every pixel, and one image warped onto the other."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        sizes = [6, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, 2, 1), nn.InstanceNorm2d(b), nn.ELU(), nn.Conv2d(b, b, 3, 1, 1), nn.ELU()
            )
            for a, b in pairwise(sizes)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(a + b, b, 3, 1, 1) for a, b in ((4 * width, 2 * width), (2 * width, width))
        )
        self.flow = nn.Conv2d(width, 2, 3, 1, 1)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x, kept = torch.cat([first, second], dim=1), []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        kept.pop()
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = F.elu(layer(torch.cat([x, kept.pop()], dim=1)))
        flow = F.interpolate(
            self.flow(x).float(), size=first.shape[-2:], mode="bilinear", align_corners=False
        )
        theta = torch.eye(2, 3, device=first.device).expand(first.shape[0], 2, 3)
        grid = F.affine_grid(theta, list(first.shape), align_corners=False) + flow.permute(0, 2, 3, 1)
        return F.grid_sample(first, grid, padding_mode="border", align_corners=False), flow


def _warp_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found, flow = model(batch["real"], batch["made"])
    smooth = (flow[..., 1:] - flow[..., :-1]).abs().mean() + (flow[:, :, 1:] - flow[:, :, :-1]).abs().mean()
    return torch.sqrt((found - batch["made"]).square() + 1e-6).mean() + 0.1 * smooth


class Slots(nn.Module):
    """A few slots compete for the places of an image in several rounds, each updated by a recurrent cell."""

    def __init__(self, width: int = 64, *, num_slots: int = 7, rounds: int = 3) -> None:
        super().__init__()
        self.num_slots, self.rounds, self.width = num_slots, rounds, width
        self.see = nn.Sequential(
            *(nn.Conv2d(3, width, 5, padding=2), nn.ReLU(), nn.Conv2d(width, width, 5, padding=2), nn.ReLU()),
            nn.Conv2d(width, width, 5, padding=2),
        )
        self.norm, self.of_slots = nn.LayerNorm(width), nn.LayerNorm(width)
        self.key, self.value, self.query = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.cell, self.start = nn.GRUCell(width, width), nn.Parameter(torch.randn(num_slots, width))
        self.draw = nn.Sequential(
            *(nn.ConvTranspose2d(width, width, 5, 2, 2, output_padding=1), nn.ReLU()),
            *(nn.ConvTranspose2d(width, width, 5, 2, 2, output_padding=1), nn.ReLU()),
            nn.ConvTranspose2d(width, 4, 3, padding=1),
        )

    def forward(self, images: Tensor) -> Tensor:
        batch, _, side, _ = images.shape
        x = self.norm(self.see(images).flatten(2).transpose(1, 2))
        key, value = self.key(x), self.value(x)
        slots = self.start.expand(batch, -1, -1)
        for _ in range(self.rounds):
            query = self.query(self.of_slots(slots))
            weights = (key @ query.transpose(1, 2) / math.sqrt(self.width)).softmax(dim=-1) + 1e-8
            weights = weights / weights.sum(dim=1, keepdim=True)
            news = weights.transpose(1, 2) @ value
            slots = self.cell(news.flatten(0, 1), slots.flatten(0, 1)).view(batch, self.num_slots, -1)
        drawn = slots.flatten(0, 1)[..., None, None].expand(-1, -1, side // 4, side // 4)
        drawn = self.draw(drawn).view(batch, self.num_slots, 4, side, side)
        return (drawn[:, :, :3] * drawn[:, :, 3:].softmax(dim=1)).sum(dim=1)


def _same_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["images"]), batch["images"])


class Agreement(nn.Module):
    """Small groups of units vote for larger ones; votes that agree count more in the next round."""

    def __init__(self, *, num_out: int = 32, rounds: int = 3) -> None:
        super().__init__()
        self.rounds = rounds
        self.enter = nn.Sequential(nn.Conv2d(3, 128, 9), nn.ReLU(), nn.Conv2d(128, 256, 9, 2))
        self.vote = nn.Parameter(0.01 * torch.randn(32 * 8 * 8, num_out, 16, 8))
        self.head = nn.Linear(num_out * 16, 200)

    def forward(self, x: Tensor) -> Tensor:
        low = _squash(self.enter(x).view(x.shape[0], 8, -1).transpose(1, 2))
        votes = torch.einsum("iodk,bik->biod", self.vote, low)
        agreed = torch.zeros(votes.shape[:3], device=x.device)
        high = votes.mean(dim=1)
        for at in range(self.rounds):
            high = _squash((agreed.softmax(dim=2)[..., None] * votes).sum(dim=1))
            if at < self.rounds - 1:
                agreed = agreed + (votes * high[:, None]).sum(dim=-1)
        scores: Tensor = self.head(high.flatten(1))
        return scores


def _squash(x: Tensor) -> Tensor:
    size = x.square().sum(dim=-1, keepdim=True)
    return size / (1 + size) * x / torch.sqrt(size + 1e-8)


class Twins(nn.Module):
    """A network that predicts what a slowly moving copy of it says of another view."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.online, self.slow = self._network(width), self._network(width)
        self.slow.requires_grad_(False)
        self.predict = nn.Sequential(
            nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 256)
        )

    @staticmethod
    def _network(width: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1)]
        for at in range(3):
            layers += [
                Bottleneck(width * 2**at),
                nn.Conv2d(width * 2**at, width * 2 ** (at + 1), 3, 2, 1),
                nn.ReLU(),
            ]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 256))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
            aims = [self.slow(view) for view in (second, first)]
        said = [self.predict(self.online(view)) for view in (first, second)]
        alike = [F.cosine_similarity(a.float(), b.float()).mean() for a, b in zip(said, aims, strict=True)]
        return 2 - torch.stack(alike).sum()


def _twin_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["real"], batch["made"])
    return loss


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


JOINING = _subject("joined-features", Joining, _images, _class_loss)
HOURGLASS = _subject("hourglass", Hourglass, _joints, _heat_loss)
SQUEEZED = _subject("squeezed", Squeezed, _images, _channels_last_loss)
INVOLVED = _subject("made-kernels", Involved, _images, _class_loss)
FLOW = _subject("flow", Flow, _images, _flow_loss)
CRITIC = _subject("critic", Critic, _two_images, _penalised_loss)
SHARPER = _subject("sharper", Sharper, _sharp_images, _sharp_loss)
WARPED = _subject("warped", Warped, _two_images, _warp_loss)
SLOTS = _subject("slots", Slots, _images, _same_loss)
AGREEMENT = _subject("agreement", Agreement, _images, _class_loss)
TWINS = _subject("twins", Twins, _two_images, _twin_loss)

CONFIGURATIONS: list[Configuration] = [
    JOINING.at(64, sizes={"image": 128}, precision="fp32", optimizer="sgd-momentum"),
    JOINING.at(128, sizes={"image": 128}, precision="bf16"),
    HOURGLASS.at(16, sizes={"image": 128}, precision="fp32", optimizer="rmsprop"),
    HOURGLASS.at(32, sizes={"image": 128}, precision="fp16"),
    SQUEEZED.at(64, sizes={"image": 128}, precision="fp32", optimizer="sgd-momentum"),
    SQUEEZED.at(128, sizes={"image": 128}, precision="bf16"),
    INVOLVED.at(32, sizes={"image": 64}, precision="fp32"),
    FLOW.at(64, sizes={"image": 32}, precision="fp32", optimizer="adam", clip_norm=1.0),
    CRITIC.at(64, sizes={"image": 64}, precision="fp32", optimizer="adam"),
    CRITIC.at(128, sizes={"image": 64}, precision="bf16", optimizer="adam"),
    SHARPER.at(16, sizes={"image": 48}, precision="fp32", optimizer="adam"),
    SHARPER.at(32, sizes={"image": 48}, precision="bf16", optimizer="adam"),
    WARPED.at(16, sizes={"image": 128}, precision="fp32", optimizer="adam"),
    SLOTS.at(32, sizes={"image": 64}, precision="fp32", optimizer="adam", clip_norm=0.5),
    SLOTS.at(64, sizes={"image": 64}, precision="bf16", optimizer="adam"),
    AGREEMENT.at(32, sizes={"image": 32}, precision="fp32", optimizer="adam"),
    TWINS.at(128, sizes={"image": 64}, precision="fp16", optimizer="sgd-momentum"),
    TWINS.at(64, sizes={"image": 96}, precision="fp32"),
]
