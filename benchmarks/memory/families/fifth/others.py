"""Fifth unseen set, others: sound, links, shops, tables, forecasts, points and slopes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from benchmarks.memory.configuration import Configuration, Subject, token_ids


def _layers(*sizes: int, kind: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    found: list[nn.Module] = []
    for a, b in pairwise(sizes):
        found += [nn.Linear(a, b), kind()]
    return nn.Sequential(*found[:-1])


def _own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


class ConformerBlock(nn.Module):
    """Half a wide layer, attention, a convolution over time, and half a wide layer."""

    def __init__(self, width: int, *, heads: int = 4, side: int = 31) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.before, self.after = (
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
            )
            for _ in range(2)
        )
        self.attend = nn.MultiheadAttention(width, heads, 0.1, batch_first=True)
        self.gate, self.out = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.along = nn.Conv1d(width, width, side, padding=side // 2, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, closed: Tensor) -> Tensor:
        x = x + 0.5 * self.before(self.norms[0](x))
        seen = self.norms[1](x)
        x = x + self.attend(seen, seen, seen, key_padding_mask=closed, need_weights=False)[0]
        inside = F.glu(self.gate(self.norms[2](x).transpose(1, 2)), dim=1).masked_fill(closed[:, None], 0)
        x = x + self.out(F.silu(self.batch_norm(self.along(inside)))).transpose(1, 2)
        return self.norms[4](x + 0.5 * self.after(self.norms[3](x)))


class Conformer(nn.Module):
    """Letters from a spectrogram, asked for in the middle and at the end."""

    def __init__(self, width: int = 256, *, depth: int = 10, letters: int = 128) -> None:
        super().__init__()
        self.shrink = nn.Sequential(
            nn.Conv2d(1, width, 3, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2), nn.ReLU()
        )
        self.enter, self.blocks = (
            nn.Linear(19 * width, width),
            nn.ModuleList(ConformerBlock(width) for _ in range(depth)),
        )
        self.head, self.again = nn.Linear(width, letters), nn.Linear(letters, width)

    def forward(self, sound: Tensor, frames: Tensor, letters: Tensor, counts: Tensor) -> Tensor:
        x = self.shrink(sound[:, None])
        x = self.enter(x.transpose(1, 2).flatten(2))
        lengths = ((frames - 1) // 2 - 1) // 2
        closed = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        losses = []
        for at, block in enumerate(self.blocks):
            x = block(x, closed)
            if at in (4, 9):
                scores = self.head(x)
                chance = scores.float().log_softmax(dim=-1).transpose(0, 1)
                losses.append(F.ctc_loss(chance, letters, lengths, counts, zero_infinity=True))
                if at == 4:
                    x = x + self.again(scores.softmax(dim=-1))
        return 0.3 * losses[0] + 0.7 * losses[1]


def _speech(*, batch_size: int, frames: int) -> dict[str, Tensor]:
    return {
        "sound": torch.randn(batch_size, frames, 80),
        "frames": torch.full((batch_size,), frames - 40),
        "letters": torch.randint(1, 128, (batch_size, 60)),
        "counts": torch.full((batch_size,), 50),
    }


class Separation(nn.Module):
    """Voices apart from a mix of waves: strided convolutions down and up with a recurrent middle (Demucs)."""

    def __init__(self, width: int = 48, *, depth: int = 4, sources: int = 4) -> None:
        super().__init__()
        self.sources = sources
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        a = 2
        for at in range(depth):
            b = width * 2**at
            self.down.append(
                nn.Sequential(nn.Conv1d(a, b, 8, 4), nn.ReLU(), nn.Conv1d(b, 2 * b, 1), nn.GLU(dim=1))
            )
            out = a if at else 2 * sources
            grow: list[nn.Module] = [
                nn.Conv1d(b, 2 * b, 3, padding=1),
                nn.GLU(dim=1),
                nn.ConvTranspose1d(b, out, 8, 4),
            ]
            self.up.insert(0, nn.Sequential(*grow, *([nn.ReLU()] if at else [])))
            a = b
        self.middle = nn.LSTM(a, a, num_layers=2, bidirectional=True)
        self.leave = nn.Linear(2 * a, a)

    def forward(self, mix: Tensor, voices: Tensor) -> Tensor:
        spread, x, kept = mix.std(dim=(1, 2), keepdim=True), mix, []
        x = x / (spread + 1e-3)
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        x = self.leave(self.middle(x.permute(2, 0, 1))[0]).permute(1, 2, 0)
        for layer in self.up:
            skip = kept.pop()
            short = skip.shape[-1] - x.shape[-1]
            x = layer(F.pad(x, (0, short)) + skip if short > 0 else x[..., : skip.shape[-1]] + skip)
        x = F.pad(x, (0, mix.shape[-1] - x.shape[-1])).unflatten(1, (self.sources, 2)) * (
            spread[:, None] + 1e-3
        )
        apart = (x.float() - voices).abs().mean()
        seen = [
            torch.stft(
                each.flatten(0, 2),
                1024,
                256,
                window=torch.hann_window(1024, device=mix.device),
                return_complex=True,
            )
            for each in (x.float(), voices)
        ]
        return apart + 0.1 * (seen[0].abs() - seen[1].abs()).abs().mean()


def _songs(*, batch_size: int, samples: int) -> dict[str, Tensor]:
    voices = torch.randn(batch_size, 4, 2, samples) * 0.1
    return {"mix": voices.sum(dim=1), "voices": voices}


class Keywords(nn.Module):
    """A word in a second of sound: a spectrum made on the device, bands hidden, depthwise convolutions."""

    def __init__(self, width: int = 172, *, depth: int = 6, bands: int = 64) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(480))
        self.register_buffer("bands", torch.rand(257, bands))
        self.enter = nn.Sequential(
            nn.Conv2d(1, width, (10, 4), (2, 2), (5, 1), bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(
                    nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                ),
                *(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            )
            for _ in range(depth)
        )
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(width, 35)

    def forward(self, sound: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(sound.device.type, enabled=False):
            waves = torch.stft(sound, 512, 160, 480, self.window, return_complex=True)
            x = torch.log(torch.einsum("bft,fm->bmt", waves.abs().square(), self.bands) + 1e-6)
            x = (x - x.mean(dim=(1, 2), keepdim=True)) / (x.std(dim=(1, 2), keepdim=True) + 1e-5)
            hidden = torch.arange(x.shape[1], device=x.device)[None, :, None]
            first = (torch.rand(x.shape[0], 1, 1, device=x.device) * 48).floor()
            x = x.masked_fill((hidden >= first) & (hidden < first + 12), 0)
        x = self.enter(x[:, None])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.drop(x.mean(dim=(2, 3)))), labels)


def _words(*, batch_size: int) -> dict[str, Tensor]:
    return {"sound": torch.randn(batch_size, 16000), "labels": torch.randint(0, 35, (batch_size,))}


class Links(nn.Module):
    """Facts as turns of complex numbers; most rows of the tables have no gradient (RotatE, sparse)."""

    def __init__(self, *, things: int = 200_000, kinds: int = 500, width: int = 200) -> None:
        super().__init__()
        self.things, self.kinds = (
            nn.Embedding(things, 2 * width, sparse=True),
            nn.Embedding(kinds, width, sparse=True),
        )

    def far(self, head: Tensor, kind: Tensor, tail: Tensor) -> Tensor:
        real, other = self.things(head).chunk(2, dim=-1)
        angle = self.kinds(kind) * math.pi
        cos, sin = angle.cos(), angle.sin()
        aim, aim_other = self.things(tail).chunk(2, dim=-1)
        apart = torch.stack([real * cos - other * sin - aim, real * sin + other * cos - aim_other])
        return 9.0 - apart.norm(dim=0).sum(dim=-1)

    def forward(self, head: Tensor, kind: Tensor, tail: Tensor, wrong: Tensor) -> Tensor:
        right = F.logsigmoid(self.far(head, kind, tail))
        others = self.far(head[:, None], kind[:, None], wrong)
        weight = others.detach().softmax(dim=1)
        return -(right.mean() + (weight * F.logsigmoid(-others)).sum(dim=1).mean()) / 2


def _facts(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "head": torch.randint(0, 200_000, (batch_size,)),
        "kind": torch.randint(0, 500, (batch_size,)),
        "tail": torch.randint(0, 200_000, (batch_size,)),
        "wrong": torch.randint(0, 200_000, (batch_size, 64)),
    }


class TwoTowers(nn.Module):
    """People and things beside each other: what others of the batch bought is wrong."""

    def __init__(self, width: int = 128, *, things: int = 500_000) -> None:
        super().__init__()
        self.things = nn.EmbeddingBag(things, 64, mode="mean", padding_idx=0)
        self.places = nn.Embedding(20_000, 32)
        self.person = _layers(64 + 32 + 16, 1024, 512, width)
        self.thing = _layers(64 + 40, 512, 256, width)
        self.norms = nn.ModuleList([nn.BatchNorm1d(112), nn.BatchNorm1d(104)])
        self.heat = nn.Parameter(torch.tensor(2.6))

    def forward(
        self, seen: Tensor, place: Tensor, person: Tensor, bought: Tensor, facts: Tensor, often: Tensor
    ) -> Tensor:
        one = torch.cat([self.things(seen), self.places(place), person], dim=1)
        two = torch.cat([self.things(bought[:, None]), facts], dim=1)
        one, two = self.person(self.norms[0](one)), self.thing(self.norms[1](two))
        scores = F.normalize(one.float(), dim=1) @ F.normalize(two.float(), dim=1).T * self.heat.exp()
        scores = scores - often.log()
        same = (bought[:, None] == bought) & ~torch.eye(len(bought), dtype=torch.bool, device=bought.device)
        return F.cross_entropy(
            scores.masked_fill(same, -1e9), torch.arange(len(bought), device=bought.device)
        )


def _baskets(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "seen": torch.randint(0, 500_000, (batch_size, 50)),
        "place": torch.randint(0, 20_000, (batch_size,)),
        "person": torch.randn(batch_size, 16),
        "bought": torch.randint(1, 500_000, (batch_size,)),
        "facts": torch.randn(batch_size, 40),
        "often": torch.rand(batch_size) + 1e-4,
    }


class ObliviousTrees(nn.Module):
    """Trees that ask the same at each level, with a soft choice of column and side (NODE)."""

    def __init__(self, *, columns: int = 90, trees: int = 512, depth: int = 6, layers: int = 2) -> None:
        super().__init__()
        widths = [columns + at * trees * 2 for at in range(layers)]
        self.choose = nn.ParameterList(nn.Parameter(torch.rand(width, trees, depth)) for width in widths)
        self.border = nn.ParameterList(nn.Parameter(torch.randn(trees, depth)) for _ in widths)
        self.heat = nn.ParameterList(nn.Parameter(torch.zeros(trees, depth)) for _ in widths)
        self.leaves = nn.ParameterList(nn.Parameter(torch.randn(trees, 2, 2**depth)) for _ in widths)
        sides = torch.arange(2**depth)[:, None] >> torch.arange(depth) & 1
        self.register_buffer("sides", torch.stack([sides, 1 - sides], dim=-1).float())

    @staticmethod
    def sparse_choice(x: Tensor) -> Tensor:
        """Sparsemax over the columns, by sorting."""
        ordered, _ = x.sort(dim=0, descending=True)
        counts = torch.arange(1, x.shape[0] + 1, device=x.device, dtype=x.dtype)[:, None, None]
        sums = ordered.cumsum(dim=0) - 1
        support = (ordered * counts > sums).sum(dim=0, keepdim=True)
        border = sums.gather(0, support - 1) / support.to(x.dtype)
        return (x - border).clamp(min=0)

    def forward(self, rows: Tensor, value: Tensor) -> Tensor:
        x, found = rows, []
        for choose, border, heat, leaves in zip(
            self.choose, self.border, self.heat, self.leaves, strict=True
        ):
            asked = torch.einsum("bf,ftd->btd", x, self.sparse_choice(choose))
            asked = (asked - border) * torch.exp(-heat)
            side = (0.5 * torch.stack([-asked, asked], dim=-1) + 0.5).clamp(0, 1)
            chance = torch.einsum("btds,cds->btcd", side, self.sides).prod(dim=-1)
            answer = torch.einsum("btc,toc->bto", chance, leaves)
            found.append(answer)
            x = torch.cat([x, answer.flatten(1)], dim=1)
        return F.mse_loss(torch.cat(found, dim=1)[..., 0].mean(dim=1), value)


def _table(*, batch_size: int) -> dict[str, Tensor]:
    return {"rows": torch.randn(batch_size, 90), "value": torch.randn(batch_size)}


class Gated(nn.Module):
    """A small layer that may be skipped, told what the series is."""

    def __init__(self, a: int, b: int, *, context: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.gate = nn.Linear(a, b), nn.Linear(b, b), nn.Linear(b, 2 * b)
        self.context = nn.Linear(b, b, bias=False) if context else None
        self.around, self.norm = nn.Linear(a, b) if a != b else nn.Identity(), nn.LayerNorm(b)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        inside = self.one(x)
        if self.context is not None and context is not None:
            inside = inside + self.context(context)
        inside = F.glu(self.gate(F.dropout(self.two(F.elu(inside)), 0.1, self.training)), dim=-1)
        return self.norm(self.around(x) + inside)


class Fusion(nn.Module):
    """Forecasts as quantiles: chosen columns, a recurrent past and future, and attention over both (TFT)."""

    def __init__(self, width: int = 160, *, columns: int = 8, past: int = 168, ahead: int = 24) -> None:
        super().__init__()
        self.past, self.ahead, self.columns = past, ahead, columns
        self.names = nn.Embedding(400, width)
        self.enter = nn.ModuleList(nn.Linear(1, width) for _ in range(columns))
        self.each = nn.ModuleList(Gated(width, width) for _ in range(columns))
        self.choose = nn.ModuleList(
            [nn.Linear(columns * width, columns), nn.Linear(width, columns, bias=False)]
        )
        self.contexts = nn.ModuleList(Gated(width, width) for _ in range(3))
        self.read, self.write = (
            nn.LSTM(width, width, batch_first=True),
            nn.LSTM(width, width, batch_first=True),
        )
        self.enrich, self.attend = (
            Gated(width, width, context=True),
            nn.MultiheadAttention(width, 4, 0.1, batch_first=True),
        )
        self.norms, self.last = nn.ModuleList(nn.LayerNorm(width) for _ in range(2)), Gated(width, width)
        self.head = nn.Linear(width, 7)

    def chosen(self, values: Tensor, name: Tensor) -> Tensor:
        parts = [layer(values[..., at : at + 1]) for at, layer in enumerate(self.enter)]
        share = self.choose[0](torch.cat(parts, dim=-1)) + self.choose[1](name)[:, None]
        changed = torch.stack([layer(part) for layer, part in zip(self.each, parts, strict=True)], dim=-1)
        return (changed * share.softmax(dim=-1)[..., None, :]).sum(dim=-1)

    def forward(self, series: Tensor, values: Tensor, future: Tensor) -> Tensor:
        name = self.names(series)
        x = self.chosen(values, name)
        hidden, cell, context = (layer(name) for layer in self.contexts)
        before, state = self.read(x[:, : self.past], (hidden[None].contiguous(), cell[None].contiguous()))
        after, _ = self.write(x[:, self.past :], state)
        local = self.norms[0](torch.cat([before, after], dim=1) + x)
        rich = self.enrich(local, context[:, None])
        length = rich.shape[1]
        closed = torch.ones(self.ahead, length, dtype=torch.bool, device=x.device).triu(1 + self.past)
        seen, _ = self.attend(rich[:, self.past :], rich, rich, attn_mask=closed)
        found = self.head(self.last(self.norms[1](seen + rich[:, self.past :]))).float()
        levels = torch.tensor([0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98], device=x.device)
        apart = future[..., None] - found
        return torch.maximum(levels * apart, (levels - 1) * apart).sum(dim=-1).mean()


def _demand(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "series": torch.randint(0, 400, (batch_size,)),
        "values": torch.randn(batch_size, 192, 8),
        "future": torch.randn(batch_size, 24),
    }


class NearestPoints(nn.Module):
    """Each point and its nearest neighbours, found again in every layer (DGCNN)."""

    def __init__(self, *, near: int = 20) -> None:
        super().__init__()
        self.near = near
        sizes = ((3, 64), (64, 64), (64, 128), (128, 256))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * a, b, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
            for a, b in sizes
        )
        self.join = nn.Sequential(
            nn.Conv1d(512, 1024, 1, bias=False), nn.BatchNorm1d(1024), nn.LeakyReLU(0.2)
        )
        self.head = nn.Sequential(
            nn.Linear(2048, 512), nn.BatchNorm1d(512), nn.LeakyReLU(0.2), nn.Dropout(0.5), nn.Linear(512, 40)
        )

    def edges(self, x: Tensor) -> Tensor:
        square = x.square().sum(dim=1)
        close = 2 * x.transpose(1, 2) @ x - square[:, :, None] - square[:, None]
        chosen = close.topk(self.near, dim=-1).indices
        batch, width, count = x.shape
        rows = x.transpose(1, 2)
        found = rows.gather(1, chosen.flatten(1)[..., None].expand(-1, -1, width)).view(
            batch, count, self.near, width
        )
        centre = rows[:, :, None].expand_as(found)
        return torch.cat([found - centre, centre], dim=-1).permute(0, 3, 1, 2)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        x, kept = points, []
        for layer in self.layers:
            x = layer(self.edges(x)).amax(dim=-1)
            kept.append(x)
        x = self.join(torch.cat(kept, dim=1))
        x = torch.cat([x.amax(dim=-1), x.mean(dim=-1)], dim=1)
        return F.cross_entropy(self.head(x), labels, label_smoothing=0.2)


def _clouds(*, batch_size: int, points: int) -> dict[str, Tensor]:
    return {"points": torch.rand(batch_size, 3, points), "labels": torch.randint(0, 40, (batch_size,))}


class Operator(nn.Module):
    """An answer at any place to a function given at some: slopes by place come from torch.func (DeepONet)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.branch = _layers(100, width, width, width, kind=nn.Tanh)
        self.trunk = _layers(2, width, width, width, kind=nn.Tanh)

    def forward(self, given: Tensor, places: Tensor, value: Tensor) -> Tensor:
        coded = self.branch(given)

        def answer(place: Tensor, code: Tensor) -> Tensor:
            return (self.trunk(place) * code).sum()

        slopes = torch.func.vmap(torch.func.vmap(torch.func.jacrev(answer), in_dims=(0, None)))(places, coded)
        found = torch.einsum("bpw,bw->bp", self.trunk(places), coded)
        return F.mse_loss(found, value) + 0.1 * (slopes[..., 1] + found * slopes[..., 0]).square().mean()


