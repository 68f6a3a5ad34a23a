"""Sixth unseen set, images: small ones, organs, streets, noise, pairs, faces, views, games, joints."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject


def _own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


def _normed(a: int, b: int, *, stride: int = 1, side: int = 3, spread: int = 1) -> nn.Sequential:
    padding = spread * (side // 2)
    convolution = nn.Conv2d(a, b, side, stride, padding, dilation=spread, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Two convolutions around which the input passes."""

    def __init__(self, a: int, b: int, *, stride: int = 1, spread: int = 1) -> None:
        super().__init__()
        self.one = _normed(a, b, stride=stride, spread=spread)
        self.two = nn.Conv2d(b, b, 3, padding=spread, dilation=spread, bias=False)
        self.norm = nn.BatchNorm2d(b)
        same = stride == 1 and a == b
        self.around = nn.Identity() if same else nn.Sequential(nn.Conv2d(a, b, 1, stride), nn.BatchNorm2d(b))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.two(self.one(x))) + self.around(x))


def _stages(first: int, sizes: tuple[int, ...], *, depth: int = 2) -> nn.Sequential:
    found: list[nn.Module] = []
    for at, (a, b) in enumerate(pairwise((first, *sizes))):
        found += [
            Residual(a if not each else b, b, stride=2 if at and not each else 1) for each in range(depth)
        ]
    return nn.Sequential(*found)


class SmallImages(nn.Module):
    """Images of 32 pixels in ten kinds, a residual network that begins without pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_normed(3, 64), _stages(64, (64, 128, 256, 512)))
        self.head = nn.Linear(512, 10)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        scores = self.head(self.body(images).mean(dim=(2, 3)))
        return F.cross_entropy(scores.float(), labels, label_smoothing=0.1)


def _small(*, batch_size: int) -> dict[str, Tensor]:
    return {"images": torch.randn(batch_size, 3, 32, 32), "labels": torch.randint(0, 10, (batch_size,))}


class Organs(nn.Module):
    """A mask of four organs: down by pooling, up by transposed convolutions, the two joined (U-Net)."""

    def __init__(self, width: int = 32, *, depth: int = 4) -> None:
        super().__init__()
        sizes = [width * 2**at for at in range(depth + 1)]
        self.down = nn.ModuleList(
            nn.Sequential(_normed(a, b), _normed(b, b)) for a, b in pairwise([1, *sizes])
        )
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, 2) for a in reversed(sizes[:-1]))
        self.up = nn.ModuleList(nn.Sequential(_normed(2 * a, a), _normed(a, a)) for a in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        x, kept = images, []
        for at, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if at else x)
            kept.append(x)
        kept.pop()
        for grow, layer in zip(self.grow, self.up, strict=True):
            x = layer(torch.cat([kept.pop(), grow(x)], dim=1))
        scores = self.head(x).float()
        chance = scores.softmax(dim=1)
        truth = F.one_hot(masks, 4).permute(0, 3, 1, 2).float()
        shared = (chance * truth).sum(dim=(2, 3))
        overlap = (2 * shared + 1) / (chance.sum(dim=(2, 3)) + truth.sum(dim=(2, 3)) + 1)
        return F.cross_entropy(scores, masks) + 1 - overlap.mean()


def _scans(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 1, image, image),
        "masks": torch.randint(0, 4, (batch_size, image, image)),
    }


class Streets(nn.Module):
    """A kind for each pixel of a street: spread convolutions side by side, then enlarged (DeepLab)."""

    def __init__(self, *, kinds: int = 19) -> None:
        super().__init__()
        self.enter = nn.Sequential(_normed(3, 64, stride=2, side=7), nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential(_stages(64, (64, 128, 256)), Residual(256, 512, spread=2))
        self.sides = nn.ModuleList(_normed(512, 256, spread=spread) for spread in (6, 12, 18))
        self.alone, self.whole = _normed(512, 256, side=1), nn.Conv2d(512, 256, 1)
        self.join = nn.Sequential(_normed(5 * 256, 256, side=1), nn.Dropout(0.5))
        self.head = nn.Conv2d(256, kinds, 1)

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        x = self.body(self.enter(images))
        whole = F.relu(self.whole(F.adaptive_avg_pool2d(x, 1))).expand(-1, -1, *x.shape[2:])
        x = self.join(torch.cat([self.alone(x), *(side(x) for side in self.sides), whole], dim=1))
        scores = F.interpolate(self.head(x), size=images.shape[2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(scores.float(), masks, ignore_index=255)


def _streets(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 3, image, image),
        "masks": torch.randint(0, 19, (batch_size, image, image)),
    }


class Noise(nn.Module):
    """The noise of a photograph, by plain convolutions with norms (DnCNN)."""

    def __init__(self, width: int = 64, *, depth: int = 15) -> None:
        super().__init__()
        inside = [_normed(width, width) for _ in range(depth)]
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(inplace=True),
            *inside,
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def forward(self, clean: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.body(clean + 0.1 * noise), noise)


def _photographs(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {name: torch.randn(batch_size, 3, image, image) for name in ("clean", "noise")}


def _halved(a: int, b: int, *, norm: bool = True) -> nn.Sequential:
    rest: list[nn.Module] = [nn.InstanceNorm2d(b)] if norm else []
    return nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), *rest, nn.LeakyReLU(0.2))


def _doubled(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.InstanceNorm2d(b), nn.ReLU())


class PairedImages(nn.Module):
    """One image from another, and a critic of patches that sees both (pix2pix)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width, 8 * width]
        self.down = nn.ModuleList(_halved(a, b, norm=a > 3) for a, b in pairwise([3, *sizes]))
        ups = [8 * width, 16 * width, 8 * width, 4 * width]
        self.up = nn.ModuleList(_doubled(a, b) for a, b in zip(ups, reversed(sizes[:-1]), strict=True))
        self.leave = nn.ConvTranspose2d(2 * width, 3, 4, 2, 1)
        self.critic = nn.Sequential(
            _halved(6, width, norm=False), _halved(width, 2 * width), nn.Conv2d(2 * width, 1, 4, 1, 1)
        )

    def forward(self, given: Tensor, wanted: Tensor) -> Tensor:
        x, kept = given, []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        kept.pop()
        for grow in self.up:
            x = torch.cat([grow(x), kept.pop()], dim=1)
        made = torch.tanh(self.leave(x))
        real = self.critic(torch.cat([given, wanted], dim=1))
        false = self.critic(torch.cat([given, made], dim=1))
        apart = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        return (
            apart
            + F.binary_cross_entropy_with_logits(false, torch.ones_like(false))
            + 100 * F.l1_loss(made.float(), wanted)
        )


