"""Fifth unseen set, images: old and light networks, style, boxes, views, text to image, motion, volumes."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.memory.configuration import Configuration, Subject


def _conv(
    a: int, b: int, kernel: Any = 3, stride: int = 1, *, act: bool = True, **more: Any
) -> nn.Sequential:
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    padding = tuple(side // 2 for side in sides)
    layers = [nn.Conv2d(a, b, sides, stride, padding, bias=False, **more), nn.BatchNorm2d(b)]
    return nn.Sequential(*layers, *([nn.SiLU(inplace=True)] if act else []))


def _images(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 3, image, image),
        "labels": torch.randint(0, 1000, (batch_size,)),
    }


def _class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], label_smoothing=0.1)


def _own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


class Dense(nn.Module):
    """Each layer reads all layers before it; what joins them is computed again in the backward (DenseNet)."""

    def __init__(
        self, *, grow: int = 32, repeats: tuple[int, ...] = (6, 12, 24, 16), again: bool = True
    ) -> None:
        super().__init__()
        self.again, width = again, 64
        self.enter = nn.Sequential(_conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.squeeze, self.grow, self.between = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for at, count in enumerate(repeats):
            squeeze, grown = nn.ModuleList(), nn.ModuleList()
            for _ in range(count):
                squeeze.append(
                    nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 128, 1, bias=False))
                )
                grown.append(
                    nn.Sequential(
                        nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, grow, 3, padding=1, bias=False)
                    )
                )
                width += grow
            self.squeeze.append(squeeze)
            self.grow.append(grown)
            if at < len(repeats) - 1:
                half = [
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.Conv2d(width, width // 2, 1, bias=False),
                    nn.AvgPool2d(2),
                ]
                self.between.append(nn.Sequential(*half))
                width //= 2
        self.leave, self.head = nn.BatchNorm2d(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.enter(images)
        for at, (squeeze, grown) in enumerate(zip(self.squeeze, self.grow, strict=True)):
            known = [x]
            for first, second in zip(squeeze, grown, strict=True):  # type: ignore[call-overload]

                def joined(*parts: Tensor, layer: nn.Module = first) -> Tensor:
                    found: Tensor = layer(torch.cat(parts, dim=1))
                    return found

                x = checkpoint(joined, *known, use_reentrant=False) if self.again else joined(*known)
                known.append(second(x))
            x = torch.cat(known, dim=1)
            x = self.between[at](x) if at < len(self.between) else x
        return self.head(F.relu(self.leave(x)).mean(dim=(2, 3)))


class Factored(nn.Module):
    """Kernels of one row or one column beside each other, and a second head in the middle (Inception)."""

    def __init__(self, width: int = 192, *, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            _conv(3, 32, 3, 2), _conv(32, 64), nn.MaxPool2d(3, 2, 1), _conv(64, 192), nn.MaxPool2d(3, 2, 1)
        )
        self.first, self.blocks = _conv(192, 4 * width, 1), nn.ModuleList()
        for _ in range(depth):
            near = _conv(4 * width, width, 1)
            once = nn.Sequential(_conv(4 * width, 128, 1), _conv(128, 128, (1, 7)), _conv(128, width, (7, 1)))
            twice = [
                _conv(4 * width, 128, 1),
                _conv(128, 128, (7, 1)),
                _conv(128, 128, (1, 7)),
                _conv(128, width, (7, 1)),
            ]
            pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(4 * width, width, 1))
            self.blocks.append(nn.ModuleList([near, once, nn.Sequential(*twice), pool]))
        self.side = nn.Sequential(
            nn.AvgPool2d(5, 3), _conv(4 * width, 128, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.side_head, self.drop = nn.Linear(128, 1000), nn.Dropout(0.5)
        self.head = nn.Linear(4 * width, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x, aside = self.first(self.enter(images)), None
        for at, block in enumerate(self.blocks):
            x = torch.cat([branch(x) for branch in block], dim=1)  # type: ignore[union-attr]
            aside = self.side_head(self.side(x)) if at == 1 else aside
        assert aside is not None
        scores = self.head(self.drop(x.mean(dim=(2, 3))))
        return F.cross_entropy(scores, labels) + 0.4 * F.cross_entropy(aside, labels)


def _plain(
    *, norm: bool = True, layers: str = "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M"
) -> nn.Sequential:
    found: list[nn.Module] = []
    a = 3
    for word in layers.split():
        if word == "M":
            found.append(nn.MaxPool2d(2, 2))
            continue
        b = int(word)
        found += [
            nn.Conv2d(a, b, 3, padding=1),
            *([nn.BatchNorm2d(b)] if norm else []),
            nn.ReLU(inplace=True),
        ]
        a = b
    return nn.Sequential(*found)


def _deep_plain() -> nn.Module:
    """VGG, channels last."""
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(True)]
    whole = nn.Sequential(
        _plain(), nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head, nn.Dropout(), nn.Linear(4096, 1000)
    )
    return whole.to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]


def _channels_last_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    images = batch["images"].contiguous(memory_format=torch.channels_last)
    return F.cross_entropy(model(images), batch["labels"])


class Styled(nn.Module):
    """A network draws a picture again in a style; a frozen network compares contents and textures."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b, side, stride in ((3, width, 9, 1), (width, 2 * width, 3, 2), (2 * width, 4 * width, 3, 2)):
            layers += [
                nn.ReflectionPad2d(side // 2),
                nn.Conv2d(a, b, side, stride),
                nn.InstanceNorm2d(b, affine=True),
                nn.ReLU(),
            ]
        self.enter = nn.Sequential(*layers)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(
                    nn.ReflectionPad2d(1),
                    nn.Conv2d(4 * width, 4 * width, 3),
                    nn.InstanceNorm2d(4 * width, affine=True),
                ),
                *(
                    nn.ReLU(),
                    nn.ReflectionPad2d(1),
                    nn.Conv2d(4 * width, 4 * width, 3),
                    nn.InstanceNorm2d(4 * width, affine=True),
                ),
            )
            for _ in range(5)
        )
        grow: list[nn.Module] = []
        for a, b in pairwise((4 * width, 2 * width, width)):
            grow += [
                nn.Upsample(scale_factor=2),
                nn.ReflectionPad2d(1),
                nn.Conv2d(a, b, 3),
                nn.InstanceNorm2d(b, affine=True),
                nn.ReLU(),
            ]
        self.leave = nn.Sequential(*grow, nn.ReflectionPad2d(4), nn.Conv2d(width, 3, 9))
        self.judge = _plain(norm=False, layers="64 64 M 128 128 M 256 256 256 M 512 512 512").requires_grad_(
            False
        )

    def seen(self, images: Tensor) -> list[Tensor]:
        found, x = [], images
        for layer in self.judge:
            if isinstance(layer, nn.MaxPool2d):
                found.append(x)
            x = layer(x)
        return [*found, x]

    @staticmethod
    def texture(x: Tensor) -> Tensor:
        flat = x.flatten(2)
        return flat @ flat.transpose(1, 2) / (x.shape[1] * flat.shape[2])

    def forward(self, images: Tensor, style: Tensor) -> Tensor:
        x = self.enter(images)
        for block in self.blocks:
            x = x + block(x)
        made = self.leave(x)
        with torch.no_grad():
            known, textures = self.seen(images), [self.texture(each) for each in self.seen(style)]
        found = self.seen(made)
        content = F.mse_loss(found[1], known[1])
        apart = sum(
            F.mse_loss(self.texture(a), b.expand(a.shape[0], -1, -1))
            for a, b in zip(found, textures, strict=True)
        )
        smooth = (made[..., 1:] - made[..., :-1]).abs().sum() + (made[:, :, 1:] - made[:, :, :-1]).abs().sum()
        loss: Tensor = 1e5 * content + 1e10 * apart + 1e-6 * smooth
        return loss


