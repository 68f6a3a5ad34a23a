"""Third unseen set, sequences: attention without a softmax, long filters, routed tokens, series and cells."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject, token_ids

VOCABULARY = 12_000


class Language(nn.Module):
    """Tokens in, the scores of the next one out, with layers of any kind between."""

    def __init__(self, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def _ids(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"ids": token_ids(batch_size, length + 1, vocabulary=VOCABULARY)}


def _next_id(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["ids"]
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class LinearAttention(nn.Module):
    """Positive features of queries and keys, so that sums over keys stand for the softmax; by chunks."""

    def __init__(self, width: int, *, heads: int = 8, chunk: int = 64) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.norm, self.mix, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.wide = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.norm(x)).chunk(3, dim=-1)
        shape = (batch, length // self.chunk, self.chunk, self.heads, width // self.heads)
        query, key, value = (part.view(shape).permute(0, 3, 1, 2, 4) for part in parts)
        query, key = F.elu(query) + 1, F.elu(key) + 1
        states = torch.einsum("bhnck,bhncv->bhnkv", key, value).cumsum(dim=2)
        before = F.pad(states, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        inside = torch.tril(query @ key.transpose(-1, -2)) @ value
        total = inside + query @ before
        x = x + self.out(total.permute(0, 2, 3, 1, 4).reshape(batch, length, width))
        return x + self.wide(x)


class Retention(nn.Module):
    """Products of queries and keys that fade with their distance, each head at a rate of its own."""

    def __init__(self, width: int, *, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.mix, self.gate = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.by_head = nn.GroupNorm(heads, width)
        self.register_buffer("rates", torch.log(1 - 2.0 ** (-5 - torch.arange(heads))))
        self.wide = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())
        self.back = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        inside = self.norm(x)
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.mix(inside).chunk(3, -1)
        )
        at = torch.arange(length, device=x.device)
        distance = (at[:, None] - at[None, :]).float()
        fading = torch.where(distance >= 0, torch.exp(distance * self.rates[:, None, None]), 0.0)
        kept = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) * fading) @ value
        kept = kept.transpose(1, 2).reshape(batch * length, width)
        normed = self.by_head(kept).view(batch, length, width)
        x = x + self.out(F.silu(self.gate(inside)) * normed)
        found: Tensor = x + self.back(self.wide(x))
        return found


class LongFilter(nn.Module):
    """A filter as long as the text, made by a small network and applied by Fourier transforms."""

    def __init__(self, width: int, *, length: int) -> None:
        super().__init__()
        self.norm, self.length = nn.LayerNorm(width), length
        self.enter, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.short = nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width)
        self.make = nn.Sequential(
            nn.Linear(17, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, width)
        )
        self.fade = nn.Parameter(torch.linspace(0.5, 4, width))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mixed = self.short(self.enter(self.norm(x)).transpose(1, 2))[..., :length]
        first, second, value = mixed.chunk(3, dim=1)
        at = torch.linspace(0, 1, length, device=x.device)[:, None]
        turns = at * torch.arange(1, 9, device=x.device)
        places = torch.cat([at, turns.sin(), turns.cos()], dim=-1)
        taps = (self.make(places) * torch.exp(-at * self.fade)).T.float()
        waves = torch.fft.rfft((first * value).float(), n=2 * length) * torch.fft.rfft(taps, n=2 * length)
        kept = torch.fft.irfft(waves, n=2 * length)[..., :length]
        found: Tensor = x + self.leave((kept * second).transpose(1, 2))
        return found


class Relative(nn.Module):
    """Attention with a table of distances, added to the scores after a shift."""

    def __init__(self, width: int, *, heads: int = 8, reach: int = 512) -> None:
        super().__init__()
        self.heads, self.reach = heads, reach
        self.norm, self.mix, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.table = nn.Parameter(torch.zeros(2 * reach, width // heads))
        self.content, self.place = (nn.Parameter(torch.zeros(heads, 1, width // heads)) for _ in range(2))
        self.wide = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU())
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.mix(self.norm(x)).chunk(3, -1)
        )
        table = self.table[self.reach - length : self.reach + length - 1]
        by_place = (query + self.place) @ table.T
        shifted = F.pad(by_place, (1, 0)).view(batch, self.heads, 2 * length, length)[:, :, 1:]
        by_place = shifted.reshape(batch, self.heads, length, 2 * length - 1)[..., :length]
        scores = ((query + self.content) @ key.transpose(-1, -2) + by_place) / math.sqrt(query.shape[-1])
        ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = F.dropout(scores.masked_fill(ahead, -1e4).softmax(dim=-1), 0.1, self.training)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))
        found: Tensor = x + self.back(self.wide(x))
        return found


class Repeated(nn.Module):
    """One layer, applied again and again with a mark of the round added."""

    def __init__(self, width: int, *, rounds: int = 8) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.rounds = nn.Embedding(rounds, width)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        for at in range(self.rounds.num_embeddings):
            x = self.layer(x + self.rounds.weight[at], src_mask=mask, is_causal=True)
        return x


class ChosenTokens(nn.Module):
    """A layer for the tokens with the highest scores alone; the others pass."""

    def __init__(self, width: int, *, share: float = 0.25) -> None:
        super().__init__()
        self.share, self.score = share, nn.Linear(width, 1)
        self.layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        top = scores.topk(int(self.share * x.shape[1]), dim=1)
        order = top.indices.sort(dim=1).indices
        at = top.indices.gather(1, order)[..., None].expand(-1, -1, x.shape[-1])
        weight = top.values.gather(1, order).sigmoid()[..., None]
        found = self.layer(x.gather(1, at)) * weight
        return x.scatter_add(1, at, found.to(x.dtype))


class ManyHeads(nn.Module):
    """A stack that predicts several tokens ahead, each with a layer of its own before the shared head."""

    def __init__(self, width: int = 512, *, num_ahead: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, batch_first=True, norm_first=True, dropout=0.0
        )
        self.trunk = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.ahead = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 2 * width, batch_first=True, dropout=0.0)
            for _ in range(num_ahead)
        )

    def forward(self, ids: Tensor) -> list[Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        x = self.trunk(self.embedding(ids), mask=mask, is_causal=True)
        return [layer(x, src_mask=mask, is_causal=True) @ self.embedding.weight.T for layer in self.ahead]


def _several_ids(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["ids"]
    scores = model(ids[:, :-3])
    losses = [
        F.cross_entropy(each.flatten(0, 1), ids[:, at + 1 : ids.shape[1] - 2 + at].flatten())
        for at, each in enumerate(scores)
    ]
    return torch.stack(losses).mean()


class SeriesPatches(nn.Module):
    """Windows cut out of many series, each series normalised and read alone, flattened into a forecast."""

    def __init__(self, *, length: int, width: int = 128, window: int = 16, ahead: int = 96) -> None:
        super().__init__()
        self.window = window
        num = (length - window) // (window // 2) + 2
        self.enter = nn.Linear(window, width)
        self.places = nn.Parameter(torch.zeros(num, width))
        layer = nn.TransformerEncoderLayer(
            width, 16, 2 * width, dropout=0.2, batch_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Flatten(start_dim=-2), nn.Linear(num * width, ahead))

    def forward(self, series: Tensor) -> Tensor:
        centre = series.mean(dim=1, keepdim=True).detach()
        spread = torch.sqrt(series.var(dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
        x = ((series - centre) / spread).transpose(1, 2)
        x = F.pad(x, (0, self.window // 2), mode="replicate").unfold(-1, self.window, self.window // 2)
        batch, channels = x.shape[:2]
        x = self.layers(F.dropout(self.enter(x).flatten(0, 1) + self.places, 0.2, self.training))
        ahead: Tensor = self.head(x.unflatten(0, (batch, channels))).transpose(1, 2)
        return ahead * spread + centre


def _series(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"series": torch.randn(batch_size, length, 21), "after": torch.randn(batch_size, 96, 21)}


def _forecast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["series"]), batch["after"])


class Residual1d(nn.Module):
    def __init__(self, width: int, spread: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv1d(width, width, 3, padding=spread, dilation=spread)),
            *(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv1d(width, width, 3, padding=1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.layers(x)
        return found


class Trajectories(nn.Module):
    """A stack of one-dimensional convolutions with group norms that goes down and up again."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.enter = nn.Conv1d(14, width, 5, padding=2)
        self.down = nn.ModuleList(Residual1d(width * 2**at, 2**at) for at in range(3))
        self.less = nn.ModuleList(nn.Conv1d(width * 2**at, width * 2 ** (at + 1), 4, 2, 1) for at in range(2))
        self.more = nn.ModuleList(
            nn.ConvTranspose1d(width * 2 ** (at + 1), width * 2**at, 4, 2, 1) for at in (1, 0)
        )
        self.up = nn.ModuleList(Residual1d(width * 2**at, 1) for at in (1, 0))
        self.leave = nn.Conv1d(width, 14, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        kept = []
        for at, layer in enumerate(self.down):
            x = layer(x)
            if at < 2:
                kept.append(x)
                x = self.less[at](x)
        for grow, layer in zip(self.more, self.up, strict=True):
            x = layer(grow(x) + kept.pop())
        found: Tensor = self.leave(x)
        return found


def _paths(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"path": torch.randn(batch_size, 14, length), "noise": torch.randn(batch_size, 14, length)}


def _path_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["path"] + batch["noise"]), batch["noise"])


