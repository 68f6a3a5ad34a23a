"""Fourth unseen set, what makes or hears: critics, a vocoder, a ladder of latents, weather, and voices."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from benchmarks.memory.configuration import Configuration, Subject


def _class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def _own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


class Cycle(nn.Module):
    """Horses to zebras and back again, judged by two critics of patches."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.there, self.back = self._maker(width), self._maker(width)
        self.judges = nn.ModuleList(self._judge(width) for _ in range(2))

    @staticmethod
    def _maker(width: int) -> nn.Module:
        layers: list[nn.Module] = [nn.ReflectionPad2d(3), nn.Conv2d(3, width, 7), nn.InstanceNorm2d(width)]
        for a, b in ((width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.ReLU(True), nn.Conv2d(a, b, 3, 2, 1), nn.InstanceNorm2d(b)]
        layers.append(nn.ReLU(True))
        for _ in range(5):
            layers.append(Reflected(4 * width))
        for a, b in ((4 * width, 2 * width), (2 * width, width)):
            layers += [
                nn.ConvTranspose2d(a, b, 3, 2, 1, output_padding=1),
                *(nn.InstanceNorm2d(b), nn.ReLU(True)),
            ]
        return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())

    @staticmethod
    def _judge(width: int) -> nn.Module:
        layers: list[nn.Module] = []
        for at, (a, b) in enumerate(pairwise((3, width, 2 * width, 4 * width))):
            layers.append(nn.Conv2d(a, b, 4, 2, 1))
            if at:
                layers.append(nn.InstanceNorm2d(b))
            layers.append(nn.LeakyReLU(0.2, True))
        return nn.Sequential(*layers, nn.Conv2d(4 * width, 1, 4, padding=1))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        made = [self.there(first), self.back(second)]
        again = [self.back(made[0]), self.there(made[1])]
        same = F.l1_loss(self.there(second), second) + F.l1_loss(self.back(first), first)
        cycle = F.l1_loss(again[0], first) + F.l1_loss(again[1], second)
        fooled = torch.zeros((), device=first.device)
        for judge, each in zip(self.judges, made, strict=True):
            said = judge(each)
            fooled = fooled + F.mse_loss(said, torch.ones_like(said))
        return fooled + 10 * cycle + 5 * same


class Reflected(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width)]
            layers.append(nn.ReLU(True))
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.layers(x)
        return found


class Smooth(nn.Module):
    """A critic with bounded weights, whose slope at real images is penalised, and its generator."""

    def __init__(self, width: int = 64, *, latent: int = 128) -> None:
        super().__init__()
        self.latent = latent
        self.enter = nn.Linear(latent, 8 * width * 16)
        sizes = (8 * width, 8 * width, 4 * width, 2 * width, width)
        self.makers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.styles = nn.ModuleList(nn.Linear(latent, 2 * b) for b in sizes[1:])
        self.leave = nn.Conv2d(width, 3, 1)
        layers: list[nn.Module] = [nn.Conv2d(3, width, 1)]
        for a, b in pairwise(reversed(sizes)):
            layers += [nn.LeakyReLU(0.2), spectral_norm(nn.Conv2d(a, b, 3, padding=1)), nn.AvgPool2d(2)]
        self.critic = nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8 * width * 16, 1))

    def make(self, drawn: Tensor) -> Tensor:
        x = self.enter(drawn).view(drawn.shape[0], -1, 4, 4)
        for layer, style in zip(self.makers, self.styles, strict=True):
            x = F.instance_norm(layer(F.interpolate(x, scale_factor=2.0)))
            scale, shift = style(drawn)[..., None, None].chunk(2, dim=1)
            x = F.leaky_relu(x * (1 + scale) + shift, 0.2)
        return torch.tanh(self.leave(x))

    def forward(self, images: Tensor) -> Tensor:
        made = self.make(torch.randn(images.shape[0], self.latent, device=images.device))
        real = images.detach().requires_grad_()
        said = self.critic(real)
        (slope,) = torch.autograd.grad(said.sum(), real, create_graph=True)
        penalty = slope.square().sum(dim=(1, 2, 3)).mean()
        judged = F.softplus(self.critic(made.detach())).mean() + F.softplus(-said).mean()
        return judged + 5 * penalty + F.softplus(-self.critic(made)).mean()


