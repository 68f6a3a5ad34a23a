"""Fourth unseen set, series: forecasts with chances, what was explained away, music, ticks, items."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.memory.configuration import Configuration, Subject, token_ids

VOCABULARY = 10_000


def _class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


class Chances(nn.Module):
    """A recurrent forecast whose answer at each hour is the shape of a Student distribution."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.of_series = nn.Embedding(400, 20)
        self.read = nn.LSTM(1 + 4 + 20, width, num_layers=3, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, past: Tensor, times: Tensor, series: Tensor) -> Tensor:
        scale = past.abs().mean(dim=1, keepdim=True) + 1
        of_series = self.of_series(series)[:, None].expand(-1, past.shape[1], -1)
        x = torch.cat([(past / scale)[..., None], times, of_series], dim=-1)
        found: Tensor = self.head(self.read(x)[0])
        return found


def _hours(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "past": torch.rand(batch_size, length + 1),
        "times": torch.randn(batch_size, length, 4),
        "series": torch.randint(0, 400, (batch_size,)),
    }


def _chance_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    past = batch["past"]
    freedom, centre, spread = model(past[:, :-1], batch["times"], batch["series"]).float().unbind(dim=-1)
    found = torch.distributions.StudentT(
        2 + F.softplus(freedom), centre, F.softplus(spread) + 1e-4, validate_args=False
    )
    loss: Tensor = -found.log_prob(past[:, 1:]).mean()
    return loss


class Stacks(nn.Module):
    """Blocks that each explain a part of the past away and add a part of the future."""

    def __init__(self, *, past: int, ahead: int, width: int = 512, blocks: int = 24) -> None:
        super().__init__()
        self.ahead = ahead
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(past, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
                *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, past + ahead)),
            )
            for _ in range(blocks)
        )

    def forward(self, past: Tensor) -> Tensor:
        future = past.new_zeros(past.shape[0], self.ahead)
        for block in self.blocks:
            back, forth = block(past).split([past.shape[1], self.ahead], dim=1)
            past, future = past - back, future + forth
        return future


def _windows(*, batch_size: int) -> dict[str, Tensor]:
    return {"past": torch.rand(batch_size, 168) + 1, "after": torch.rand(batch_size, 24) + 1}


def _relative_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found, after = model(batch["past"]), batch["after"]
    return (200 * (found - after).abs() / (found.abs().detach() + after.abs() + 1e-3)).mean()


class Causal(nn.Module):
    """Convolutions that see the past alone, twice as far in each layer, with weights split by their norm."""

    def __init__(self, channels: list[int], *, side: int = 7) -> None:
        super().__init__()
        self.layers, self.skips = nn.ModuleList(), nn.ModuleList()
        for at, (a, b) in enumerate(itertools.pairwise(channels)):
            spread = 2**at
            cut = (side - 1) * spread
            layers: list[nn.Module] = []
            for c in (a, b):
                layers += [
                    nn.ConstantPad1d((cut, 0), 0.0),
                    weight_norm(nn.Conv1d(c, b, side, dilation=spread)),
                    nn.ReLU(),
                    nn.Dropout(0.2),
                ]
            self.layers.append(nn.Sequential(*layers))
            self.skips.append(nn.Conv1d(a, b, 1) if a != b else nn.Identity())
        self.head = nn.Linear(channels[-1], 88)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for layer, skip in zip(self.layers, self.skips, strict=True):
            x = F.relu(layer(x) + skip(x))
        found: Tensor = self.head(x.transpose(1, 2))
        return found


def _music(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"keys": (torch.rand(batch_size, length + 1, 88) > 0.9).float()}


def _music_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    keys = batch["keys"]
    return F.binary_cross_entropy_with_logits(model(keys[:, :-1]), keys[:, 1:])


class Inverted(nn.Module):
    """Each series of many is one token: attention between series, not between hours."""

    def __init__(self, *, past: int = 96, ahead: int = 96, width: int = 256) -> None:
        super().__init__()
        self.enter, self.drop = nn.Linear(past, width), nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(width, 8, 512, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, nn.LayerNorm(width))
        self.head = nn.Linear(width, ahead)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True).detach()
        spread = torch.sqrt(torch.var(x - mean, dim=1, keepdim=True, unbiased=False) + 1e-5)
        inside = self.drop(self.enter(((x - mean) / spread).permute(0, 2, 1)))
        found: Tensor = self.head(self.layers(inside)).permute(0, 2, 1)
        return found * spread + mean


