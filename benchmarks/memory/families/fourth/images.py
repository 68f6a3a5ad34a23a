"""Fourth unseen set, images: detectors, labels for pixels, names for faces, views, pairs of points."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, a: int, b: int, stride: int = 1, *, groups: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(a, b, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(b)),
            *(nn.ReLU(inplace=True), nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)),
        )
        self.around: nn.Module = nn.Identity()
        if stride > 1 or a != b:
            self.around = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.around(x), inplace=True)


def _trunk(widths: tuple[int, ...] = (64, 128, 256, 512)) -> nn.Sequential:
    layers: list[nn.Module] = [
        *(nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0])),
        *(nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
    ]
    for a, b in zip((widths[0], *widths), widths, strict=False):
        layers += [Block(a, b, 1 if a == b else 2), Block(b, b)]
    return nn.Sequential(*layers)


def _images(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 3, image, image),
        "labels": torch.randint(0, 1000, (batch_size,)),
    }


def _class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def _two_views(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {name: torch.randn(batch_size, 3, image, image) for name in ("first", "second")}


def _own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


class Detector(nn.Module):
    """Boxes at every place of a pyramid of features, without anchors."""

    def __init__(self, width: int = 128, *, classes: int = 20) -> None:
        super().__init__()
        self.classes = classes
        trunk = list(_trunk().children())
        self.stages = nn.ModuleList(
            [nn.Sequential(*trunk[:8]), nn.Sequential(*trunk[8:10]), nn.Sequential(*trunk[10:])]
        )
        self.side = nn.ModuleList(nn.Conv2d(a, width, 1) for a in (128, 256, 512))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        towers = []
        for num in (classes, 5):
            layers: list[nn.Module] = []
            for _ in range(3):
                layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(32, width), nn.ReLU()]
            towers.append(nn.Sequential(*layers, nn.Conv2d(width, num, 3, padding=1)))
        self.name, self.place = towers

    def forward(self, images: Tensor, names: Tensor, boxes: Tensor) -> Tensor:
        kept, x = [], images
        for stage, side in zip(self.stages, self.side, strict=True):
            x = stage(x)
            kept.append(side(x))
        levels = [kept[-1]]
        for lower in reversed(kept[:-1]):
            levels.insert(0, lower + F.interpolate(levels[0], size=lower.shape[-2:], mode="nearest"))
        smoothed = [smooth(level) for smooth, level in zip(self.smooth, levels, strict=True)]
        scores = torch.cat([self.name(level).flatten(2) for level in smoothed], dim=2).float()
        found = torch.cat([self.place(level).flatten(2) for level in smoothed], dim=2).float()
        return self.focal(scores.transpose(1, 2), names) + self.overlap(found.transpose(1, 2), boxes, names)

    def focal(self, scores: Tensor, names: Tensor) -> Tensor:
        wanted = F.one_hot(names, self.classes + 1)[..., 1:].float()
        chance = torch.sigmoid(scores)
        wrong = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        right = chance * wanted + (1 - chance) * (1 - wanted)
        share = 0.25 * wanted + 0.75 * (1 - wanted)
        return (share * (1 - right) ** 2 * wrong).sum() / names.shape[0]

    def overlap(self, found: Tensor, boxes: Tensor, names: Tensor) -> Tensor:
        sides, centre = found[..., :4].exp(), found[..., 4]
        smaller, larger = torch.minimum(sides, boxes), torch.maximum(sides, boxes)
        common = (smaller[..., 0] + smaller[..., 2]) * (smaller[..., 1] + smaller[..., 3])
        around = (larger[..., 0] + larger[..., 2]) * (larger[..., 1] + larger[..., 3])
        areas = [(each[..., 0] + each[..., 2]) * (each[..., 1] + each[..., 3]) for each in (sides, boxes)]
        union = areas[0] + areas[1] - common
        value = common / union - (around - union) / around
        weight = (names > 0).float()
        middle = F.binary_cross_entropy_with_logits(centre, torch.full_like(centre, 0.5), reduction="none")
        return ((1 - value + middle) * weight).sum() / weight.sum().clamp(min=1)


def _scenes(*, batch_size: int, image: int) -> dict[str, Tensor]:
    places = sum((image // step) ** 2 for step in (8, 16, 32))
    return {
        "images": torch.randn(batch_size, 3, image, image),
        "names": torch.randint(0, 21, (batch_size, places)),
        "boxes": torch.rand(batch_size, places, 4) + 0.1,
    }


class Labelled(nn.Module):
    """A class for each pixel: convolutions with holes of several sizes, joined, and enlarged."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        trunk = list(_trunk().children())
        self.low, self.high = nn.Sequential(*trunk[:6]), nn.Sequential(*trunk[6:])
        spreads = (1, 6, 12, 18)
        self.views = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(512, width, 3 if at else 1, padding=at and spread, dilation=spread, bias=False),
                *(nn.BatchNorm2d(width), nn.ReLU()),
            )
            for at, spread in enumerate(spreads)
        )
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(512, width, 1), nn.ReLU())
        self.join = nn.Sequential(
            nn.Conv2d(5 * width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.5)
        )
        self.side = nn.Sequential(nn.Conv2d(64, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU())
        self.head = nn.Sequential(
            *(nn.Conv2d(width + 48, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, 21, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        low = self.low(images)
        high = self.high(low)
        whole = F.interpolate(self.whole(high), size=high.shape[-2:], mode="bilinear")
        x = self.join(torch.cat([*(view(high) for view in self.views), whole], dim=1))
        x = F.interpolate(x, size=low.shape[-2:], mode="bilinear", align_corners=False)
        x = self.head(torch.cat([x, self.side(low)], dim=1))
        return F.interpolate(x, size=images.shape[-2:], mode="bilinear", align_corners=False)


def _pixels(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 3, image, image),
        "labels": torch.randint(0, 21, (batch_size, image, image)),
    }


class Queue(nn.Module):
    """A view is told from a long queue of others, which a slowly moving copy of the network has named."""

    def __init__(self, *, width: int = 128, waiting: int = 65536) -> None:
        super().__init__()
        self.online, self.slow = self._network(width), self._network(width)
        self.slow.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(width, waiting), dim=0))

    @staticmethod
    def _network(width: int) -> nn.Module:
        head = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, width))
        return nn.Sequential(_trunk(), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), head)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        asked = F.normalize(self.online(first).float(), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                slow.data = slow.data * 0.999 + fast.data * 0.001
            keys = F.normalize(self.slow(second).float(), dim=1)
        right = torch.einsum("nc,nc->n", asked, keys)[:, None]
        wrong = torch.einsum("nc,ck->nk", asked, self.queue.clone().detach())
        scores = torch.cat([right, wrong], dim=1) / 0.07
        loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))
        with torch.no_grad():
            self.queue[:, : keys.shape[0]] = keys.T
        return loss


