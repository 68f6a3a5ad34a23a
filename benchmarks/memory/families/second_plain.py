"""Second unseen set, everything else: scans, waves, speech, tables of items, fields, scenes and points."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.memory.configuration import Configuration, Subject, token_ids


class Scan(nn.Module):
    """A state of its own for each channel, carried from step to step by what the input says."""

    def __init__(self, width: int, *, num_states: int = 16) -> None:
        super().__init__()
        self.norm, self.num_states = nn.RMSNorm(width), num_states
        self.enter = nn.Linear(width, 4 * width, bias=False)
        self.mix = nn.Conv1d(2 * width, 2 * width, 4, groups=2 * width, padding=3)
        self.select = nn.Linear(2 * width, 2 * num_states + 1, bias=False)
        self.decay = nn.Parameter(torch.zeros(2 * width, num_states))
        self.leave = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        inside, gate = self.enter(self.norm(x)).chunk(2, dim=-1)
        inside = F.silu(self.mix(inside.transpose(1, 2))[..., :length].transpose(1, 2))
        step, write, read = self.select(inside).split([1, self.num_states, self.num_states], dim=-1)
        step = F.softplus(step)
        keep = torch.exp(-step[..., None] * self.decay.exp())
        new = (step * inside)[..., None] * write[:, :, None, :]
        state, out = torch.zeros_like(new[:, 0]), []
        for at in range(length):
            state = keep[:, at] * state + new[:, at]
            out.append((state * read[:, at, None, :]).sum(dim=-1))
        found: Tensor = self.leave(torch.stack(out, dim=1).to(gate.dtype) * F.silu(gate))
        return x + found


class ScanModel(nn.Module):
    def __init__(self, *, width: int = 256, num_layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, width)
        self.layers = nn.ModuleList(Scan(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 8000)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


def _ids(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"ids": token_ids(batch_size, length + 1, vocabulary=8000)}


def _next_id(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["ids"]
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Waves(nn.Module):
    """Dilated causal convolutions over samples of sound, gated, with weights kept as length and direction."""

    def __init__(self, *, width: int = 64, num_layers: int = 20) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            normed(nn.Conv1d(width, 2 * width, 3, dilation=2 ** (at % 10))) for at in range(num_layers)
        )
        self.skips = nn.ModuleList(normed(nn.Conv1d(width, 2 * width, 1)) for _ in range(num_layers))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 256, 1))

    def forward(self, sound: Tensor) -> Tensor:
        x: Tensor = self.first(sound[:, None])
        total: Tensor | float = 0.0
        for at, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            value, open_share = gate(F.pad(x, (2 * 2 ** (at % 10), 0))).chunk(2, dim=1)
            kept, shown = skip(value.tanh() * open_share.sigmoid()).chunk(2, dim=1)
            x, total = x + kept, total + shown
        scores: Tensor = self.head(total)
        return scores


def _sound(*, batch_size: int, samples: int) -> dict[str, Tensor]:
    return {
        "sound": torch.randn(batch_size, samples),
        "levels": torch.randint(0, 256, (batch_size, samples)),
    }


def _next_level(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["sound"]), batch["levels"])


class Speech(nn.Module):
    """Convolutions over a spectrogram, packed recurrent layers in both directions, letters out."""

    def __init__(self, *, width: int = 512) -> None:
        super().__init__()
        self.see = nn.Sequential(
            *(
                nn.Conv2d(1, 32, (11, 41), stride=(2, 2), padding=(5, 20)),
                nn.BatchNorm2d(32),
                nn.Hardtanh(0, 20),
            ),
            *(nn.Conv2d(32, 32, (11, 21), stride=(1, 2), padding=(5, 10)), nn.BatchNorm2d(32)),
            nn.Hardtanh(0, 20),
        )
        self.hear = nn.GRU(32 * 20, width, num_layers=3, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(2 * width, 32)

    def forward(self, pictures: Tensor, lengths: Tensor) -> Tensor:
        seen = self.see(pictures[:, None]).transpose(1, 2).flatten(2)
        packed = pack_padded_sequence(seen, lengths.cpu(), batch_first=True, enforce_sorted=False)
        heard, _ = pad_packed_sequence(self.hear(packed)[0], batch_first=True)
        scores: Tensor = self.head(heard)
        return scores


def _speech(*, batch_size: int, length: int) -> dict[str, Tensor]:
    frames = torch.linspace(length // 4, length // 2, batch_size).long().flip(0)
    return {
        "pictures": torch.randn(batch_size, length, 80),
        "lengths": frames,
        "letters": torch.randint(1, 32, (batch_size, 40)),
        "num_letters": torch.full((batch_size,), 40),
    }


def _speech_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["pictures"], batch["lengths"]).float().log_softmax(dim=-1).transpose(0, 1)
    return F.ctc_loss(scores, batch["letters"], batch["lengths"], batch["num_letters"], zero_infinity=True)


class Recommender(nn.Module):
    """Large tables of items, several of each in a bag; products of all pairs."""

    def __init__(self, *, num_tables: int = 16, num_items: int = 200_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(num_items, width, mode="sum") for _ in range(num_tables))
        self.below = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = num_tables * (num_tables + 1) // 2
        self.above = nn.Sequential(
            nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, items: Tensor, numbers: Tensor) -> Tensor:
        dense = self.below(numbers)
        bags = [table(items[:, at]) for at, table in enumerate(self.tables)]
        every = torch.stack([dense, *bags], dim=1)
        rows, columns = torch.tril_indices(every.shape[1], every.shape[1], offset=-1, device=items.device)
        pairs = torch.bmm(every, every.transpose(1, 2))[:, rows, columns]
        scores: Tensor = self.above(torch.cat([dense, pairs], dim=1))
        return scores.squeeze(1)


def _clicks(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "items": torch.randint(0, 200_000, (batch_size, 16, 5)),
        "numbers": torch.randn(batch_size, 13),
        "clicked": torch.rand(batch_size),
    }


def _click_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["items"], batch["numbers"]), batch["clicked"])


class Spectrum(nn.Module):
    """The lowest frequencies of a field, each mixed by a matrix of its own."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, width, width, modes, modes, dtype=torch.cfloat) / width)
        self.past = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        waves, modes = torch.fft.rfft2(x), self.modes
        mixed = torch.zeros_like(waves)
        for at, rows in enumerate((slice(None, modes), slice(-modes, None))):
            mixed[:, :, rows, :modes] = torch.einsum(
                "bixy,ioxy->boxy", waves[:, :, rows, :modes], self.weight[at]
            )
        return F.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + self.past(x))