def _two_views(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {name: torch.randn(batch_size, 3, image, image) for name in ("first", "second")}


def _plain_images(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {"images": torch.randn(batch_size, 3, image, image)}


class Vocoder(nn.Module):
    """Sound from a spectrogram, judged by critics that fold it into rows of several lengths."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.enter = weight_norm(nn.Conv1d(80, width, 7, padding=3))
        self.grow, self.refine = nn.ModuleList(), nn.ModuleList()
        for at, step in enumerate((8, 8, 2, 2)):
            a, b = width // 2**at, width // 2 ** (at + 1)
            self.grow.append(weight_norm(nn.ConvTranspose1d(a, b, 2 * step, step, step // 2)))
            self.refine.append(
                nn.ModuleList(
                    weight_norm(nn.Conv1d(b, b, 3, padding=spread, dilation=spread)) for spread in (1, 3, 5)
                )
            )
        self.leave = weight_norm(nn.Conv1d(width // 16, 1, 7, padding=3))
        self.critics = nn.ModuleList(self._critic() for _ in range(3))
        self.rows = (2, 3, 5)

    @staticmethod
    def _critic() -> nn.Module:
        layers: list[nn.Module] = []
        for a, b in pairwise((1, 32, 128, 256)):
            layers += [weight_norm(nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0))), nn.LeakyReLU(0.1)]
        return nn.ModuleList([*layers, weight_norm(nn.Conv2d(256, 1, (3, 1), 1, (1, 0)))])

    def judge(self, sound: Tensor) -> list[list[Tensor]]:
        found = []
        for rows, critic in zip(self.rows, self.critics, strict=True):
            short = -sound.shape[-1] % rows
            x = F.pad(sound, (0, short), "reflect").unflatten(-1, (-1, rows))
            features = []
            for layer in critic:  # type: ignore[attr-defined]
                x = layer(x)
                features.append(x)
            found.append(features)
        return found

    def forward(self, mels: Tensor, sound: Tensor) -> Tensor:
        x = self.enter(mels)
        for grow, refine in zip(self.grow, self.refine, strict=True):
            x = grow(F.leaky_relu(x, 0.1))
            for layer in refine:  # type: ignore[attr-defined]
                x = x + layer(F.leaky_relu(x, 0.1))
        made = torch.tanh(self.leave(F.leaky_relu(x)))
        told, real = self.judge(made), self.judge(sound)
        loss = 45 * F.l1_loss(made, sound)
        for a, b in zip(told, real, strict=True):
            loss = loss + ((1 - a[-1]) ** 2).mean()
            for mine, other in zip(a[:-1], b[:-1], strict=True):
                loss = loss + 2 * (mine - other.detach()).abs().mean()
        return loss


def _speech(*, batch_size: int, frames: int) -> dict[str, Tensor]:
    return {
        "mels": torch.randn(batch_size, 80, frames),
        "sound": torch.randn(batch_size, 1, 256 * frames).clamp(-1, 1),
    }


class Ladder(nn.Module):
    """Latents at several sizes, each drawn from what the larger pattern above it says."""

    def __init__(self, width: int = 128, *, latent: int = 16, levels: int = 3) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.up = nn.ModuleList(
            nn.Sequential(nn.SiLU(), nn.Conv2d(width, width, 4, 2, 1), nn.SiLU(), nn.Conv2d(width, width, 1))
            for _ in range(levels)
        )
        self.prior, self.posterior = (
            nn.ModuleList(nn.Conv2d(count * width, 2 * latent, 3, padding=1) for _ in range(levels))
            for count in (1, 2)
        )
        self.back = nn.ModuleList(nn.Conv2d(latent, width, 1) for _ in range(levels))
        self.down = nn.ModuleList(
            nn.Sequential(nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU()) for _ in range(levels)
        )
        self.first, self.leave = nn.Parameter(torch.zeros(1, width, 1, 1)), nn.Conv2d(width, 6, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x, kept = self.enter(images), []
        for layer in self.up:
            x = layer(x)
            kept.append(x)
        x = self.first.expand(images.shape[0], -1, *kept[-1].shape[-2:])
        apart = images.new_zeros(images.shape[0])
        for at, seen in enumerate(reversed(kept)):
            mean, scale = self.prior[at](x).float().chunk(2, dim=1)
            other, spread = self.posterior[at](torch.cat([x, seen], dim=1)).float().chunk(2, dim=1)
            drawn = other + torch.exp(0.5 * spread) * torch.randn_like(other)
            each = scale - spread + (spread.exp() + (other - mean) ** 2) / scale.exp() - 1
            apart = apart + 0.5 * each.sum(dim=(1, 2, 3))
            x = x + self.down[at](x + self.back[at](drawn))
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        mean, scale = self.leave(x).float().chunk(2, dim=1)
        scale = scale.clamp(-7, 7)
        wrong = 0.5 * (scale + (images - mean) ** 2 * torch.exp(-scale)).sum(dim=(1, 2, 3))
        return (wrong + apart).mean() / images[0].numel()


class Weather(nn.Module):
    """A recurrent cell of convolutions reads radar pictures and then draws the next ones."""

    def __init__(self, widths: tuple[int, ...] = (64, 64), *, ahead: int = 6) -> None:
        super().__init__()
        self.ahead, self.widths = ahead, widths
        self.see = nn.Conv2d(1, widths[0], 3, 2, 1)
        self.cells = nn.ModuleList(
            nn.Conv2d(a + b, 4 * b, 3, padding=1) for a, b in zip((widths[0], *widths), widths, strict=False)
        )
        self.draw = nn.ConvTranspose2d(widths[-1], 1, 4, 2, 1)

    def step(self, x: Tensor, states: list[tuple[Tensor, Tensor]]) -> Tensor:
        for at, cell in enumerate(self.cells):
            hidden, inside = states[at]
            enter, forget, leave, fresh = cell(torch.cat([x, hidden], dim=1)).chunk(4, dim=1)
            inside = torch.sigmoid(forget) * inside + torch.sigmoid(enter) * torch.tanh(fresh)
            x = torch.sigmoid(leave) * torch.tanh(inside)
            states[at] = (x, inside)
        return x

    def forward(self, film: Tensor) -> Tensor:
        batch, length, _, side, _ = film.shape
        states = [(film.new_zeros(batch, width, side // 2, side // 2),) * 2 for width in self.widths]
        frame, drawn = film[:, 0], []
        for at in range(length - 1):
            frame = film[:, at] if at < length - self.ahead else frame
            frame = torch.sigmoid(self.draw(self.step(self.see(frame), states)))
            drawn.append(frame)
        return F.l1_loss(torch.stack(drawn, dim=1).float(), film[:, 1:])


def _radar(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {"film": torch.rand(batch_size, 12, 1, image, image)}


class Speaker(nn.Module):
    """Who speaks: scaled groups of channels, weighed channels, and statistics over time with attention."""

    def __init__(self, width: int = 512, *, names: int = 7205) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv1d(80, width, 5, padding=2), nn.ReLU(), nn.BatchNorm1d(width))
        self.blocks = nn.ModuleList(Scaled(width, spread) for spread in (2, 3, 4))
        self.join = nn.Conv1d(3 * width, 1536, 1)
        self.attend = nn.Sequential(
            *(nn.Conv1d(3 * 1536, 128, 1), nn.ReLU(), nn.BatchNorm1d(128), nn.Tanh()),
            *(nn.Conv1d(128, 1536, 1), nn.Softmax(dim=2)),
        )
        self.norm, self.head = nn.BatchNorm1d(3072), nn.Linear(3072, 192)
        self.names = nn.Linear(192, names, bias=False)

    def forward(self, sound: Tensor, labels: Tensor) -> Tensor:
        x, total, kept = self.enter(sound), None, []
        for block in self.blocks:
            total = x if total is None else total + x
            x = block(total)
            kept.append(x)
        x = F.relu(self.join(torch.cat(kept, dim=1)))
        length = x.shape[-1]
        mean, spread = x.mean(dim=2, keepdim=True), torch.sqrt(x.var(dim=2, keepdim=True).clamp(min=1e-4))
        weights = self.attend(torch.cat([x, mean.repeat(1, 1, length), spread.repeat(1, 1, length)], dim=1))
        centre = (x * weights).sum(dim=2)
        around = torch.sqrt(((x**2 * weights).sum(dim=2) - centre**2).clamp(min=1e-4))
        return F.cross_entropy(self.names(self.head(self.norm(torch.cat([centre, around], dim=1)))), labels)


class Scaled(nn.Module):
    def __init__(self, width: int, spread: int, *, parts: int = 8) -> None:
        super().__init__()
        each = width // parts
        self.enter, self.leave = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)
        self.first, self.last = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        self.middle = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(each, each, 3, padding=spread, dilation=spread), nn.ReLU(), nn.BatchNorm1d(each)
            )
            for _ in range(parts - 1)
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool1d(1),
            nn.Conv1d(width, 128, 1),
            nn.ReLU(),
            nn.Conv1d(128, width, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.chunk(self.first(F.relu(self.enter(x))), len(self.middle) + 1, dim=1)
        found, last = [parts[-1]], None
        for part, layer in zip(parts, self.middle, strict=False):
            last = layer(part if last is None else last + part)
            found.append(last)
        inside = self.last(F.relu(self.leave(torch.cat(found, dim=1))))
        return x + inside * self.gate(inside)


def _voices(*, batch_size: int, frames: int) -> dict[str, Tensor]:
    return {
        "sound": torch.randn(batch_size, 80, frames),
        "labels": torch.randint(0, 7205, (batch_size,)),
    }


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any = _own) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


CYCLE = _subject("cycle", Cycle, _two_views)
SMOOTH = _subject("smooth-critic", Smooth, _plain_images)
VOCODER = _subject("vocoder", Vocoder, _speech)
LADDER = _subject("ladder", Ladder, _plain_images)
WEATHER = _subject("weather", Weather, _radar)
SPEAKER = _subject("speaker", Speaker, _voices)

CONFIGURATIONS: list[Configuration] = [
    CYCLE.at(2, sizes={"image": 192}, precision="fp32", optimizer="adam"),
    SMOOTH.at(64, sizes={"image": 64}, precision="fp32", optimizer="adam"),
    SMOOTH.at(128, sizes={"image": 64}, precision="bf16", optimizer="adam"),
    VOCODER.at(16, sizes={"frames": 32}, precision="fp32"),
    LADDER.at(64, sizes={"image": 64}, precision="fp32", optimizer="adamax", clip_norm=200.0),
    LADDER.at(64, sizes={"image": 64}, precision="bf16", optimizer="adam"),
    WEATHER.at(16, sizes={"image": 64}, precision="fp32", optimizer="adam"),
    WEATHER.at(32, sizes={"image": 64}, precision="bf16", optimizer="rmsprop"),
    SPEAKER.at(64, sizes={"frames": 200}, precision="fp32", optimizer="adam"),
    SPEAKER.at(128, sizes={"frames": 200}, precision="bf16"),
]
