"""Fourth unseen set, others: agents, experts, keys, processes, energies, densities and clicks."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject, token_ids


def _layers(*sizes: int, kind: type[nn.Module] = nn.SiLU) -> nn.Sequential:
    found: list[nn.Module] = []
    for a, b in pairwise(sizes):
        found += [nn.Linear(a, b), kind()]
    return nn.Sequential(*found[:-1])


def _own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


class Actor(nn.Module):
    """An agent of continuous moves: two critics, their slow copies, and the entropy of the moves."""

    def __init__(self, *, seen: int = 376, moves: int = 17, width: int = 1024) -> None:
        super().__init__()
        self.actor = _layers(seen, width, width, 2 * moves, kind=nn.ReLU)
        self.critics = nn.ModuleList(_layers(seen + moves, width, width, 1, kind=nn.ReLU) for _ in range(2))
        self.slow = copy.deepcopy(self.critics).requires_grad_(False)
        self.heat = nn.Parameter(torch.zeros(1))

    def act(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = self.actor(seen).chunk(2, dim=-1)
        found = torch.distributions.Normal(mean, scale.clamp(-5, 2).exp(), validate_args=False)
        drawn = found.rsample()
        move = torch.tanh(drawn)
        chance = found.log_prob(drawn) - torch.log(1 - move.pow(2) + 1e-6)
        return move, chance.sum(dim=-1, keepdim=True)

    def forward(self, seen: Tensor, moves: Tensor, gains: Tensor, after: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.critics.parameters(), strict=True):
                slow.mul_(0.995).add_(fast, alpha=0.005)
            move, chance = self.act(after)
            next_pair = torch.cat([after, move], dim=-1)
            least = torch.min(*(critic(next_pair) for critic in self.slow))
            aim = gains + 0.99 * (least - self.heat.exp() * chance)
        pair = torch.cat([seen, moves], dim=-1)
        wrong = sum(F.mse_loss(critic(pair), aim) for critic in self.critics)
        move, chance = self.act(seen)
        worth = torch.min(*(critic(torch.cat([seen, move], dim=-1)) for critic in self.critics))
        heat = self.heat.exp()
        chosen = (heat.detach() * chance - worth).mean()
        found: Tensor = wrong + chosen - (heat * (chance.detach() - 17)).mean()
        return found


def _steps(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "seen": torch.randn(batch_size, 376),
        "moves": torch.randn(batch_size, 17).tanh(),
        "gains": torch.randn(batch_size, 1),
        "after": torch.randn(batch_size, 376),
    }


class Quantiles(nn.Module):
    """The spread of what a move in a game is worth, read at drawn quantiles."""

    def __init__(self, *, moves: int = 18, num: int = 32) -> None:
        super().__init__()
        self.num = num
        self.online, self.slow = self._network(moves), self._network(moves)
        self.slow.requires_grad_(False)

    @staticmethod
    def _network(moves: int) -> nn.ModuleDict:
        see = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),
        )
        return nn.ModuleDict({"see": see, "share": nn.Linear(64, 3136), "head": _layers(3136, 512, moves)})

    def worth(self, part: nn.ModuleDict, frames: Tensor) -> tuple[Tensor, Tensor]:
        seen = part["see"](frames)
        share = torch.rand(frames.shape[0], self.num, 1, device=frames.device)
        waves = torch.cos(share * math.pi * torch.arange(64, device=frames.device))
        found = part["head"](seen[:, None] * F.relu(part["share"](waves)))
        return found, share

    def forward(self, frames: Tensor, after: Tensor, moves: Tensor, gains: Tensor) -> Tensor:
        frames, after = frames.float() / 255, after.float() / 255
        found, share = self.worth(self.online, frames)
        chosen = found.gather(2, moves[:, None, None].expand(-1, self.num, 1))
        with torch.no_grad():
            later, _ = self.worth(self.slow, after)
            best = later.mean(dim=1).argmax(dim=1)
            aim = gains[:, None] + 0.99 * later.gather(2, best[:, None, None].expand(-1, self.num, 1))[..., 0]
        apart = aim[:, None] - chosen
        near = torch.where(apart.abs() <= 1, 0.5 * apart**2, apart.abs() - 0.5)
        return ((share - (apart.detach() < 0).float()).abs() * near).sum(dim=1).mean()


def _frames(*, batch_size: int) -> dict[str, Tensor]:
    frames = [torch.randint(0, 256, (batch_size, 4, 84, 84), dtype=torch.uint8) for _ in range(2)]
    moves = torch.randint(0, 18, (batch_size,))
    return {"frames": frames[0], "after": frames[1], "moves": moves, "gains": torch.randn(batch_size)}


class Soft(nn.Module):
    """Experts that each read mixtures of all tokens, and tokens that read mixtures of all experts."""

    def __init__(self, width: int = 384, *, experts: int = 32, slots: int = 4, depth: int = 6) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.zeros(196, width))
        self.attend = nn.ModuleList(nn.MultiheadAttention(width, 6, batch_first=True) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.slots = nn.ParameterList(
            nn.Parameter(torch.randn(width, experts, slots) * 0.02) for _ in range(depth)
        )
        self.up = nn.ParameterList(
            nn.Parameter(torch.randn(experts, width, 2 * width) * 0.02) for _ in range(depth)
        )
        self.down = nn.ParameterList(
            nn.Parameter(torch.randn(experts, 2 * width, width) * 0.02) for _ in range(depth)
        )
        self.head = nn.Linear(width, 1000)

    def experts(self, at: int, x: Tensor) -> Tensor:
        scores = torch.einsum("btw,wes->btes", x, self.slots[at])
        batch, tokens = scores.shape[:2]
        gather = scores.softmax(dim=1)
        spread = scores.flatten(2).softmax(dim=2).view(batch, tokens, *scores.shape[2:])
        inside = torch.einsum("btw,btes->ebsw", x, gather).flatten(1, 2)
        inside = torch.bmm(F.gelu(torch.bmm(inside, self.up[at])), self.down[at])
        inside = inside.unflatten(1, (batch, -1))
        return torch.einsum("ebsw,btes->btw", inside, spread)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.enter(images).flatten(2).transpose(1, 2) + self.places
        for at, attend in enumerate(self.attend):
            inside = self.norms[2 * at](x)
            x = x + attend(inside, inside, inside, need_weights=False)[0]
            x = x + self.experts(at, self.norms[2 * at + 1](x))
        return F.cross_entropy(self.head(x.mean(dim=1)), labels)


def _pictures(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 3, 224, 224),
        "labels": torch.randint(0, 1000, (batch_size,)),
    }


class Keys(nn.Module):
    """A large memory, found by the best pairs of two short lists of keys, within a language model."""

    def __init__(self, width: int = 512, *, keys: int = 256, heads: int = 4, best: int = 32) -> None:
        super().__init__()
        self.heads, self.best, self.num = heads, best, keys
        self.embedding, self.head = nn.Embedding(12_000, width), nn.Linear(width, 12_000)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, batch_first=True, norm_first=True)
        self.first, self.second = (
            nn.TransformerEncoder(layer, 3, enable_nested_tensor=False) for _ in range(2)
        )
        self.query, self.norm = nn.Linear(width, heads * 256), nn.BatchNorm1d(heads * 256)
        self.keys = nn.Parameter(torch.randn(heads, 2, keys, 128) * 0.1)
        self.values = nn.EmbeddingBag(keys * keys, width, mode="sum")

    def remember(self, x: Tensor) -> Tensor:
        query = self.norm(self.query(x.flatten(0, 1))).view(-1, self.heads, 2, 128)
        scores = torch.einsum("nhpd,hpkd->nhpk", query, self.keys)
        some = scores.topk(self.best, dim=-1)
        pairs = (some.values[:, :, 0, :, None] + some.values[:, :, 1, None]).flatten(2)
        names = (some.indices[:, :, 0, :, None] * self.num + some.indices[:, :, 1, None]).flatten(2)
        chosen = pairs.topk(self.best, dim=-1)
        at = names.gather(2, chosen.indices).flatten(1)
        weights = chosen.values.float().softmax(dim=-1).flatten(1)
        found: Tensor = self.values(at, per_sample_weights=weights.to(self.values.weight.dtype))
        return found.view(x.shape)

    def forward(self, ids: Tensor) -> Tensor:
        text, words = ids[:, :-1], ids[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=ids.device)
        x = self.first(self.embedding(text), mask=mask, is_causal=True)
        x = self.second(x + self.remember(x), mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def _ids(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"ids": token_ids(batch_size, length + 1, vocabulary=12_000)}


class Process(nn.Module):
    """Functions guessed from some of their points: each wanted point looks at those that are known."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.known, self.drawn = _layers(3, width, width, width), _layers(3, width, width, width)
        self.key, self.shape = _layers(2, width, width), nn.Linear(width, 2 * width)
        self.attend = nn.MultiheadAttention(width, 8, batch_first=True)
        self.head = _layers(2 * width + 2, width, width, 2)

    def latent(self, pairs: Tensor) -> torch.distributions.Normal:
        mean, scale = self.shape(self.drawn(pairs).mean(dim=1)).float().chunk(2, dim=-1)
        return torch.distributions.Normal(mean, 0.1 + 0.9 * torch.sigmoid(scale), validate_args=False)

    def forward(self, places: Tensor, values: Tensor) -> Tensor:
        pairs = torch.cat([places, values], dim=-1)
        some = pairs[:, :200]
        prior, posterior = self.latent(some), self.latent(pairs)
        drawn = posterior.rsample()[:, None].expand(-1, places.shape[1], -1)
        seen = self.attend(self.key(places), self.key(some[..., :2]), self.known(some))[0]
        mean, scale = self.head(torch.cat([seen, drawn, places], dim=-1)).float().chunk(2, dim=-1)
        found = torch.distributions.Normal(mean, 0.1 + 0.9 * F.softplus(scale), validate_args=False)
        apart = torch.distributions.kl_divergence(posterior, prior).sum(dim=-1).mean() / places.shape[1]
        loss: Tensor = apart - found.log_prob(values).mean()
        return loss