class FieldOperator(nn.Module):
    def __init__(self, *, width: int = 32, modes: int = 16, num_layers: int = 4) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, width, 1), nn.Conv2d(width, 1, 1)
        self.layers = nn.Sequential(*(Spectrum(width, modes) for _ in range(num_layers)))

    def forward(self, field: Tensor) -> Tensor:
        found: Tensor = self.leave(self.layers(self.enter(field)))
        return found


def _field(*, batch_size: int, side: int) -> dict[str, Tensor]:
    return {"field": torch.randn(batch_size, 3, side, side), "after": torch.randn(batch_size, 1, side, side)}


def _field_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["field"]), batch["after"])


class Layers(nn.Module):
    """Linear layers and tanh, of a few inputs."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[:-1]:
            x = layer(x).tanh()
        found: Tensor = self.layers[-1](x)
        return found


def _equation_batch(*, batch_size: int) -> dict[str, Tensor]:
    return {"places": torch.rand(batch_size, 3)}


def _equation_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The residual of a heat equation: derivatives of the model by its inputs, and theirs by the weights."""
    places = batch["places"].detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(places).sum(), places, create_graph=True)
    curved = sum(
        torch.autograd.grad(slope[:, at].sum(), places, create_graph=True)[0][:, at] for at in (1, 2)
    )
    result: Tensor = (slope[:, 0] - 0.1 * curved).square().mean()
    return result


