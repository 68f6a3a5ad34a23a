"""Sixth unseen set, others: sentences, translation, shops, tables, signals, sets, control and forecasts."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.memory.configuration import Configuration, Subject, token_ids


def _own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


def _layers(*sizes: int, kind: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    found: list[nn.Module] = []
    for a, b in pairwise(sizes):
        found += [nn.Linear(a, b), kind()]
    return nn.Sequential(*found[:-1])


class Topics(nn.Module):
    """What a text is about: kernels of three widths over its words, the largest of each (TextCNN)."""

    def __init__(self, width: int = 300) -> None:
        super().__init__()
        self.words = nn.Embedding(40_000, width, padding_idx=0)
        self.sides = nn.ModuleList(nn.Conv1d(width, 128, side) for side in (3, 4, 5))
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(3 * 128, 20)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words).transpose(1, 2)
        found = torch.cat([F.relu(side(x)).amax(dim=-1) for side in self.sides], dim=1)
        return F.cross_entropy(self.head(self.drop(found)), labels)


def _topics(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "words": token_ids(batch_size, length, vocabulary=40_000),
        "labels": torch.randint(0, 20, (batch_size,)),
    }


class Sentiment(nn.Module):
    """Whether a review is kind: a recurrent stack in both directions over rows of their own lengths."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(30_000, 200)
        self.read = nn.LSTM(200, width, num_layers=2, bidirectional=True, dropout=0.3, batch_first=True)
        self.look, self.head = nn.Linear(2 * width, 1), nn.Linear(2 * width, 2)

    def forward(self, words: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.words(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        x, _ = pad_packed_sequence(self.read(packed)[0], batch_first=True, total_length=words.shape[1])
        closed = torch.arange(words.shape[1], device=words.device) >= lengths[:, None]
        looked = self.look(torch.tanh(x))[..., 0].masked_fill(closed, -1e4).softmax(dim=-1)
        return F.cross_entropy(self.head((looked[..., None] * x).sum(dim=1)).float(), labels)


def _reviews(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "words": token_ids(batch_size, length, vocabulary=30_000),
        "lengths": torch.linspace(length // 2, length, batch_size).round().long(),
        "labels": torch.randint(0, 2, (batch_size,)),
    }


class Phrases(nn.Module):
    """Translation by PyTorch's own transformer, with sines for places and one table of words."""

    def __init__(self, width: int = 512, *, words: int = 16_000) -> None:
        super().__init__()
        self.words, self.width = nn.Embedding(words, width), width
        self.both = nn.Transformer(width, 8, 6, 6, 4 * width, 0.1, batch_first=True)
        self.drop = nn.Dropout(0.1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
        angle = torch.arange(512)[:, None] * rate
        self.register_buffer("places", torch.cat([angle.sin(), angle.cos()], dim=1))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        before, after = target[:, :-1], target[:, 1:]
        given, said = (
            self.drop(self.words(ids) * math.sqrt(self.width) + self.places[: ids.shape[1]])
            for ids in (source, before)
        )
        later = nn.Transformer.generate_square_subsequent_mask(before.shape[1], device=source.device)
        x = self.both(given, said, tgt_mask=later, src_key_padding_mask=source == 0, tgt_is_causal=True)
        scores = F.linear(x, self.words.weight)
        return F.cross_entropy(scores.float().flatten(0, 1), after.flatten(), label_smoothing=0.1)


def _phrases(*, batch_size: int, length: int) -> dict[str, Tensor]:
    source, target = (torch.randint(1, 16_000, (batch_size, length)) for _ in range(2))
    source[:, -3:] = 0
    return {"source": source, "target": target}


class Names(nn.Module):
    """Who is meant in a text: letters by a convolution beside words, a recurrent layer, a tag for each."""

    def __init__(self, width: int = 200) -> None:
        super().__init__()
        self.words, self.letters = nn.Embedding(30_000, 100), nn.Embedding(100, 30)
        self.spell = nn.Conv1d(30, 50, 3, padding=1)
        self.read = nn.LSTM(150, width, batch_first=True, bidirectional=True)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(2 * width, 9)

    def forward(self, words: Tensor, letters: Tensor, tags: Tensor) -> Tensor:
        spelt = self.spell(self.letters(letters.flatten(0, 1)).transpose(1, 2)).amax(dim=-1)
        x = torch.cat([self.words(words), spelt.unflatten(0, words.shape)], dim=-1)
        scores = self.head(self.drop(self.read(self.drop(x))[0]))
        return F.cross_entropy(scores.float().flatten(0, 1), tags.flatten())


def _names(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "words": token_ids(batch_size, length, vocabulary=30_000),
        "letters": token_ids(batch_size, length, 12, vocabulary=100),
        "tags": torch.randint(0, 9, (batch_size, length)),
    }


class SmallTexts(nn.Module):
    """A decoder as one writes it today: norms by root mean squares, rotated places, gated layers."""

    def __init__(self, width: int = 640, *, heads: int = 10, depth: int = 10, words: int = 32_000) -> None:
        super().__init__()
        self.words, self.heads = nn.Embedding(words, width), heads
        inner = 4 * width * 2 // 3 // 64 * 64
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * depth + 1))
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.gate = nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        side = width // heads
        angle = torch.arange(1024)[:, None] * 10_000 ** (-torch.arange(0, side, 2) / side)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        one, two = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(x.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids[:, :-1])
        layers = zip(self.mix, self.out, self.gate, self.up, self.down, strict=True)
        for at, (mix, out, gate, up, down) in enumerate(layers):
            parts = mix(self.norms[2 * at](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            query, key, value = parts.unbind(0)
            seen = F.scaled_dot_product_attention(self.turned(query), self.turned(key), value, is_causal=True)
            x = x + out(seen.transpose(1, 2).flatten(2))
            y = self.norms[2 * at + 1](x)
            x = x + down(F.silu(gate(y)) * up(y))
        scores = self.head(self.norms[-1](x))
        return F.cross_entropy(scores.float().flatten(0, 1), ids[:, 1:].flatten())


def _texts(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"ids": token_ids(batch_size, length, vocabulary=32_000)}


class Advertisements(nn.Module):
    """Whether somebody clicks: products of pairs of fields beside a deep network (DeepFM)."""

    def __init__(self, width: int = 16, *, fields: int = 26, rows: int = 40_000) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Embedding(rows, width) for _ in range(fields))
        self.alone = nn.ModuleList(nn.Embedding(rows, 1) for _ in range(fields))
        self.deep = _layers(fields * width + 13, 400, 400, 400, 1)
        self.plain = nn.Linear(13, 1)

    def forward(self, kinds: Tensor, numbers: Tensor, clicks: Tensor) -> Tensor:
        each = torch.stack([table(kinds[:, at]) for at, table in enumerate(self.each)], dim=1)
        alone = torch.stack([table(kinds[:, at]) for at, table in enumerate(self.alone)], dim=1)
        pairs = 0.5 * (each.sum(dim=1) ** 2 - (each**2).sum(dim=1)).sum(dim=1, keepdim=True)
        deep = self.deep(torch.cat([each.flatten(1), numbers], dim=1))
        scores = alone.sum(dim=1) + pairs + deep + self.plain(numbers)
        return F.binary_cross_entropy_with_logits(scores[:, 0], clicks)


def _clicks(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "kinds": torch.randint(0, 40_000, (batch_size, 26)),
        "numbers": torch.randn(batch_size, 13),
        "clicks": torch.randint(0, 2, (batch_size,)).float(),
    }


class Tastes(nn.Module):
    """What somebody likes before what they do not: tables and a small network (NCF, BPR)."""

    def __init__(self, width: int = 64, *, people: int = 200_000, things: int = 80_000) -> None:
        super().__init__()
        self.people, self.things = nn.Embedding(people, 2 * width), nn.Embedding(things, 2 * width)
        self.deep = _layers(2 * width, 2 * width, width, width // 2)
        self.head = nn.Linear(width + width // 2, 1)

    def score(self, person: Tensor, thing: Tensor) -> Tensor:
        a, b = self.people(person), self.things(thing)
        half = a.shape[-1] // 2
        deep = self.deep(torch.cat([a[..., half:], b[..., half:]], dim=-1))
        return self.head(torch.cat([a[..., :half] * b[..., :half], deep], dim=-1))[..., 0]

    def forward(self, person: Tensor, liked: Tensor, others: Tensor) -> Tensor:
        own = self.score(person, liked)
        rest = self.score(person[:, None].expand_as(others), others)
        return -F.logsigmoid(own[:, None] - rest).mean()


def _tastes(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "person": torch.randint(0, 200_000, (batch_size,)),
        "liked": torch.randint(0, 80_000, (batch_size,)),
        "others": torch.randint(0, 80_000, (batch_size, 8)),
    }


class ResidualRows(nn.Module):
    """A number for a row of a table, by wide layers with batch norms around which the row passes."""

    def __init__(self, width: int = 768, *, depth: int = 8, columns: int = 120) -> None:
        super().__init__()
        self.enter = nn.Linear(columns, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.2),
                nn.Linear(2 * width, width), nn.Dropout(0.1),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, rows: Tensor, wanted: Tensor) -> Tensor:
        x = self.enter(rows)
        for block in self.blocks:
            x = x + block(x)
        return F.huber_loss(self.head(x)[:, 0].float(), wanted)


def _rows(*, batch_size: int) -> dict[str, Tensor]:
    return {"rows": torch.randn(batch_size, 120), "wanted": torch.randn(batch_size)}


class Beat(nn.Module):
    """A convolution along time, twice, around which the signal passes."""

    def __init__(self, a: int, b: int, *, side: int = 15, stride: int = 1) -> None:
        super().__init__()
        self.one = nn.Conv1d(a, b, side, stride, side // 2, bias=False)
        self.two = nn.Conv1d(b, b, side, padding=side // 2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm1d(b) for _ in range(2))
        self.around, self.drop = nn.Conv1d(a, b, 1, stride), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(F.relu(self.norms[0](self.one(x))))
        return F.relu(self.norms[1](self.two(y)) + self.around(x))


class Heartbeats(nn.Module):
    """Faults of a heart from twelve leads of ten seconds."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (64, 64, 128, 192, 256, 320)
        self.enter = nn.Sequential(nn.Conv1d(12, 64, 15, 2, 7), nn.BatchNorm1d(64), nn.ReLU())
        self.blocks = nn.Sequential(*(Beat(a, b, stride=2) for a, b in pairwise(sizes)))
        self.head = nn.Linear(320, 26)

    def forward(self, leads: Tensor, faults: Tensor) -> Tensor:
        scores = self.head(self.blocks(self.enter(leads)).mean(dim=-1))
        return F.binary_cross_entropy_with_logits(scores.float(), faults)


def _leads(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "leads": torch.randn(batch_size, 12, 5000),
        "faults": torch.randint(0, 2, (batch_size, 26)).float(),
    }


class BrainWaves(nn.Module):
    """What somebody imagines, from electrodes: kernels over time, then over places, each alone (EEGNet)."""

    def __init__(self, *, places: int = 64) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Conv2d(1, 16, (1, 64), padding="same", bias=False), nn.BatchNorm2d(16))
        self.place = nn.Sequential(
            nn.Conv2d(16, 64, (places, 1), groups=16, bias=False), nn.BatchNorm2d(64), nn.ELU(),
            nn.AvgPool2d((1, 4)), nn.Dropout(0.25),
        )  # fmt: skip
        self.apart = nn.Sequential(
            nn.Conv2d(64, 64, (1, 16), padding="same", groups=64, bias=False),
            nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ELU(),
            nn.AvgPool2d((1, 8)), nn.Dropout(0.25),
        )  # fmt: skip
        self.head = nn.Linear(64 * 16, 4)

    def forward(self, waves: Tensor, labels: Tensor) -> Tensor:
        x = self.apart(self.place(self.time(waves[:, None])))
        return F.cross_entropy(self.head(x.flatten(1)).float(), labels)


def _waves(*, batch_size: int) -> dict[str, Tensor]:
    return {"waves": torch.randn(batch_size, 64, 512), "labels": torch.randint(0, 4, (batch_size,))}


class BirdCalls(nn.Module):
    """Which birds call: a spectrogram by convolutions with pooling, the loudest moments weighed."""

    def __init__(self) -> None:
        super().__init__()
        found: list[nn.Module] = []
        for a, b in pairwise((1, 64, 128, 256, 512)):
            for c in (a, b):
                found += [nn.Conv2d(c, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
            found.append(nn.AvgPool2d(2))
        self.body, self.middle = nn.Sequential(*found), nn.Linear(512, 512)
        self.look, self.head = nn.Conv1d(512, 200, 1), nn.Conv1d(512, 200, 1)

    def forward(self, sounds: Tensor, birds: Tensor) -> Tensor:
        x = self.body(sounds).mean(dim=3)
        x = F.relu(self.middle(F.dropout(x.transpose(1, 2), 0.5, self.training))).transpose(1, 2)
        looked = torch.tanh(self.look(x)).float().softmax(dim=-1)
        scores = (looked * self.head(x).float()).sum(dim=-1)
        return F.binary_cross_entropy_with_logits(scores, birds)


def _calls(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "sounds": torch.randn(batch_size, 1, 512, 64),
        "birds": torch.randint(0, 2, (batch_size, 200)).float(),
    }


class Sets(nn.Module):
    """A number for a set whose order means nothing: attention among its members, then a pooled one."""

    def __init__(self, width: int = 128, *, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(3, width)
        self.mix = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(depth + 1))
        self.wide = nn.ModuleList(_layers(width, 2 * width, width) for _ in range(depth + 1))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 2))
        self.seed, self.head = nn.Parameter(torch.randn(1, 1, width)), nn.Linear(width, 1)

    def forward(self, members: Tensor, wanted: Tensor) -> Tensor:
        x = self.enter(members)
        for at, (mix, wide) in enumerate(zip(self.mix, self.wide, strict=True)):
            asks = self.seed.expand(len(x), -1, -1) if at == len(self.wide) - 1 else x
            seen = self.norms[2 * at](asks + mix(asks, x, x, need_weights=False)[0])
            x = self.norms[2 * at + 1](seen + wide(seen))
        return F.mse_loss(self.head(x[:, 0])[:, 0].float(), wanted)


def _sets(*, batch_size: int, members: int) -> dict[str, Tensor]:
    return {"members": torch.randn(batch_size, members, 3), "wanted": torch.randn(batch_size)}


class Control(nn.Module):
    """A policy with two critics and their slow copies, all at once (SAC)."""

    def __init__(self, width: int = 1024, *, state: int = 376, moves: int = 17) -> None:
        super().__init__()
        self.policy = _layers(state, width, width, 2 * moves)
        self.critics = nn.ModuleList(_layers(state + moves, width, width, 1) for _ in range(2))
        self.slow = copy.deepcopy(self.critics).requires_grad_(False)
        self.heat = nn.Parameter(torch.zeros(()))

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        centre, spread = self.policy(state).chunk(2, dim=-1)
        spread = spread.clamp(-20, 2)
        drawn = centre + spread.exp() * torch.randn_like(spread)
        chance = (-0.5 * ((drawn - centre) / spread.exp()) ** 2 - spread).sum(dim=-1)
        moves = torch.tanh(drawn)
        return moves, chance - torch.log(1 - moves**2 + 1e-6).sum(dim=-1)

    @staticmethod
    def worth(critics: nn.ModuleList, state: Tensor, moves: Tensor) -> Tensor:
        both = torch.cat([state, moves], dim=-1)
        return torch.stack([critic(both)[:, 0] for critic in critics])

    def forward(self, before: Tensor, moves: Tensor, gains: Tensor, after: Tensor, ends: Tensor) -> Tensor:
        with torch.no_grad():
            then, chance = self.act(after)
            later = self.worth(self.slow, after, then).amin(dim=0) - self.heat.exp() * chance
            wanted = gains + 0.99 * (1 - ends) * later
        wrong = ((self.worth(self.critics, before, moves) - wanted) ** 2).mean(dim=1).sum()
        tried, chance = self.act(before)
        reached = self.worth(self.critics, before, tried).amin(dim=0)
        acted = (self.heat.exp().detach() * chance - reached).mean()
        return wrong + acted - self.heat * (chance.detach() - 17).mean()


def _experience(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "before": torch.randn(batch_size, 376),
        "moves": torch.rand(batch_size, 17) * 2 - 1,
        "gains": torch.randn(batch_size),
        "after": torch.randn(batch_size, 376),
        "ends": torch.zeros(batch_size),
    }


class ResidualForecast(nn.Module):
    """A forecast from blocks that each explain a part of the past and of the future (N-BEATS)."""

    def __init__(self, width: int = 512, *, blocks: int = 24, past: int = 336, future: int = 48) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_layers(past, width, width, width, width) for _ in range(blocks))
        self.back = nn.ModuleList(nn.Linear(width, past) for _ in range(blocks))
        self.ahead = nn.ModuleList(nn.Linear(width, future) for _ in range(blocks))

    def forward(self, past: Tensor, future: Tensor) -> Tensor:
        found = past[:, -1:].expand(-1, future.shape[1])
        for block, back, ahead in zip(self.blocks, self.back, self.ahead, strict=True):
            x = F.relu(block(past))
            past, found = past - back(x), found + ahead(x)
        return (2 * (found - future).abs() / (found.abs() + future.abs() + 1e-6)).mean()


def _forecasts(*, batch_size: int) -> dict[str, Tensor]:
    return {"past": torch.randn(batch_size, 336), "future": torch.randn(batch_size, 48)}


class PenStrokes(nn.Module):
    """How a pen moves on, as a mix of normal distributions after three recurrent layers."""

    def __init__(self, width: int = 400, *, mixed: int = 20) -> None:
        super().__init__()
        self.follow = nn.LSTM(3, width, num_layers=3, batch_first=True)
        self.head = nn.Linear(width, 6 * mixed + 1)
        self.mixed = mixed

    def forward(self, strokes: Tensor) -> Tensor:
        found = self.head(self.follow(strokes[:, :-1])[0]).float()
        parts = found[..., 1:].unflatten(-1, (6, self.mixed))
        weight, x, y, wide, high, lean = parts.unbind(dim=-2)
        lean = torch.tanh(lean)
        a = (strokes[:, 1:, :1] - x) * torch.exp(-wide)
        b = (strokes[:, 1:, 1:2] - y) * torch.exp(-high)
        free = 1 - lean**2 + 1e-4
        chance = -(a**2 + b**2 - 2 * lean * a * b) / (2 * free) - wide - high - 0.5 * torch.log(free)
        moved = torch.logsumexp(weight.log_softmax(dim=-1) + chance, dim=-1)
        lifted = F.binary_cross_entropy_with_logits(found[..., 0], strokes[:, 1:, 2])
        return lifted - moved.mean()


def _strokes(*, batch_size: int, length: int) -> dict[str, Tensor]:
    strokes = torch.randn(batch_size, length, 3)
    strokes[..., 2] = (strokes[..., 2] > 1).float()
    return {"strokes": strokes}


class Ranking(nn.Module):
    """Documents in the order in which they answer a question, each list as one distribution (ListNet)."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(136)
        self.score = _layers(136, width, width, width // 2, 1, kind=nn.GELU)

    def forward(self, documents: Tensor, grades: Tensor) -> Tensor:
        scores = self.score(self.norm(documents))[..., 0].float()
        return -(grades.softmax(dim=-1) * scores.log_softmax(dim=-1)).sum(dim=-1).mean()


def _lists(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "documents": torch.randn(batch_size, 200, 136),
        "grades": torch.randint(0, 5, (batch_size, 200)).float(),
    }


class AskedImages(nn.Module):
    """A question about a picture: its words recurrently, its regions looked at twice, one answer of many."""

    def __init__(self, width: int = 512, *, answers: int = 3000) -> None:
        super().__init__()
        self.words, self.read = nn.Embedding(15_000, 300), nn.GRU(300, width, batch_first=True)
        self.see = nn.Linear(2048, width)
        self.looks = nn.ModuleList(nn.Linear(width, 1) for _ in range(2))
        self.head = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(2 * width, answers)
        )

    def forward(self, regions: Tensor, words: Tensor, answers: Tensor) -> Tensor:
        asked = self.read(self.words(words))[1][0]
        seen = self.see(F.normalize(regions, dim=-1))
        for look in self.looks:
            share = look(torch.tanh(seen * asked[:, None])).softmax(dim=1)
            asked = asked + (share * seen).sum(dim=1)
        return F.binary_cross_entropy_with_logits(self.head(asked).float(), answers) * answers.shape[1]


def _asked(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "regions": torch.randn(batch_size, 36, 2048),
        "words": token_ids(batch_size, 20, vocabulary=15_000),
        "answers": torch.rand(batch_size, 3000),
    }


def _subject(family: str, make_model: type[nn.Module], make_batch: object) -> Subject:
    assert callable(make_batch)
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=_own)


TOPICS = _subject("topics", Topics, _topics)
SENTIMENT = _subject("sentiment", Sentiment, _reviews)
PHRASES = _subject("phrases", Phrases, _phrases)
NAMES = _subject("names", Names, _names)
SMALL_TEXTS = _subject("small-texts", SmallTexts, _texts)
ADVERTISEMENTS = _subject("advertisements", Advertisements, _clicks)
TASTES = _subject("tastes", Tastes, _tastes)
RESIDUAL_ROWS = _subject("residual-rows", ResidualRows, _rows)
HEARTBEATS = _subject("heartbeats", Heartbeats, _leads)
BRAIN_WAVES = _subject("brain-waves", BrainWaves, _waves)
BIRD_CALLS = _subject("bird-calls", BirdCalls, _calls)
SETS = _subject("sets", Sets, _sets)
CONTROL = _subject("control", Control, _experience)
RESIDUAL_FORECAST = _subject("residual-forecast", ResidualForecast, _forecasts)
PEN_STROKES = _subject("pen-strokes", PenStrokes, _strokes)
RANKING = _subject("ranking", Ranking, _lists)
ASKED_IMAGES = _subject("asked-images", AskedImages, _asked)

CONFIGURATIONS: list[Configuration] = [
    TOPICS.at(256, sizes={"length": 256}, precision="fp32", optimizer="adadelta"),
    SENTIMENT.at(64, sizes={"length": 200}, precision="fp32", clip_norm=5.0, optimizer="adam"),
    PHRASES.at(64, sizes={"length": 96}, precision="fp16", clip_norm=1.0, optimizer="adam"),
    NAMES.at(64, sizes={"length": 80}, precision="fp32", clip_norm=5.0, optimizer="sgd-momentum"),
    SMALL_TEXTS.at(8, sizes={"length": 1025}, precision="bf16", clip_norm=1.0, optimizer="adamw-fused"),
    ADVERTISEMENTS.at(8192, precision="fp32", optimizer="adam"),
    TASTES.at(16384, precision="bf16", optimizer="adagrad"),
    RESIDUAL_ROWS.at(8192, precision="tf32", optimizer="adamw"),
    HEARTBEATS.at(64, precision="fp32", optimizer="adam"),
    BRAIN_WAVES.at(128, precision="fp32", optimizer="adam"),
    BIRD_CALLS.at(32, precision="fp16", optimizer="adamw-schedule"),
    SETS.at(64, sizes={"members": 1000}, precision="bf16", optimizer="adam"),
    CONTROL.at(4096, precision="fp32", optimizer="adam"),
    RESIDUAL_FORECAST.at(8192, precision="fp32", optimizer="adam"),
    PEN_STROKES.at(64, sizes={"length": 401}, precision="fp32", clip_norm=10.0, optimizer="rmsprop"),
    RANKING.at(256, precision="fp32", optimizer="adagrad"),
    ASKED_IMAGES.at(512, precision="bf16", clip_norm=0.25, optimizer="adamax"),
    SMALL_TEXTS.at(4, sizes={"length": 1025}, precision="fp32", accumulation=2, optimizer="adamw-groups"),
    PHRASES.at(32, sizes={"length": 96}, precision="tf32", accumulation=4, optimizer="adamw-schedule"),
    SETS.at(32, sizes={"members": 1000}, precision="fp32", optimizer="sgd-momentum"),
]