def _functions(*, batch_size: int) -> dict[str, Tensor]:
    return {"places": torch.rand(batch_size, 784, 2), "values": torch.rand(batch_size, 784, 1)}


class Gaussian(nn.Module):
    """A Gaussian process on features that a network makes, by the Cholesky factor of its covariances."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.net = _layers(90, width, width, 16, kind=nn.ReLU)
        self.scale, self.noise = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.tensor(-2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.net(x) * self.scale.exp()
        covariance = torch.exp(-0.5 * torch.cdist(features, features).pow(2))
        covariance = covariance + self.noise.exp() * torch.eye(x.shape[0], device=x.device)
        factor = torch.linalg.cholesky(covariance)
        solved = torch.cholesky_solve(y[:, None], factor).squeeze(1)
        return (0.5 * (y * solved).sum() + factor.diagonal().log().sum()) / x.shape[0]


def _measured_points(*, batch_size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch_size, 90), "y": torch.randn(batch_size)}


class Energy(nn.Module):
    """An energy that is low at pictures and high at what walking downhill with noise arrives at."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in pairwise((3, width, 2 * width, 4 * width)):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.SiLU(), nn.Conv2d(b, b, 4, 2, 1), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * 16, 1))

    def forward(self, images: Tensor) -> Tensor:
        walked = torch.rand_like(images) * 2 - 1
        for _ in range(10):
            walked = walked.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.layers(walked).sum(), walked)
            walked = (walked - 10 * slope.clamp(-0.03, 0.03) + 0.005 * torch.randn_like(walked)).clamp(-1, 1)
        real, made = self.layers(images), self.layers(walked.detach())
        return (real - made).mean() + 0.1 * (real.square() + made.square()).mean()