class Margins(nn.Module):
    """Faces: the angle to one's own of many names must be smaller by a margin."""

    def __init__(self, *, names: int = 85_000, width: int = 512) -> None:
        super().__init__()
        self.trunk = nn.Sequential(_trunk(), nn.Flatten(), nn.BatchNorm1d(512 * 16), nn.Dropout(0.4))
        self.enter, self.norm = nn.Linear(512 * 16, width), nn.BatchNorm1d(width)
        self.names = nn.Parameter(torch.randn(names, width) * 0.01)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.normalize(self.norm(self.enter(self.trunk(images))))
        near = F.linear(x, F.normalize(self.names)).float()
        sine = torch.sqrt((1.0 - near**2).clamp(0, 1))
        moved = near * 0.8776 - sine * 0.4794
        wanted = torch.zeros_like(near).scatter_(1, labels[:, None], 1.0)
        return F.cross_entropy(64 * (wanted * moved + (1 - wanted) * near), labels)


class Taught(nn.Module):
    """A small network learns what a large frozen one says, and its features."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(_trunk((96, 192, 384, 768)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.teacher_head = nn.Linear(768, 1000)
        self.student = nn.Sequential(_trunk((32, 64, 128, 256)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.student_head, self.fit = nn.Linear(256, 1000), nn.Linear(256, 768)
        for part in (self.teacher, self.teacher_head):
            part.requires_grad_(False)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            known = self.teacher(images)
            said = self.teacher_head(known)
        mine = self.student(images)
        scores = self.student_head(mine)
        soft = F.kl_div(F.log_softmax(scores / 4, dim=1), F.softmax(said / 4, dim=1), reduction="batchmean")
        return 16 * soft + F.cross_entropy(scores, labels) + F.mse_loss(self.fit(mine), known)


class Mixing(nn.Module):
    """Large depthwise kernels and products of the channels, at one resolution throughout."""

    def __init__(self, width: int = 384, *, depth: int = 10, side: int = 9, patch: int = 7) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, patch, patch), nn.GELU(), nn.BatchNorm2d(width)]
        self.enter = nn.Sequential(*layers)
        self.across = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, side, groups=width, padding="same"), nn.GELU(), nn.BatchNorm2d(width)
            )
            for _ in range(depth)
        )
        self.along = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.enter(images)
        for across, along in zip(self.across, self.along, strict=True):
            x = along(x + across(x))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class Shuffled(nn.Module):
    """Half of the channels goes through a small network, then the channels are shuffled."""

    def __init__(
        self, widths: tuple[int, ...] = (116, 232, 464), repeats: tuple[int, ...] = (4, 8, 4)
    ) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            *(nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU()),
            nn.MaxPool2d(3, 2, 1),
        )
        self.down, self.side, self.rest = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for a, b, count in zip((24, *widths), widths, repeats, strict=False):
            self.down.append(self._branch(a, b // 2, 2))
            self.side.append(
                nn.Sequential(
                    *(nn.Conv2d(a, a, 3, 2, 1, groups=a, bias=False), nn.BatchNorm2d(a)),
                    *(nn.Conv2d(a, b // 2, 1, bias=False), nn.BatchNorm2d(b // 2), nn.ReLU()),
                )
            )
            self.rest.append(nn.ModuleList(self._branch(b // 2, b // 2, 1) for _ in range(count - 1)))
        self.leave = nn.Sequential(
            nn.Conv2d(widths[-1], 1024, 1, bias=False), nn.BatchNorm2d(1024), nn.ReLU()
        )
        self.head = nn.Linear(1024, 1000)

    @staticmethod
    def _branch(a: int, b: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)),
            *(nn.Conv2d(b, b, 3, stride, 1, groups=b, bias=False), nn.BatchNorm2d(b)),
            *(nn.Conv2d(b, b, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)),
        )

    @staticmethod
    def _shuffle(x: Tensor) -> Tensor:
        batch, channels, high, wide = x.shape
        return x.view(batch, 2, channels // 2, high, wide).transpose(1, 2).reshape(x.shape)

    def forward(self, images: Tensor) -> Tensor:
        x = self.enter(images)
        for down, side, rest in zip(self.down, self.side, self.rest, strict=True):
            x = self._shuffle(torch.cat([side(x), down(x)], dim=1))
            for branch in rest:  # type: ignore[attr-defined]
                kept, changed = x.chunk(2, dim=1)
                x = self._shuffle(torch.cat([kept, branch(changed)], dim=1))
        scores: Tensor = self.head(self.leave(x).mean([2, 3]))
        return scores


class Wide(nn.Module):
    """Groups of channels in the middle of each block, channels last."""

    def __init__(self, widths: tuple[int, ...] = (256, 512, 1024), *, groups: int = 32) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.blocks, self.around = nn.ModuleList(), nn.ModuleList()
        for at, (a, b) in enumerate(zip((64, *widths), widths, strict=False)):
            for n in range(3):
                first, stride = a if n == 0 else b, 2 if n == 0 and at else 1
                self.blocks.append(
                    nn.Sequential(
                        *(nn.Conv2d(first, b // 2, 1, bias=False), nn.BatchNorm2d(b // 2), nn.ReLU()),
                        nn.Conv2d(b // 2, b // 2, 3, stride, 1, groups=groups, bias=False),
                        *(nn.BatchNorm2d(b // 2), nn.ReLU()),
                        *(nn.Conv2d(b // 2, b, 1, bias=False), nn.BatchNorm2d(b)),
                    )
                )
                self.around.append(
                    nn.Sequential(nn.Conv2d(first, b, 1, stride, bias=False), nn.BatchNorm2d(b))
                    if n == 0
                    else nn.Identity()
                )
        self.head = nn.Linear(widths[-1], 1000)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.enter(images.to(memory_format=torch.channels_last)), 3, 2, 1)
        for block, around in zip(self.blocks, self.around, strict=True):
            x = torch.relu(block(x) + around(x))
        scores: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


class Matched(nn.Module):
    """Points of two pictures look at their own and at the others, then are paired by turns of scaling."""

    def __init__(self, width: int = 256, *, layers: int = 6, rounds: int = 30) -> None:
        super().__init__()
        self.rounds = rounds
        self.places = nn.Sequential(
            *(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 128, 1)),
            *(nn.BatchNorm1d(128), nn.ReLU(), nn.Conv1d(128, width, 1)),
        )
        self.mixes = nn.ModuleList(
            nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(4)) for _ in range(layers)
        )
        self.wide = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv1d(2 * width, 2 * width, 1), nn.BatchNorm1d(2 * width), nn.ReLU()),
                nn.Conv1d(2 * width, width, 1),
            )
            for _ in range(layers)
        )
        self.last, self.bin = nn.Conv1d(width, width, 1), nn.Parameter(torch.tensor(1.0))

    def read(self, at: int, x: Tensor, source: Tensor) -> Tensor:
        batch, width, _ = x.shape
        query, key, value = (
            mix(each).view(batch, width // 4, 4, -1)
            for mix, each in zip(self.mixes[at], (x, source, source), strict=False)  # type: ignore[call-overload]
        )
        scores = torch.einsum("bdhn,bdhm->bhnm", query, key) / (width // 4) ** 0.5
        message = torch.einsum("bhnm,bdhm->bdhn", F.softmax(scores, dim=-1), value).contiguous()
        message = self.mixes[at][3](message.view(batch, width, -1))  # type: ignore[index]
        found: Tensor = self.wide[at](torch.cat([x, message], dim=1))
        return found

    def forward(self, first: Tensor, second: Tensor, at_first: Tensor, at_second: Tensor) -> Tensor:
        x, y = first + self.places(at_first), second + self.places(at_second)
        for at in range(len(self.mixes)):
            sources = (y, x) if at % 2 else (x, y)
            moved = [self.read(at, each, source) for each, source in zip((x, y), sources, strict=True)]
            x, y = x + moved[0], y + moved[1]
        scores = torch.einsum("bdn,bdm->bnm", self.last(x), self.last(y)).float() / x.shape[1] ** 0.5
        batch, num, _ = scores.shape
        column, row = self.bin.expand(batch, num, 1), self.bin.expand(batch, 1, num + 1)
        scores = torch.cat([torch.cat([scores, column], dim=-1), row], dim=1)
        up, down = (torch.zeros(batch, num + 1, device=scores.device) for _ in range(2))
        for _ in range(self.rounds):
            up = -torch.logsumexp(scores + down[:, None], dim=2)
            down = -torch.logsumexp(scores + up[..., None], dim=1)
        paired = scores + up[..., None] + down[:, None]
        return -paired.diagonal(dim1=1, dim2=2)[:, :-1].mean()


def _points(*, batch_size: int, points: int) -> dict[str, Tensor]:
    sizes = {"first": 256, "second": 256, "at_first": 3, "at_second": 3}
    return {name: torch.randn(batch_size, size, points) for name, size in sizes.items()}


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any = _own) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


DETECTOR = _subject("pyramid-detector", Detector, _scenes)
LABELLED = _subject("labelled-pixels", Labelled, _pixels, _class_loss)
QUEUE = _subject("queue", Queue, _two_views)
MARGINS = _subject("margins", Margins, _images)
TAUGHT = _subject("taught", Taught, _images)
MIXING = _subject("mixing-convolutions", Mixing, _images, _class_loss)
SHUFFLED = _subject("shuffled-channels", Shuffled, _images, _class_loss)
WIDE = _subject("grouped-channels-last", Wide, _images, _class_loss)
MATCHED = _subject("matched-points", Matched, _points)

CONFIGURATIONS: list[Configuration] = [
    DETECTOR.at(16, sizes={"image": 256}, precision="bf16", optimizer="sgd-momentum", clip_norm=10.0),
    LABELLED.at(8, sizes={"image": 256}, precision="fp32", optimizer="sgd-momentum"),
    LABELLED.at(16, sizes={"image": 256}, precision="fp16", optimizer="sgd-momentum"),
    QUEUE.at(128, sizes={"image": 128}, precision="bf16", optimizer="sgd-momentum"),
    MARGINS.at(128, sizes={"image": 112}, precision="fp16", optimizer="sgd-momentum", clip_norm=5.0),
    TAUGHT.at(64, sizes={"image": 160}, precision="tf32", optimizer="sgd-momentum"),
    MIXING.at(32, sizes={"image": 224}, precision="bf16"),
    SHUFFLED.at(128, sizes={"image": 192}, precision="fp32", optimizer="sgd-momentum"),
    WIDE.at(64, sizes={"image": 160}, precision="bf16", optimizer="sgd-momentum"),
    MATCHED.at(16, sizes={"points": 512}, precision="fp32", optimizer="adam"),
]