class Sensors(nn.Module):
    """A stack of recurrent layers over a handful of sensors: an input much narrower than the state."""

    def __init__(self, kind: type[nn.RNNBase], *, width: int = 768, num_layers: int = 3) -> None:
        super().__init__()
        self.read = kind(24, width, num_layers=num_layers, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(width, 24)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.read(x)[0])
        return found


def _sensors(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"seen": torch.randn(batch_size, length, 24), "next": torch.randn(batch_size, length, 24)}


def _sensor_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.smooth_l1_loss(model(batch["seen"]), batch["next"])


class Pointing(nn.Module):
    """A cell that reads what it was given again at each step, with additive attention, and copies from it."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.encode = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.cell = nn.LSTMCell(2 * width, width)
        self.keys, self.query, self.score = (
            nn.Linear(width, width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, 1, bias=False),
        )
        self.head, self.copy = nn.Linear(2 * width, VOCABULARY), nn.Linear(3 * width, 1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encode(self.embedding(source))[0]
        keys = self.keys(memory)
        hidden = memory.mean(dim=1)
        state, seen, losses = torch.zeros_like(hidden), hidden, []
        words = self.embedding(target)
        for at in range(target.shape[1] - 1):
            hidden, state = self.cell(torch.cat([words[:, at], seen], dim=-1), (hidden, state))
            weights = self.score(torch.tanh(keys + self.query(hidden)[:, None])).squeeze(-1).softmax(dim=-1)
            seen = torch.bmm(weights[:, None], memory).squeeze(1)
            share = self.copy(torch.cat([hidden, seen, words[:, at]], dim=-1)).sigmoid()
            written = self.head(torch.cat([hidden, seen], dim=-1)).float().softmax(dim=-1)
            mixed = (share * written).scatter_add(1, source, (1 - share) * weights.float())
            losses.append(F.nll_loss((mixed + 1e-8).log(), target[:, at + 1]))
        return torch.stack(losses).mean()


def _pairs(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "source": token_ids(batch_size, length, vocabulary=VOCABULARY),
        "target": token_ids(batch_size, 33, vocabulary=VOCABULARY),
    }


def _pair_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["source"], batch["target"])
    return loss


class Sandwich(nn.Module):
    """Half a feed-forward layer, attention, a depthwise convolution, and the other half."""

    def __init__(self, width: int, *, heads: int = 4) -> None:
        super().__init__()
        self.halves = nn.ModuleList(
            nn.Sequential(
                *(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1)),
                *(nn.Linear(4 * width, width), nn.Dropout(0.1)),
            )
            for _ in range(2)
        )
        self.before = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.enter, self.leave = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.mix, self.scale = nn.Conv1d(width, width, 31, padding=15, groups=width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.halves[0](x)
        inside = self.before(x)
        x = x + self.attend(inside, inside, inside, need_weights=False)[0]
        mixed = F.glu(self.enter(self.norm(x).transpose(1, 2)), dim=1)
        x = x + self.leave(F.silu(self.scale(self.mix(mixed)))).transpose(1, 2)
        found: Tensor = self.last(x + 0.5 * self.halves[1](x))
        return found


class Hearing(nn.Module):
    def __init__(self, width: int = 256, num_layers: int = 6) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(1, width, 3, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2), nn.ReLU()
        )
        self.enter = nn.Linear(width * 19, width)
        self.layers = nn.Sequential(*(Sandwich(width) for _ in range(num_layers)))
        self.head = nn.Linear(width, 128)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.see(pictures[:, None]).transpose(1, 2).flatten(2)
        scores: Tensor = self.head(self.layers(self.enter(x)))
        return scores


def _pictures(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "pictures": torch.randn(batch_size, length, 80),
        "letters": torch.randint(1, 128, (batch_size, 30)),
    }


def _letters_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["pictures"]).float().log_softmax(dim=-1).transpose(0, 1)
    steps = torch.full((scores.shape[1],), scores.shape[0])
    return F.ctc_loss(scores, batch["letters"], steps, torch.full((scores.shape[1],), 30))


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


def _language(family: str, make_layer: Any, *, width: int, num_layers: int) -> Subject:
    def make_model() -> nn.Module:
        return Language([make_layer(width) for _ in range(num_layers)], width)

    return _subject(family, make_model, _ids, _next_id)


LINEAR = _language("linear-attention", LinearAttention, width=512, num_layers=6)
RETENTION = _language("retention", Retention, width=512, num_layers=6)
LONG_FILTER = _language("long-filter", lambda width: LongFilter(width, length=2048), width=384, num_layers=6)
RELATIVE = _language("relative-places", Relative, width=512, num_layers=6)
REPEATED = _language("repeated-layer", Repeated, width=512, num_layers=1)
CHOSEN = _language("chosen-tokens", ChosenTokens, width=512, num_layers=6)
AHEAD = _subject("tokens-ahead", ManyHeads, _ids, _several_ids)
SERIES = _subject("series-patches", lambda: SeriesPatches(length=512), _series, _forecast_loss)
TRAJECTORIES = _subject("trajectories", Trajectories, _paths, _path_loss)
SENSORS = _subject("sensors", lambda: Sensors(nn.LSTM), _sensors, _sensor_loss)
SENSORS_GRU = _subject("sensors-gru", lambda: Sensors(nn.GRU, num_layers=2), _sensors, _sensor_loss)
POINTING = _subject("pointing", Pointing, _pairs, _pair_loss)
HEARING = _subject("hearing", Hearing, _pictures, _letters_loss)

CONFIGURATIONS: list[Configuration] = [
    LINEAR.at(16, sizes={"length": 1024}, precision="bf16"),
    LINEAR.at(8, sizes={"length": 1024}, precision="fp32", clip_norm=1.0),
    RETENTION.at(8, sizes={"length": 512}, precision="fp32"),
    RETENTION.at(16, sizes={"length": 512}, precision="bf16", optimizer="adamw-fused"),
    LONG_FILTER.at(8, sizes={"length": 2048}, precision="bf16"),
    LONG_FILTER.at(4, sizes={"length": 2048}, precision="tf32", optimizer="adam"),
    RELATIVE.at(16, sizes={"length": 384}, precision="fp32"),
    RELATIVE.at(24, sizes={"length": 384}, precision="fp16", clip_norm=1.0),
    REPEATED.at(16, sizes={"length": 512}, precision="bf16"),
    REPEATED.at(8, sizes={"length": 512}, precision="fp32", accumulation=2),
    CHOSEN.at(16, sizes={"length": 768}, precision="bf16"),
    CHOSEN.at(16, sizes={"length": 512}, precision="fp32", optimizer="sgd-momentum"),
    AHEAD.at(8, sizes={"length": 512}, precision="bf16"),
    AHEAD.at(8, sizes={"length": 384}, precision="tf32", clip_norm=1.0),
    SERIES.at(64, sizes={"length": 512}, precision="fp32", optimizer="adam"),
    SERIES.at(128, sizes={"length": 512}, precision="bf16"),
    TRAJECTORIES.at(256, sizes={"length": 256}, precision="bf16"),
    TRAJECTORIES.at(128, sizes={"length": 256}, precision="fp32", optimizer="adam"),
    SENSORS.at(128, sizes={"length": 256}, precision="fp32", optimizer="adam"),
    SENSORS.at(256, sizes={"length": 200}, precision="bf16", clip_norm=1.0),
    SENSORS_GRU.at(128, sizes={"length": 256}, precision="fp16"),
    POINTING.at(64, sizes={"length": 256}, precision="fp32", clip_norm=2.0, optimizer="adagrad"),
    POINTING.at(64, sizes={"length": 256}, precision="bf16"),
    HEARING.at(32, sizes={"length": 800}, precision="fp32"),
    HEARING.at(64, sizes={"length": 800}, precision="bf16", clip_norm=5.0),
]