def _small_pictures(*, batch_size: int) -> dict[str, Tensor]:
    return {"images": torch.rand(batch_size, 3, 32, 32) * 2 - 1}


class Density(nn.Module):
    """Columns of a table one after another, by masked layers whose order is turned round between them."""

    def __init__(self, *, columns: int = 63, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        degrees = torch.arange(width) % (columns - 1)
        self.register_buffer("enter_mask", (degrees[:, None] >= torch.arange(columns)).float())
        self.register_buffer("mask", (degrees[:, None] >= degrees).float())
        self.register_buffer("leave_mask", (torch.arange(columns).repeat(2)[:, None] > degrees).float())
        self.enter = nn.ModuleList(nn.Linear(columns, width) for _ in range(depth))
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.leave = nn.ModuleList(nn.Linear(width, 2 * columns) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(columns, affine=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        density = x.new_zeros(x.shape[0])
        for enter, middle, leave, norm in zip(self.enter, self.middle, self.leave, self.norms, strict=True):
            h = F.relu(F.linear(x, enter.weight * self.enter_mask, enter.bias))
            h = F.relu(F.linear(h, middle.weight * self.mask, middle.bias))
            shift, scale = F.linear(h, leave.weight * self.leave_mask, leave.bias).chunk(2, dim=1)
            scale = torch.tanh(scale)
            x = norm((x - shift) * torch.exp(-scale)).flip(1)
            density = density - scale.sum(dim=1)
        found: Tensor = (0.5 * x.square().sum(dim=1) - density).mean()
        return found


def _rows(*, batch_size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch_size, 63)}


class Clicks(nn.Module):
    """Pairs of many sparse fields by their sums of squares, crossed features, and a plain network."""

    def __init__(self, *, fields: int = 39, rows: int = 20_000, width: int = 16) -> None:
        super().__init__()
        self.rows = rows
        self.factors, self.alone = nn.Embedding(fields * rows, width), nn.Embedding(fields * rows, 1)
        total = fields * width
        self.cross = nn.ModuleList(nn.Linear(total, total) for _ in range(3))
        layers: list[nn.Module] = []
        for a, b in pairwise((total, 400, 400, 400)):
            layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.5)]
        self.deep = nn.Sequential(*layers)
        self.head = nn.Linear(400 + total, 1)

    def forward(self, names: Tensor, clicked: Tensor) -> Tensor:
        names = names + torch.arange(names.shape[1], device=names.device) * self.rows
        factors = self.factors(names)
        pairs = 0.5 * (factors.sum(dim=1).square() - factors.square().sum(dim=1)).sum(dim=1)
        flat = crossed = factors.flatten(1)
        for layer in self.cross:
            crossed = flat * layer(crossed) + crossed
        score = self.head(torch.cat([self.deep(flat), crossed], dim=1)).squeeze(1)
        score = score + pairs + self.alone(names).sum(dim=(1, 2))
        return F.binary_cross_entropy_with_logits(score, clicked)