def _pairs(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {name: torch.randn(batch_size, 3, image, image) for name in ("given", "wanted")}


class Faces(nn.Module):
    """Faces as normal distributions and back (a variational autoencoder)."""

    def __init__(self, width: int = 64, *, latent: int = 256) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width, 8 * width]
        self.down = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.GELU())
                for a, b in pairwise(sizes)
            )
        )
        self.centre, self.spread = nn.Linear(16 * sizes[-1], latent), nn.Linear(16 * sizes[-1], latent)
        self.enter = nn.Linear(latent, 16 * sizes[-1])
        grown = [
            nn.Sequential(
                nn.Upsample(scale_factor=2), nn.Conv2d(b, a, 3, padding=1), nn.BatchNorm2d(a), nn.GELU()
            )
            for a, b in reversed(list(pairwise([width, *sizes[1:]])))
        ]
        self.up, self.leave = nn.Sequential(*grown), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.down(images).flatten(1)
        centre, spread = self.centre(x), self.spread(x)
        code = centre + torch.randn_like(spread) * torch.exp(0.5 * spread)
        made = torch.sigmoid(self.leave(self.up(self.enter(code).view(code.shape[0], -1, 4, 4))))
        far = -0.5 * (1 + spread - centre**2 - spread.exp()).sum(dim=1).mean()
        return F.mse_loss(made, images, reduction="sum") / images.shape[0] + far


def _faces(*, batch_size: int) -> dict[str, Tensor]:
    return {"images": torch.rand(batch_size, 3, 64, 64)}