def _many_series(*, batch_size: int) -> dict[str, Tensor]:
    return {"past": torch.randn(batch_size, 96, 321), "after": torch.randn(batch_size, 96, 321)}


def _mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.MSELoss()(model(batch["past"]), batch["after"])


class Spike(torch.autograd.Function):
    """A step forward, the slope of a sigmoid backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] / (10 * x.abs() + 1) ** 2


class Spiking(nn.Module):
    """Neurons that add up what comes in, leak, fire and start again, for many ticks."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(700, width), nn.Linear(width, width)
        self.back = nn.Linear(width, width, bias=False)
        self.head, self.leak = nn.Linear(width, 20), nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        charge = [x.new_zeros(x.shape[0], self.leak.shape[0]) for _ in range(2)]
        fired = [torch.zeros_like(each) for each in charge]
        keep, total = torch.sigmoid(self.leak), 0.0
        for tick in x.unbind(dim=1):
            charge[0] = keep * charge[0] * (1 - fired[0].detach()) + self.first(tick) + self.back(fired[0])
            fired[0] = Spike.apply(charge[0] - 1)
            charge[1] = keep * charge[1] * (1 - fired[1].detach()) + self.second(fired[0])
            fired[1] = Spike.apply(charge[1] - 1)
            total = total + self.head(fired[1])
        return total / x.shape[1]  # type: ignore[return-value]


def _spikes(*, batch_size: int, ticks: int) -> dict[str, Tensor]:
    return {
        "x": (torch.rand(batch_size, ticks, 700) > 0.97).float(),
        "labels": torch.randint(0, 20, (batch_size,)),
    }


class Sellers(nn.Module):
    """What a buyer looks at next: attention over what was looked at before, against sampled others."""

    def __init__(self, width: int = 128, *, items: int = 200_000, length: int = 100) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attend = nn.ModuleList(nn.MultiheadAttention(width, 2, dropout=0.2) for _ in range(2))
        self.wide = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, width, 1)) for _ in range(2)
        )

    def forward(self, seen: Tensor, right: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
        length = seen.shape[1]
        x = self.items(seen) * math.sqrt(self.items.embedding_dim)
        x = F.dropout(x + self.places(torch.arange(length, device=seen.device)), 0.2, self.training)
        closed = ~torch.tril(torch.ones(length, length, dtype=torch.bool, device=seen.device))
        for at in range(2):
            x = x.transpose(0, 1)
            asked = self.norms[2 * at](x)
            x = (asked + self.attend[at](asked, x, x, attn_mask=closed)[0]).transpose(0, 1)
            x = self.norms[2 * at + 1](x)
            x = x + self.wide[at](x.transpose(1, 2)).transpose(1, 2)
        return (x * self.items(right)).sum(-1), (x * self.items(wrong)).sum(-1)


def _sold(*, batch_size: int) -> dict[str, Tensor]:
    return {name: token_ids(batch_size, 100, vocabulary=200_000) for name in ("seen", "right", "wrong")}


def _sold_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    right, wrong = model(batch["seen"], batch["right"], batch["wrong"])
    ones, zeros = torch.ones_like(right), torch.zeros_like(wrong)
    return F.binary_cross_entropy_with_logits(right, ones) + F.binary_cross_entropy_with_logits(wrong, zeros)


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


CHANCES = _subject("chances", Chances, _hours, _chance_loss)
STACKS = _subject("explained-away", lambda: Stacks(past=168, ahead=24), _windows, _relative_loss)
CAUSAL = _subject("causal-convolutions", lambda: Causal([88, 150, 150, 150, 150]), _music, _music_loss)
INVERTED = _subject("inverted-series", Inverted, _many_series, _mean_loss)
SPIKING = _subject("spiking", Spiking, _spikes, _class_loss)
SELLERS = _subject("next-item", Sellers, _sold, _sold_loss)

CONFIGURATIONS: list[Configuration] = [
    CHANCES.at(512, sizes={"length": 168}, precision="fp32", optimizer="adam", clip_norm=10.0),
    STACKS.at(8192, precision="tf32", optimizer="radam"),
    CAUSAL.at(32, sizes={"length": 1000}, precision="fp32", optimizer="adam", clip_norm=0.4),
    CAUSAL.at(64, sizes={"length": 1000}, precision="bf16"),
    INVERTED.at(64, precision="fp32", optimizer="adam"),
    INVERTED.at(128, precision="bf16"),
    SPIKING.at(256, sizes={"ticks": 100}, precision="fp32", optimizer="adamax"),
    SELLERS.at(256, precision="fp32", optimizer="adam"),
]