def _clicked(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "names": token_ids(batch_size, 39, vocabulary=20_000),
        "clicked": (torch.rand(batch_size) > 0.8).float(),
    }


class Fields(nn.Module):
    """A picture from a network whose weights another network has made from that picture."""

    def __init__(self, *, width: int = 64, latent: int = 256) -> None:
        super().__init__()
        self.sizes = [(width, 2), (width, width), (width, width), (3, width)]
        layers: list[nn.Module] = []
        for a, b in pairwise((3, 32, 64, 128, latent)):
            layers += [nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(8, b), nn.SiLU()]
        self.see = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.make = nn.ModuleList(nn.Linear(latent, a * b + a) for a, b in self.sizes)
        lines = torch.linspace(-1, 1, 64)
        self.register_buffer("grid", torch.cartesian_prod(lines, lines))

    def forward(self, images: Tensor) -> Tensor:
        latent = self.see(images)
        x = self.grid.expand(images.shape[0], -1, -1)
        for at, ((a, b), make) in enumerate(zip(self.sizes, self.make, strict=True)):
            weight, bias = make(latent).split([a * b, a], dim=1)
            x = torch.baddbmm(bias[:, None], x.to(weight.dtype), weight.view(-1, a, b).transpose(1, 2))
            if at < len(self.sizes) - 1:
                x = torch.sin(3 * x)
        return F.mse_loss(x.float(), images.flatten(2).transpose(1, 2))


def _field_pictures(*, batch_size: int) -> dict[str, Tensor]:
    return {"images": torch.rand(batch_size, 3, 64, 64)}


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any = _own) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


ACTOR = _subject("actor", Actor, _steps)
QUANTILES = _subject("quantiles", Quantiles, _frames)
SOFT = _subject("soft-experts", Soft, _pictures)
KEYS = _subject("product-keys", Keys, _ids)
PROCESS = _subject("process", Process, _functions)
GAUSSIAN = _subject("deep-kernel", Gaussian, _measured_points)
ENERGY = _subject("energy", Energy, _small_pictures)
DENSITY = _subject("masked-density", Density, _rows)
CLICKS = _subject("crossed-clicks", Clicks, _clicked)
FIELDS = _subject("made-networks", Fields, _field_pictures)

CONFIGURATIONS: list[Configuration] = [
    ACTOR.at(16384, precision="fp32", optimizer="adam"),
    QUANTILES.at(512, precision="fp32", optimizer="adam", clip_norm=10.0),
    SOFT.at(64, precision="bf16", clip_norm=1.0),
    KEYS.at(16, sizes={"length": 256}, precision="fp32", optimizer="adam"),
    PROCESS.at(32, precision="fp32", optimizer="adam"),
    PROCESS.at(64, precision="bf16"),
    GAUSSIAN.at(4096, precision="fp32", optimizer="adam"),
    ENERGY.at(256, precision="fp32", optimizer="adam", clip_norm=0.1),
    DENSITY.at(8192, precision="fp32", optimizer="adam", clip_norm=5.0),
    CLICKS.at(8192, precision="fp32", optimizer="adam"),
    FIELDS.at(128, precision="fp16", optimizer="nadam"),
]