class Views(nn.Module):
    """Two views of each image are alike, those of others are not (SimCLR)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _normed(3, width, stride=2), _stages(width, (width, 2 * width, 4 * width, 8 * width))
        )
        self.head = nn.Sequential(nn.Linear(8 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 128))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        codes = self.head(self.body(torch.cat([one, two])).mean(dim=(2, 3)))
        codes = F.normalize(codes.float(), dim=-1)
        alike = codes @ codes.T / 0.2
        alike = alike.masked_fill(torch.eye(len(alike), dtype=torch.bool, device=alike.device), -1e9)
        places = torch.arange(len(alike), device=alike.device).roll(len(one))
        return F.cross_entropy(alike, places)


def _views(*, batch_size: int) -> dict[str, Tensor]:
    return {name: torch.randn(batch_size, 3, 96, 96) for name in ("one", "two")}


class Moves(nn.Module):
    """What each move of a game is worth, from its last four pictures; a slow copy says what follows (DQN)."""

    def __init__(self, *, moves: int = 18) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
        )
        self.state = nn.Sequential(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 1))
        self.better = nn.Sequential(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, moves))
        slow = nn.ModuleList([self.see, self.state, self.better])
        self.slow = copy.deepcopy(slow).requires_grad_(False)

    @staticmethod
    def worth(see: nn.Module, state: nn.Module, better: nn.Module, pictures: Tensor) -> Tensor:
        seen = see(pictures.float() / 255)
        moves = better(seen)
        found: Tensor = state(seen) + moves - moves.mean(dim=1, keepdim=True)
        return found

    def forward(self, before: Tensor, after: Tensor, moves: Tensor, gains: Tensor, ends: Tensor) -> Tensor:
        found = self.worth(self.see, self.state, self.better, before).gather(1, moves)[:, 0]
        with torch.no_grad():
            best = self.worth(self.see, self.state, self.better, after).argmax(dim=1, keepdim=True)
            later = self.worth(*self.slow, after).gather(1, best)[:, 0]
        return F.smooth_l1_loss(found, gains + 0.99 * later * (1 - ends))


def _games(*, batch_size: int) -> dict[str, Tensor]:
    pictures = (batch_size, 4, 84, 84)
    return {
        "before": torch.randint(0, 256, pictures, dtype=torch.uint8),
        "after": torch.randint(0, 256, pictures, dtype=torch.uint8),
        "moves": torch.randint(0, 18, (batch_size, 1)),
        "gains": torch.randn(batch_size),
        "ends": torch.zeros(batch_size),
    }


class Branch(nn.Module):
    """Kernels of several sides beside each other, joined (Inception)."""

    def __init__(self, a: int, sizes: tuple[int, int, int, int]) -> None:
        super().__init__()
        one, three, five, pooled = sizes
        self.one = _normed(a, one, side=1)
        self.three = nn.Sequential(_normed(a, three // 2, side=1), _normed(three // 2, three))
        self.five = nn.Sequential(_normed(a, five // 2, side=1), _normed(five // 2, five, side=5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), _normed(a, pooled, side=1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], dim=1)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = ((64, 128, 32, 32), (128, 192, 96, 64), (192, 256, 96, 96), (256, 320, 128, 128))
        found: list[nn.Module] = [_normed(3, 64, stride=2, side=7), nn.MaxPool2d(3, 2, 1), _normed(64, 192)]
        a = 192
        for size in sizes:
            found += [nn.MaxPool2d(3, 2, 1), Branch(a, size), Branch(sum(size), size)]
            a = sum(size)
        self.body, self.head = nn.Sequential(*found), nn.Linear(a, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.body(images).mean(dim=(2, 3)), 0.4, self.training)
        return F.cross_entropy(self.head(x).float(), labels)


def _photos(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 3, image, image),
        "labels": torch.randint(0, 1000, (batch_size,)),
    }


class Joints(nn.Module):
    """A map of heat for each joint of a body, by three transposed convolutions on a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(_normed(3, 64, stride=2, side=7), nn.MaxPool2d(3, 2, 1))
        self.body = _stages(64, (64, 128, 256, 512))
        grown = [
            nn.Sequential(nn.ConvTranspose2d(a, 256, 4, 2, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU())
            for a in (512, 256, 256)
        ]
        self.head = nn.Sequential(*grown, nn.Conv2d(256, 17, 1))

    def forward(self, images: Tensor, heat: Tensor, seen: Tensor) -> Tensor:
        found = self.head(self.body(self.enter(images))).float()
        return 0.5 * ((found - heat) ** 2 * seen[:, :, None, None]).mean()


def _bodies(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 3, 256, 192),
        "heat": torch.rand(batch_size, 17, 64, 48),
        "seen": torch.ones(batch_size, 17),
    }