def _operators(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "given": torch.randn(batch_size, 100),
        "places": torch.rand(batch_size, 200, 2),
        "value": torch.randn(batch_size, 200),
    }


class Rotations(nn.Module):
    """A recurrent network whose matrix stays orthogonal by a parametrization, over a long sum of numbers."""

    def __init__(self, width: int = 190) -> None:
        super().__init__()
        self.enter = nn.Linear(10, width)
        self.turn = orthogonal(nn.Linear(width, width, bias=False))
        self.bias, self.head = nn.Parameter(torch.zeros(width)), nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.bias.shape[0])
        given = self.enter(x)
        with nn.utils.parametrize.cached():
            for at in range(x.shape[1]):
                state = self.turn(state) + given[:, at]
                state = torch.sign(state) * F.relu(state.abs() + self.bias)
        return F.cross_entropy(self.head(state), labels)


def _copied(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.rand(batch_size, length, 10), "labels": torch.randint(0, 10, (batch_size,))}


class SkipGrams(nn.Module):
    """Words by their neighbours: drawn wrong words, sparse gradients in two tables."""

    def __init__(self, *, words: int = 300_000, width: int = 300) -> None:
        super().__init__()
        self.inside, self.outside = (
            nn.Embedding(words, width, sparse=True),
            nn.Embedding(words, width, sparse=True),
        )

    def forward(self, centre: Tensor, near: Tensor, wrong: Tensor) -> Tensor:
        x = self.inside(centre)
        right = (self.outside(near) * x).sum(dim=-1)
        others = torch.bmm(self.outside(wrong), x[..., None])[..., 0]
        return -(F.logsigmoid(right) + F.logsigmoid(-others).sum(dim=-1)).mean()