def _pictures_and_style(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {"images": torch.rand(batch_size, 3, image, image), "style": torch.rand(1, 3, image, image)}


class Split(nn.Module):
    """Half of the channels goes through small blocks; then all are joined (YOLO's blocks)."""

    def __init__(self, a: int, b: int, count: int, *, add: bool = True) -> None:
        super().__init__()
        self.add, half = add, b // 2
        self.enter, self.leave = _conv(a, b, 1), _conv((2 + count) * half, b, 1)
        self.blocks = nn.ModuleList(nn.Sequential(_conv(half, half), _conv(half, half)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.enter(x).chunk(2, dim=1))
        for block in self.blocks:
            inside = block(parts[-1])
            parts.append(parts[-1] + inside if self.add else inside)
        found: Tensor = self.leave(torch.cat(parts, dim=1))
        return found


class OneLook(nn.Module):
    """Boxes in one look: a trunk of split blocks, features up and down again, sides as distributions."""

    def __init__(self, width: int = 32, *, classes: int = 80, bins: int = 16) -> None:
        super().__init__()
        self.classes, self.bins = classes, bins
        a, b, c, d = 2 * width, 4 * width, 8 * width, 16 * width
        self.low = nn.Sequential(
            _conv(3, width, 3, 2), _conv(width, a, 3, 2), Split(a, a, 1), _conv(a, b, 3, 2), Split(b, b, 2)
        )
        self.middle = nn.Sequential(_conv(b, c, 3, 2), Split(c, c, 2))
        self.high, self.shrink, self.join = (
            nn.Sequential(_conv(c, d, 3, 2), Split(d, d, 1)),
            _conv(d, d // 2, 1),
            _conv(2 * d, d, 1),
        )
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.up = nn.ModuleList([Split(d + c, c, 1, add=False), Split(c + b, b, 1, add=False)])
        self.steps = nn.ModuleList([_conv(b, b, 3, 2), _conv(c, c, 3, 2)])
        self.down = nn.ModuleList([Split(b + c, c, 1, add=False), Split(c + d, d, 1, add=False)])
        self.sides = nn.ModuleList(
            nn.Sequential(_conv(each, 64), _conv(64, 64), nn.Conv2d(64, 4 * bins, 1)) for each in (b, c, d)
        )
        self.names = nn.ModuleList(
            nn.Sequential(_conv(each, 80), _conv(80, 80), nn.Conv2d(80, classes, 1)) for each in (b, c, d)
        )

    def features(self, images: Tensor) -> list[Tensor]:
        low = self.low(images)
        middle = self.middle(low)
        high = [self.shrink(self.high(middle))]
        for _ in range(3):
            high.append(self.pool(high[-1]))
        top = self.join(torch.cat(high, dim=1))
        one = self.up[0](torch.cat([F.interpolate(top, scale_factor=2.0), middle], dim=1))
        two = self.up[1](torch.cat([F.interpolate(one, scale_factor=2.0), low], dim=1))
        three = self.down[0](torch.cat([self.steps[0](two), one], dim=1))
        return [two, three, self.down[1](torch.cat([self.steps[1](three), top], dim=1))]

    def forward(self, images: Tensor, names: Tensor, sides: Tensor) -> Tensor:
        levels = self.features(images)
        scores = torch.cat([head(x).flatten(2) for head, x in zip(self.names, levels, strict=True)], dim=2)
        spread = torch.cat([head(x).flatten(2) for head, x in zip(self.sides, levels, strict=True)], dim=2)
        scores, spread = scores.transpose(1, 2).float(), spread.transpose(1, 2).float()
        wanted = F.one_hot(names, self.classes + 1)[..., 1:].float()
        wrong = F.binary_cross_entropy_with_logits(
            scores, wanted, reduction="none"
        ).sum() / wanted.sum().clamp(min=1)
        spread = spread.unflatten(-1, (4, self.bins))
        found = spread.softmax(dim=-1) @ torch.arange(self.bins, device=images.device, dtype=torch.float32)
        here = (names > 0).float()
        least, most = torch.minimum(found, sides), torch.maximum(found, sides)
        common = (least[..., 0] + least[..., 2]) * (least[..., 1] + least[..., 3])
        around = (most[..., 0] + most[..., 2]) * (most[..., 1] + most[..., 3])
        box = ((1 - common / around.clamp(min=1e-6)) * here).sum() / here.sum().clamp(min=1)
        lower = sides.floor().long().clamp(0, self.bins - 2)
        flat, weight = spread.flatten(0, 2), (lower + 1 - sides).flatten()
        left = F.cross_entropy(flat, lower.flatten(), reduction="none") * weight
        right = F.cross_entropy(flat, lower.flatten() + 1, reduction="none") * (1 - weight)
        exact = ((left + right).view(sides.shape).mean(dim=-1) * here).sum() / here.sum().clamp(min=1)
        return 0.5 * wrong + 7.5 * box + 1.5 * exact


def _boxes(*, batch_size: int, image: int) -> dict[str, Tensor]:
    places = sum((image // step) ** 2 for step in (8, 16, 32))
    names = torch.randint(-400, 81, (batch_size, places)).clamp(min=0)
    return {
        "images": torch.rand(batch_size, 3, image, image),
        "names": names,
        "sides": torch.rand(batch_size, places, 4) * 14,
    }


class ManyCrops(nn.Module):
    """Large and small parts of a picture must say the same; a slow copy is the teacher (DINO)."""

    def __init__(self, width: int = 384, *, depth: int = 8, names: int = 16384) -> None:
        super().__init__()
        self.student = self._network(width, depth, names)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(1, names))

    @staticmethod
    def _network(width: int, depth: int, names: int) -> nn.ModuleDict:
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        head = [nn.Linear(width, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256)]
        return nn.ModuleDict(
            {
                "enter": nn.Conv2d(3, width, 16, 16),
                "places": nn.Embedding(14 * 14, width),
                "first": nn.Embedding(1, width),
                "layers": nn.TransformerEncoder(
                    layer, depth, nn.LayerNorm(width), enable_nested_tensor=False
                ),
                "head": nn.Sequential(*head),
                "last": nn.utils.parametrizations.weight_norm(nn.Linear(256, names, bias=False)),
            }
        )

    @staticmethod
    def say(part: nn.ModuleDict, images: Tensor) -> Tensor:
        x = part["enter"](images)
        places = part["places"].weight.T.unflatten(1, (14, 14))[None]  # type: ignore[union-attr, operator]
        x = x + F.interpolate(places, size=x.shape[-2:], mode="bicubic").to(x.dtype)
        first = part["first"].weight[None].expand(x.shape[0], -1, -1)  # type: ignore[index, operator, union-attr]
        x = part["layers"](torch.cat([first.to(x.dtype), x.flatten(2).transpose(1, 2)], dim=1))[:, 0]
        found: Tensor = part["last"](F.normalize(part["head"](x), dim=-1))
        return found

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.mul_(0.996).add_(fast.detach(), alpha=0.004)
            taught = self.say(self.teacher, large).float()
            known = F.softmax((taught - self.centre) / 0.04, dim=-1).chunk(2)
            self.centre.mul_(0.9).add_(taught.mean(dim=0, keepdim=True), alpha=0.1)
        said = [*self.say(self.student, large).chunk(2), *self.say(self.student, small).chunk(6)]
        losses = []
        for at, right in enumerate(known):
            for other, each in enumerate(said):
                if at != other:
                    losses.append(-(right * F.log_softmax(each.float() / 0.1, dim=-1)).sum(dim=-1).mean())
        return torch.stack(losses).mean()


def _crops(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "large": torch.randn(2 * batch_size, 3, 224, 224),
        "small": torch.randn(6 * batch_size, 3, 96, 96),
    }


class TextBlock(nn.Module):
    """A residual block told the time, then attention within the picture and to the text."""

    def __init__(self, a: int, b: int, *, time: int, text: int = 512, attend: bool = True) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, a), nn.GroupNorm(32, b)])
        self.one, self.two = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        self.time, self.around = nn.Linear(time, b), nn.Conv2d(a, b, 1) if a != b else nn.Identity()
        self.attend = attend
        if attend:
            self.within = nn.MultiheadAttention(b, b // 64, batch_first=True)
            self.across = nn.MultiheadAttention(b, b // 64, kdim=text, vdim=text, batch_first=True)
            self.layer_norms = nn.ModuleList(nn.LayerNorm(b) for _ in range(3))
            self.up, self.down = nn.Linear(b, 8 * b), nn.Linear(4 * b, b)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        inside = self.one(F.silu(self.norms[0](x))) + self.time(F.silu(time))[..., None, None]
        x = self.around(x) + self.two(F.silu(self.norms[1](inside)))
        if not self.attend:
            return x
        side = x.shape[-1]
        flat = x.flatten(2).transpose(1, 2)
        seen = self.layer_norms[0](flat)
        flat = flat + self.within(seen, seen, seen, need_weights=False)[0]
        flat = flat + self.across(self.layer_norms[1](flat), text, text, need_weights=False)[0]
        value, gate = self.up(self.layer_norms[2](flat)).chunk(2, dim=-1)
        flat = flat + self.down(value * F.gelu(gate))
        return flat.transpose(1, 2).unflatten(2, (side, side))


class TextToImage(nn.Module):
    """Latents of pictures without their noise, from a text: blocks of a U-Net, computed again if wanted."""

    def __init__(self, widths: tuple[int, ...] = (128, 256, 512), *, again: bool = False) -> None:
        super().__init__()
        self.again, time = again, 4 * widths[0]
        self.time = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down, self.shrink, kept = nn.ModuleList(), nn.ModuleList(), [widths[0]]
        a = widths[0]
        for at, b in enumerate(widths):
            for _ in range(2):
                self.down.append(TextBlock(a, b, time=time, attend=at > 0))
                a = b
                kept.append(b)
            if at < len(widths) - 1:
                self.shrink.append(nn.Conv2d(b, b, 3, 2, 1))
                kept.append(b)
        self.middle = TextBlock(a, a, time=time)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for at, b in reversed(list(enumerate(widths))):
            for _ in range(3):
                self.up.append(TextBlock(a + kept.pop(), b, time=time, attend=at > 0))
                a = b
            if at:
                self.grow.append(nn.Conv2d(b, b, 3, padding=1))
        self.leave = nn.Sequential(nn.GroupNorm(32, a), nn.SiLU(), nn.Conv2d(a, 4, 3, padding=1))

    def run(self, block: nn.Module, *given: Tensor) -> Tensor:
        found: Tensor = checkpoint(block, *given, use_reentrant=False) if self.again else block(*given)
        return found

    def forward(self, latents: Tensor, text: Tensor, when: Tensor) -> Tensor:
        noise = torch.randn_like(latents)
        share = torch.cos(when * math.pi / 2)[:, None, None, None]
        rest = torch.sqrt(1 - share**2)
        half = self.enter.out_channels // 2
        rate = torch.exp(-math.log(10000) * torch.arange(half, device=when.device) / half)
        angle = 1000 * when[:, None] * rate
        time = self.time(torch.cat([angle.sin(), angle.cos()], dim=-1))
        x = self.enter(share * latents + rest * noise)
        kept = [x]
        for at, block in enumerate(self.down):
            x = self.run(block, x, time, text)
            kept.append(x)
            if at % 2 and at // 2 < len(self.shrink):
                x = self.shrink[at // 2](x)
                kept.append(x)
        x = self.run(self.middle, x, time, text)
        for at, block in enumerate(self.up):
            x = self.run(block, torch.cat([x, kept.pop()], dim=1), time, text)
            if at % 3 == 2 and at // 3 < len(self.grow):
                x = self.grow[at // 3](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        wrong = F.mse_loss(self.leave(x).float(), share * noise - rest * latents, reduction="none")
        known = (share / rest.clamp(min=1e-3)) ** 2
        return (wrong * known.clamp(max=5) / (known + 1)).mean()


def _latents(*, batch_size: int, latent: int) -> dict[str, Tensor]:
    return {
        "latents": torch.randn(batch_size, 4, latent, latent),
        "text": torch.randn(batch_size, 77, 512),
        "when": torch.rand(batch_size),
    }


class Motion(nn.Module):
    """Where each place moves to: pairs compared around a guess that a cell makes better (RAFT)."""

    def __init__(self, width: int = 128, *, reach: int = 4, rounds: int = 6) -> None:
        super().__init__()
        self.reach, self.rounds, self.width = reach, rounds, width
        self.see, self.context = (
            self._encoder(256, nn.InstanceNorm2d),
            self._encoder(2 * width, nn.BatchNorm2d),
        )
        around = 4 * (2 * reach + 1) ** 2
        self.of_costs = nn.Sequential(
            nn.Conv2d(around, 192, 1), nn.ReLU(), nn.Conv2d(192, 128, 3, padding=1), nn.ReLU()
        )
        self.of_moves = nn.Sequential(
            nn.Conv2d(2, 64, 7, padding=3), nn.ReLU(), nn.Conv2d(64, 62, 3, padding=1), nn.ReLU()
        )
        self.gates = nn.ModuleList(
            nn.Conv2d(2 * width + 192, 3 * width, side, padding=pad)
            for side, pad in (((1, 5), (0, 2)), ((5, 1), (2, 0)))
        )
        self.fresh = nn.ModuleList(
            nn.Conv2d(2 * width + 192, width, side, padding=pad)
            for side, pad in (((1, 5), (0, 2)), ((5, 1), (2, 0)))
        )
        self.move = nn.Sequential(
            nn.Conv2d(width, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 2, 3, padding=1)
        )

    @staticmethod
    def _encoder(out: int, norm: Any) -> nn.Sequential:
        layers: list[nn.Module] = []
        for a, b in pairwise((3, 64, 96, 128)):
            layers += [nn.Conv2d(a, b, 7 if a == 3 else 3, 2, 3 if a == 3 else 1), norm(b), nn.ReLU()]
            layers += [nn.Conv2d(b, b, 3, padding=1), norm(b), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(128, out, 1))

    def costs(self, first: Tensor, second: Tensor) -> list[Tensor]:
        batch, width, high, wide = first.shape
        alike = torch.einsum("bcn,bcm->bnm", first.flatten(2), second.flatten(2)) / width**0.5
        level = alike.reshape(batch * high * wide, 1, high, wide)
        found = [level]
        for _ in range(3):
            level = F.avg_pool2d(level, 2)
            found.append(level)
        return found

    def look(self, costs: list[Tensor], places: Tensor) -> Tensor:
        batch, _, high, wide = places.shape
        steps = torch.arange(-self.reach, self.reach + 1, device=places.device, dtype=torch.float32)
        window = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), dim=-1)
        centre = places.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2)
        found = []
        for at, level in enumerate(costs):
            size = torch.tensor([level.shape[-1], level.shape[-2]], device=places.device).float()
            grid = 2 * (centre / 2**at + window) / (size - 1) - 1
            found.append(F.grid_sample(level, grid, align_corners=True).reshape(batch, high, wide, -1))
        return torch.cat(found, dim=-1).permute(0, 3, 1, 2)

    def forward(self, one: Tensor, two: Tensor, moves: Tensor) -> Tensor:
        first, second = self.see(torch.cat([one, two])).float().chunk(2)
        costs = self.costs(first, second)
        state, context = self.context(one).split([self.width, self.width], dim=1)
        state, context = torch.tanh(state), torch.relu(context)
        rows, columns = (torch.arange(size, device=one.device).float() for size in first.shape[-2:])
        start = torch.stack(torch.meshgrid(columns, rows, indexing="xy"))[None].expand(
            one.shape[0], -1, -1, -1
        )
        places, loss = start, torch.zeros((), device=one.device)
        for at in range(self.rounds):
            places = places.detach()
            moved = places - start
            seen = torch.cat([self.of_costs(self.look(costs, places)), self.of_moves(moved), moved], dim=1)
            given = torch.cat([context, seen], dim=1)
            for gates, fresh in zip(self.gates, self.fresh, strict=True):
                keep, use, _ = torch.sigmoid(gates(torch.cat([state, given], dim=1))).chunk(3, dim=1)
                next_state = torch.tanh(fresh(torch.cat([use * state, given], dim=1)))
                state = (1 - keep) * state + keep * next_state
            places = places + self.move(state)
            large = F.interpolate(8 * (places - start), scale_factor=8.0, mode="bilinear", align_corners=True)
            loss = loss + 0.8 ** (self.rounds - at - 1) * (large - moves).abs().mean()
        return loss


def _two_frames(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "one": torch.rand(batch_size, 3, 256, 320),
        "two": torch.rand(batch_size, 3, 256, 320),
        "moves": torch.randn(batch_size, 2, 256, 320),
    }


class Volumes(nn.Module):
    """Organs in a volume: a U-Net in three dimensions, judged at several sizes by overlap and by class."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), *, organs: int = 5) -> None:
        super().__init__()
        self.down = nn.ModuleList(self._two(a, b, 1 if a == 1 else 2) for a, b in pairwise((1, *widths)))
        turned = widths[::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in pairwise(turned))
        self.up = nn.ModuleList(self._two(2 * b, b, 1) for b in turned[1:])
        self.heads = nn.ModuleList(nn.Conv3d(b, organs, 1) for b in turned[1:])

    @staticmethod
    def _two(a: int, b: int, stride: int) -> nn.Sequential:
        first = [nn.Conv3d(a, b, 3, stride, 1), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(0.01, True)]
        return nn.Sequential(
            *first, nn.Conv3d(b, b, 3, 1, 1), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(0.01, True)
        )

    def forward(self, volume: Tensor, labels: Tensor) -> Tensor:
        kept, x = [], volume
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        kept.pop()
        loss, weight = torch.zeros((), device=volume.device), 0.25
        for grow, layer, head in zip(self.grow, self.up, self.heads, strict=True):
            x = layer(torch.cat([grow(x), kept.pop()], dim=1))
            scores = head(x).float()
            known = F.interpolate(labels[:, None].float(), size=scores.shape[2:], mode="nearest")[:, 0].long()
            chance = scores.softmax(dim=1)
            wanted = F.one_hot(known, scores.shape[1]).movedim(-1, 1).float()
            both, either = (chance * wanted).sum(dim=(2, 3, 4)), (chance + wanted).sum(dim=(2, 3, 4))
            loss = loss + weight * (
                F.cross_entropy(scores, known) + 1 - (2 * both / (either + 1e-5))[:, 1:].mean()
            )
            weight *= 2
        return loss


def _scans(*, batch_size: int, side: int) -> dict[str, Tensor]:
    return {
        "volume": torch.randn(batch_size, 1, side, side, side),
        "labels": torch.randint(0, 5, (batch_size, side, side, side)),
    }


class Board(nn.Module):
    """Moves and the winner of a board game, from planes of stones: residual blocks that weigh channels."""

    def __init__(self, width: int = 192, *, depth: int = 12, side: int = 19) -> None:
        super().__init__()
        self.enter = _conv(17, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(width, width), _conv(width, width, act=False)) for _ in range(depth)
        )
        self.weigh = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, 2 * width)) for _ in range(depth)
        )
        self.moves = nn.Sequential(
            _conv(width, 2, 1), nn.Flatten(), nn.Linear(2 * side * side, side * side + 1)
        )
        self.worth = nn.Sequential(
            _conv(width, 1, 1),
            nn.Flatten(),
            nn.Linear(side * side, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
            nn.Tanh(),
        )

    def forward(self, planes: Tensor, moves: Tensor, winner: Tensor) -> Tensor:
        x = self.enter(planes.to(memory_format=torch.channels_last))
        for block, weigh in zip(self.blocks, self.weigh, strict=True):
            inside = block(x)
            scale, shift = weigh(inside.mean(dim=(2, 3)))[..., None, None].chunk(2, dim=1)
            x = F.relu(inside * torch.sigmoid(scale) + shift + x)
        chosen = -(moves * F.log_softmax(self.moves(x).float(), dim=1)).sum(dim=1).mean()
        return chosen + F.mse_loss(self.worth(x)[:, 0].float(), winner)


def _games(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "planes": (torch.rand(batch_size, 17, 19, 19) > 0.5).float(),
        "moves": torch.rand(batch_size, 362).softmax(dim=1),
        "winner": torch.rand(batch_size) * 2 - 1,
    }


class PseudoLabels(nn.Module):
    """Few labels and many pictures: what a network is sure of must hold for a changed picture (FixMatch)."""

    def __init__(self, *, grow: int = 4, depth: int = 4) -> None:
        super().__init__()
        widths = (16, 16 * grow, 32 * grow, 64 * grow)
        self.enter, self.blocks = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.ModuleList()
        for at, (a, b) in enumerate(pairwise(widths)):
            for n in range(depth):
                self.blocks.append(WideBlock(a if n == 0 else b, b, 2 if at and n == 0 else 1))
        self.norm, self.head = nn.BatchNorm2d(widths[-1], momentum=0.001), nn.Linear(widths[-1], 100)

    def scores(self, images: Tensor) -> Tensor:
        x = self.enter(images)
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(F.leaky_relu(self.norm(x), 0.1), 1).flatten(1))

    def forward(self, known: Tensor, labels: Tensor, weak: Tensor, strong: Tensor) -> Tensor:
        scores = self.scores(torch.cat([known, weak, strong]))
        right = scores[: known.shape[0]]
        weak_scores, strong_scores = scores[known.shape[0] :].chunk(2)
        sure, guessed = weak_scores.detach().float().softmax(dim=-1).max(dim=-1)
        apart = F.cross_entropy(strong_scores, guessed, reduction="none") * (sure >= 0.95).float()
        return F.cross_entropy(right, labels) + apart.mean()


class WideBlock(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(a, momentum=0.001), nn.BatchNorm2d(b, momentum=0.001)])
        self.one, self.two = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(a, b, 1, stride, bias=False) if a != b else None

    def forward(self, x: Tensor) -> Tensor:
        inside = F.leaky_relu(self.norms[0](x), 0.1)
        out = self.two(F.leaky_relu(self.norms[1](self.one(inside)), 0.1))
        found: Tensor = out + (x if self.around is None else self.around(inside))
        return found


def _few_labels(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "known": torch.randn(batch_size, 3, 32, 32),
        "labels": torch.randint(0, 100, (batch_size,)),
        "weak": torch.randn(7 * batch_size, 3, 32, 32),
        "strong": torch.randn(7 * batch_size, 3, 32, 32),
    }


class Rounded(torch.autograd.Function):
    """Whole steps of a scale that is trained too; the gradient passes where nothing was cut off (LSQ)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
        steps = x / scale
        whole = steps.clamp(least, most).round()
        ctx.save_for_backward(steps, whole)
        ctx.bounds = (least, most)
        return whole * scale

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        steps, whole = ctx.saved_tensors
        least, most = ctx.bounds
        inside = (steps > least) & (steps < most)
        of_scale = (slopes[0] * torch.where(inside, whole - steps, whole)).sum()
        return slopes[0] * inside, of_scale / steps.numel() ** 0.5, None, None


class FewBits(nn.Module):
    """A convolution whose weights and inputs have four bits, followed by a norm."""

    def __init__(self, a: int, b: int, stride: int = 1, side: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(a, b, side, stride, side // 2, bias=False)
        self.norm = nn.BatchNorm2d(b)
        self.weight_scale, self.input_scale = (
            nn.Parameter(torch.tensor(0.02)),
            nn.Parameter(torch.tensor(0.1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = Rounded.apply(self.conv.weight, self.weight_scale, -8, 7)
        x = Rounded.apply(x, self.input_scale, 0, 15)
        return self.norm(F.conv2d(x, weight, None, self.conv.stride, self.conv.padding))


class Quantized(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.enter = nn.Sequential(_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.blocks, self.around = nn.ModuleList(), nn.ModuleList()
        for a, b in zip((64, *widths), widths, strict=False):
            for n in range(2):
                first, stride = (a, 2) if n == 0 and a != b else (b, 1)
                self.blocks.append(nn.Sequential(FewBits(first, b, stride), nn.ReLU(), FewBits(b, b)))
                self.around.append(nn.Identity() if stride == 1 else FewBits(first, b, stride, 1))
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.enter(images)
        for block, around in zip(self.blocks, self.around, strict=True):
            x = F.relu(block(x) + around(x))
        return self.head(x.mean(dim=(2, 3)))


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any = _own, *, name: str = "") -> Subject:
    return Subject(
        family=family, name=name or family, make_model=make_model, make_batch=make_batch, loss=loss
    )


DENSE = _subject("dense", lambda: Dense(again=False), _images, _class_loss)
DENSE_AGAIN = _subject("dense", Dense, _images, _class_loss, name="dense-recomputed")
FACTORED = _subject("factored", Factored, _images)
PLAIN = _subject("deep-plain", _deep_plain, _images, _channels_last_loss)
STYLED = _subject("styled", Styled, _pictures_and_style)
ONE_LOOK = _subject("one-look", OneLook, _boxes)
CROPS = _subject("many-crops", ManyCrops, _crops)
TEXT_TO_IMAGE = _subject("text-to-image", TextToImage, _latents)
TEXT_TO_IMAGE_AGAIN = _subject(
    "text-to-image", lambda: TextToImage(again=True), _latents, name="text-to-image-recomputed"
)
MOTION = _subject("motion", Motion, _two_frames)
VOLUMES = _subject("volumes", Volumes, _scans)
BOARD = _subject("board", lambda: Board().to(memory_format=torch.channels_last), _games)  # type: ignore[call-overload]
PSEUDO = _subject("pseudo-labels", PseudoLabels, _few_labels)
QUANTIZED = _subject("few-bits", Quantized, _images, _class_loss)

CONFIGURATIONS: list[Configuration] = [
    DENSE.at(32, sizes={"image": 224}, precision="fp32", optimizer="sgd-nesterov"),
    DENSE_AGAIN.at(64, sizes={"image": 224}, precision="bf16", optimizer="sgd-nesterov"),
    FACTORED.at(64, sizes={"image": 224}, precision="fp32", optimizer="rmsprop"),
    FACTORED.at(96, sizes={"image": 224}, precision="bf16", optimizer="sgd-momentum"),
    PLAIN.at(64, sizes={"image": 224}, precision="fp16", optimizer="sgd-momentum"),
    PLAIN.at(32, sizes={"image": 224}, precision="fp32", optimizer="adamw-schedule"),
    STYLED.at(4, sizes={"image": 256}, precision="fp32", optimizer="adam"),
    ONE_LOOK.at(16, sizes={"image": 416}, precision="fp16", clip_norm=10.0, optimizer="sgd-nesterov"),
    ONE_LOOK.at(8, sizes={"image": 416}, precision="tf32", accumulation=4, optimizer="adamw-ema"),
    CROPS.at(16, precision="fp16", clip_norm=3.0),
    TEXT_TO_IMAGE.at(16, sizes={"latent": 32}, precision="bf16", clip_norm=1.0, optimizer="adamw-ema"),
    TEXT_TO_IMAGE_AGAIN.at(32, sizes={"latent": 32}, precision="fp16", clip_norm=1.0),
    MOTION.at(4, precision="fp32", clip_norm=1.0, optimizer="adamw-schedule"),
    VOLUMES.at(2, sizes={"side": 96}, precision="fp16", clip_norm=12.0, optimizer="sgd-nesterov"),
    BOARD.at(256, precision="bf16", optimizer="sgd-nesterov"),
    PSEUDO.at(32, precision="fp32", optimizer="sgd-nesterov"),
    PSEUDO.at(64, precision="bf16", optimizer="adamw-ema"),
    QUANTIZED.at(64, sizes={"image": 224}, precision="fp32", optimizer="sgd-momentum"),
]