class Triplets(nn.Module):
    """A picture is nearer to one of its own than to another by a margin."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _normed(3, width, stride=2, side=5), _stages(width, (width, 2 * width, 4 * width), depth=3)
        )
        self.head = nn.Linear(4 * width, 128)

    def encode(self, images: Tensor) -> Tensor:
        return F.normalize(self.head(F.adaptive_max_pool2d(self.body(images), 1).flatten(1)).float(), dim=-1)

    def forward(self, shown: Tensor, own: Tensor, other: Tensor) -> Tensor:
        return F.triplet_margin_loss(*(self.encode(each) for each in (shown, own, other)), margin=0.3)


def _triplets(*, batch_size: int) -> dict[str, Tensor]:
    return {name: torch.randn(batch_size, 3, 128, 128) for name in ("shown", "own", "other")}


class ReadLines(nn.Module):
    """The letters of a line of print: convolutions, a recurrent stack, and every way to align (CRNN)."""

    def __init__(self, *, letters: int = 80) -> None:
        super().__init__()
        self.see = nn.Sequential(
            _normed(1, 64), nn.MaxPool2d(2), _normed(64, 128), nn.MaxPool2d(2), _normed(128, 256),
            _normed(256, 256), nn.MaxPool2d((2, 1)), _normed(256, 512), nn.MaxPool2d((4, 1)),
        )  # fmt: skip
        self.read = nn.LSTM(512, 256, num_layers=2, bidirectional=True)
        self.head = nn.Linear(512, letters)

    def forward(self, lines: Tensor, letters: Tensor, counts: Tensor) -> Tensor:
        x = self.see(lines)[:, :, 0].permute(2, 0, 1)
        chance = self.head(self.read(x)[0]).float().log_softmax(dim=-1)
        lengths = torch.full((x.shape[1],), x.shape[0], dtype=torch.long, device=x.device)
        return F.ctc_loss(chance, letters, lengths, counts, zero_infinity=True)


def _lines(*, batch_size: int, width: int) -> dict[str, Tensor]:
    return {
        "lines": torch.randn(batch_size, 1, 32, width),
        "letters": torch.randint(1, 80, (batch_size, 25)),
        "counts": torch.full((batch_size,), 20),
    }


class Clips(nn.Module):
    """What happens in a film: a small network for each picture, then a recurrent one over them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.see = nn.Sequential(
            _normed(3, width, stride=2), _stages(width, (width, 2 * width, 4 * width), depth=1)
        )
        self.follow = nn.GRU(4 * width, 256, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(256, 101)

    def forward(self, films: Tensor, labels: Tensor) -> Tensor:
        seen = self.see(films.flatten(0, 1)).mean(dim=(2, 3)).unflatten(0, films.shape[:2])
        return F.cross_entropy(self.head(self.follow(seen)[0][:, -1]).float(), labels)


def _clips(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "films": torch.randn(batch_size, 16, 3, 112, 112),
        "labels": torch.randint(0, 101, (batch_size,)),
    }


def _subject(family: str, make_model: type[nn.Module], make_batch: object) -> Subject:
    assert callable(make_batch)
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=_own)


SMALL_IMAGES = _subject("small-images", SmallImages, _small)
ORGANS = _subject("organs", Organs, _scans)
STREETS = _subject("streets", Streets, _streets)
NOISE = _subject("noise", Noise, _photographs)
PAIRED_IMAGES = _subject("paired-images", PairedImages, _pairs)
FACES = _subject("faces", Faces, _faces)
VIEWS = _subject("views", Views, _views)
MOVES = _subject("moves", Moves, _games)
BRANCHES = _subject("branches", Branches, _photos)
JOINTS = _subject("joints", Joints, _bodies)
TRIPLETS = _subject("triplets", Triplets, _triplets)
READ_LINES = _subject("read-lines", ReadLines, _lines)
CLIPS = _subject("clips", Clips, _clips)

CONFIGURATIONS: list[Configuration] = [
    SMALL_IMAGES.at(512, precision="bf16", optimizer="sgd-nesterov"),
    ORGANS.at(16, sizes={"image": 256}, precision="fp32", optimizer="adam"),
    STREETS.at(8, sizes={"image": 384}, precision="bf16", optimizer="sgd-momentum"),
    NOISE.at(64, sizes={"image": 64}, precision="fp32", optimizer="adam"),
    PAIRED_IMAGES.at(8, sizes={"image": 256}, precision="fp32", optimizer="adam"),
    FACES.at(256, precision="fp32", optimizer="adam"),
    VIEWS.at(128, precision="bf16", optimizer="sgd-momentum"),
    MOVES.at(512, precision="fp32", clip_norm=10.0, optimizer="adam"),
    BRANCHES.at(64, sizes={"image": 224}, precision="bf16", optimizer="rmsprop"),
    JOINTS.at(32, precision="fp16", optimizer="adam"),
    TRIPLETS.at(32, precision="fp32", optimizer="adamw"),
    READ_LINES.at(64, sizes={"width": 256}, precision="fp32", clip_norm=5.0, optimizer="adadelta"),
    CLIPS.at(16, precision="bf16", accumulation=2, optimizer="adamw-schedule"),
    SMALL_IMAGES.at(128, precision="fp32", optimizer="adamw-ema"),
    ORGANS.at(32, sizes={"image": 192}, precision="fp16", clip_norm=1.0, optimizer="sgd-nesterov"),
    BRANCHES.at(32, sizes={"image": 224}, precision="fp32", optimizer="sgd-momentum"),
]