def _neighbours(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "centre": token_ids(batch_size, vocabulary=300_000),
        "near": token_ids(batch_size, vocabulary=300_000),
        "wrong": token_ids(batch_size, 10, vocabulary=300_000),
    }


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any = _own) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


CONFORMER = _subject("conformer", Conformer, _speech)
SEPARATION = _subject("separation", Separation, _songs)
KEYWORDS = _subject("keywords", Keywords, _words)
LINKS = _subject("links", Links, _facts)
TOWERS = _subject("two-towers", TwoTowers, _baskets)
TREES = _subject("oblivious-trees", ObliviousTrees, _table)
FUSION = _subject("fusion", Fusion, _demand)
NEAREST = _subject("nearest-points", NearestPoints, _clouds)
OPERATOR = _subject("operator", Operator, _operators)
ROTATIONS = _subject("rotations", Rotations, _copied)
SKIP_GRAMS = _subject("skip-grams", SkipGrams, _neighbours)

CONFIGURATIONS: list[Configuration] = [
    CONFORMER.at(16, sizes={"frames": 800}, precision="fp32", clip_norm=5.0, optimizer="adam"),
    CONFORMER.at(32, sizes={"frames": 800}, precision="bf16", accumulation=2, optimizer="adamw-schedule"),
    SEPARATION.at(4, sizes={"samples": 88200}, precision="fp32", optimizer="adam"),
    KEYWORDS.at(256, precision="fp16", optimizer="sgd-nesterov"),
    LINKS.at(1024, precision="fp32", optimizer="sparse-adam"),
    TOWERS.at(4096, precision="fp32", optimizer="adagrad"),
    TOWERS.at(2048, precision="bf16", optimizer="adadelta"),
    TREES.at(1024, precision="fp32", optimizer="adam"),
    FUSION.at(128, precision="fp32", clip_norm=0.01, optimizer="adam"),
    NEAREST.at(32, sizes={"points": 1024}, precision="fp32", optimizer="sgd-momentum"),
    NEAREST.at(32, sizes={"points": 1024}, precision="bf16"),
    OPERATOR.at(64, precision="fp32", optimizer="adam"),
    ROTATIONS.at(128, sizes={"length": 200}, precision="fp32", optimizer="rmsprop"),
    SKIP_GRAMS.at(16384, precision="fp32", optimizer="sgd"),
]