class Scene(nn.Module):
    """Density and colour of a place, looked up along rays of sight."""

    def __init__(self, *, width: int = 256, num_waves: int = 10) -> None:
        super().__init__()
        self.num_waves = num_waves
        num_in = 3 * 2 * num_waves
        self.first = nn.Sequential(
            nn.Linear(num_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )
        self.second = nn.Sequential(
            nn.Linear(width + num_in, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 4),
        )

    def forward(self, origins: Tensor, directions: Tensor) -> Tensor:
        far = torch.linspace(2, 6, 64, device=origins.device)
        places = origins[:, None] + directions[:, None] * far[:, None]
        turns = (places[..., None] * 2 ** torch.arange(self.num_waves, device=far.device)).flatten(2)
        waves = torch.cat([turns.sin(), turns.cos()], dim=-1)
        found = self.second(torch.cat([self.first(waves), waves], dim=-1)).float()
        opaque = 1 - torch.exp(-F.relu(found[..., 3]) * (4 / 64))
        clear = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-10], dim=1), dim=1)
        return ((opaque * clear[:, :-1])[..., None] * found[..., :3].sigmoid()).sum(dim=1)


def _rays(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "origins": torch.randn(batch_size, 3),
        "directions": torch.randn(batch_size, 3),
        "colours": torch.rand(batch_size, 3),
    }


def _ray_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["origins"], batch["directions"]), batch["colours"])


class Points(nn.Module):
    """The same layers for every point, the largest value over all points; embedded to be told apart."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in pairwise([3, 64, 128, 512]):
            layers += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.PReLU()]
        self.each = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(512, 256), nn.BatchNorm1d(256), nn.PReLU(), nn.Linear(256, 128))

    def forward(self, points: Tensor) -> Tensor:
        found: Tensor = self.head(self.each(points.transpose(1, 2)).max(dim=2).values)
        return F.normalize(found, dim=1)


def _clouds(*, batch_size: int, points: int) -> dict[str, Tensor]:
    return {name: torch.randn(batch_size, points, 3) for name in ("anchor", "same", "other")}


def _triplet_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    anchor, same, other = (model(batch[name]) for name in ("anchor", "same", "other"))
    return F.triplet_margin_loss(anchor, same, other, margin=0.2)


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


SCAN = _subject("scan", ScanModel, _ids, _next_id)
WAVES = _subject("waves", Waves, _sound, _next_level)
SPEECH = _subject("speech", Speech, _speech, _speech_loss)
RECOMMENDER = _subject("recommender", Recommender, _clicks, _click_loss)
FIELDS = _subject("fields", FieldOperator, _field, _field_loss)
EQUATION = _subject("equation", lambda: Layers(3, 512, 512, 512, 512, 1), _equation_batch, _equation_loss)
SCENE = _subject("scene", Scene, _rays, _ray_loss)
POINTS = _subject("points", Points, _clouds, _triplet_loss)

CONFIGURATIONS: list[Configuration] = [
    SCAN.at(32, sizes={"length": 192}, precision="bf16", clip_norm=1.0),
    WAVES.at(8, sizes={"samples": 16000}, precision="fp32", optimizer="adam"),
    SPEECH.at(32, sizes={"length": 800}, precision="fp32", clip_norm=1.0),
    SPEECH.at(64, sizes={"length": 800}, precision="bf16", optimizer="sgd-momentum"),
    RECOMMENDER.at(16384, precision="fp32", optimizer="adagrad"),
    FIELDS.at(64, sizes={"side": 128}, precision="fp32", optimizer="adam"),
    EQUATION.at(32768, precision="tf32", optimizer="adam"),
    SCENE.at(8192, precision="fp16", optimizer="adam"),
    POINTS.at(64, sizes={"points": 2048}, precision="tf32", optimizer="adamw-loop"),
]
