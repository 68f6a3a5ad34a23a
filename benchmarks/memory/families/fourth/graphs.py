"""Fourth unseen set, graphs: molecules, forces, points that turn, sampled neighbours and folding proteins."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.memory.configuration import Configuration, Subject


def _layers(*sizes: int, kind: type[nn.Module] = nn.SiLU) -> nn.Sequential:
    found: list[nn.Module] = []
    for a, b in pairwise(sizes):
        found += [nn.Linear(a, b), kind()]
    return nn.Sequential(*found[:-1])


def _own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


class Messages(nn.Module):
    """Molecules: a matrix for each bond, messages along it, and a recurrent cell at each atom."""

    def __init__(self, width: int = 64, *, rounds: int = 4) -> None:
        super().__init__()
        self.width, self.rounds = width, rounds
        self.enter, self.bond = nn.Linear(30, width), _layers(10, 128, width * width, kind=nn.ReLU)
        self.cell, self.read = nn.GRU(width, width), nn.LSTMCell(2 * width, width)
        self.head = _layers(2 * width, width, 1, kind=nn.ReLU)

    def forward(self, atoms: Tensor, bonds: Tensor, ends: Tensor, of: Tensor, value: Tensor) -> Tensor:
        x = F.relu(self.enter(atoms))
        hidden = x[None]
        matrices = self.bond(bonds).view(-1, self.width, self.width)
        source, target = ends
        for _ in range(self.rounds):
            sent = torch.bmm(x[source][:, None], matrices).squeeze(1)
            total = torch.zeros_like(x, dtype=sent.dtype).index_add_(0, target, sent)
            count = torch.zeros(x.shape[0], device=x.device).index_add_(
                0, target, torch.ones(target.shape[0], device=x.device)
            )
            news = F.relu(total / count.clamp(min=1)[:, None])
            out, hidden = self.cell(news[None].to(x.dtype), hidden)
            x = out.squeeze(0)
        return F.l1_loss(self.head(self.pooled(x, of, value.shape[0])).squeeze(1), value)

    def pooled(self, x: Tensor, of: Tensor, num: int) -> Tensor:
        """A reader asks all atoms of each molecule three times."""
        answer = x.new_zeros(num, 2 * self.width)
        hidden = state = x.new_zeros(num, self.width)
        for _ in range(3):
            hidden, state = self.read(answer, (hidden, state))
            score = (x * hidden[of]).sum(dim=1).float()
            most = torch.full((num,), -1e9, device=x.device).scatter_reduce(0, of, score.detach(), "amax")
            weight = torch.exp(score - most[of])
            total = torch.zeros(num, device=x.device).scatter_add(0, of, weight)
            weight = weight / (total[of] + 1e-9)
            seen = torch.zeros(num, self.width, device=x.device).index_add(0, of, weight[:, None] * x.float())
            answer = torch.cat([hidden, seen.to(hidden.dtype)], dim=1)
        return answer


def _molecules(*, batch_size: int) -> dict[str, Tensor]:
    atoms, bonds = 18 * batch_size, 38 * batch_size
    return {
        "atoms": torch.randn(atoms, 30),
        "bonds": torch.randn(bonds, 10),
        "ends": torch.randint(0, atoms, (2, bonds)),
        "of": torch.arange(batch_size).repeat_interleave(18),
        "value": torch.randn(batch_size),
    }


class Forces(nn.Module):
    """An energy from distances of atoms, and the forces as its slope, both fitted."""

    def __init__(self, width: int = 128, *, rounds: int = 3, waves: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.register_buffer("centres", torch.linspace(0, 5, waves))
        self.filters = nn.ModuleList(_layers(waves, width, width, kind=nn.Softplus) for _ in range(rounds))
        self.before = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(rounds))
        self.after = nn.ModuleList(_layers(width, width, width, kind=nn.Softplus) for _ in range(rounds))
        self.head = _layers(width, width // 2, 1, kind=nn.Softplus)

    def forward(self, kinds: Tensor, places: Tensor, ends: Tensor, forces: Tensor, energy: Tensor) -> Tensor:
        places = places.requires_grad_()
        source, target = ends
        apart = (places[source] - places[target]).norm(dim=1)
        waves = torch.exp(-10 * (apart[:, None] - self.centres) ** 2)
        fading = 0.5 * (torch.cos(apart * math.pi / 5) + 1)
        x = self.embedding(kinds)
        for filters, before, after in zip(self.filters, self.before, self.after, strict=True):
            weights = filters(waves) * fading[:, None]
            sent = before(x)[source] * weights
            x = x + after(torch.zeros_like(x).index_add(0, target, sent))
        each = self.head(x).squeeze(1)
        total = each.view(energy.shape[0], -1).sum(dim=1)
        (slope,) = torch.autograd.grad(total.sum(), places, create_graph=True)
        return F.mse_loss(total, energy) + 100 * F.mse_loss(-slope, forces)


def _trajectory(*, batch_size: int) -> dict[str, Tensor]:
    atoms, pairs = 24 * batch_size, 24 * 20 * batch_size
    return {
        "kinds": torch.randint(1, 100, (atoms,)),
        "places": torch.randn(atoms, 3),
        "ends": torch.randint(0, atoms, (2, pairs)),
        "forces": torch.randn(atoms, 3),
        "energy": torch.randn(batch_size),
    }


class Turning(nn.Module):
    """Points that move along their differences, so that turning the points turns the answer."""

    def __init__(self, width: int = 128, *, rounds: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(16, width)
        self.edges = nn.ModuleList(_layers(2 * width + 1, width, width) for _ in range(rounds))
        self.moves = nn.ModuleList(_layers(width, width, 1) for _ in range(rounds))
        self.nodes = nn.ModuleList(_layers(2 * width, width, width) for _ in range(rounds))

    def forward(self, features: Tensor, places: Tensor, noise: Tensor) -> Tensor:
        h, x = self.enter(features), places + 0.5 * noise
        num = x.shape[1]
        for edges, moves, nodes in zip(self.edges, self.moves, self.nodes, strict=True):
            apart = x[:, :, None] - x[:, None]
            far = apart.square().sum(dim=-1, keepdim=True)
            ends = [h[:, :, None].expand(-1, -1, num, -1), h[:, None].expand(-1, num, -1, -1)]
            message = F.silu(edges(torch.cat([*ends, far.to(h.dtype)], dim=-1)))
            x = x + (apart / (far.sqrt() + 1) * moves(message)).mean(dim=2)
            h = h + nodes(torch.cat([h, message.sum(dim=2)], dim=-1))
        return F.mse_loss((x - places).float(), 0.5 * noise)


def _crystals(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "features": torch.randn(batch_size, 29, 16),
        "places": torch.randn(batch_size, 29, 3),
        "noise": torch.randn(batch_size, 29, 3),
    }


class Sampled(nn.Module):
    """A node and samples of its neighbours, two steps wide."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(a, width) for a in (602, width))
        self.near = nn.ModuleList(nn.Linear(a, width, bias=False) for a in (602, width))
        self.head = nn.Linear(width, 41)

    def forward(self, node: Tensor, near: Tensor, far: Tensor, labels: Tensor) -> Tensor:
        levels = [node, near, far]
        for own, close in zip(self.own, self.near, strict=True):
            levels = [
                F.dropout(F.normalize(F.relu(own(a) + close(b.mean(dim=-2))), dim=-1), 0.5, self.training)
                for a, b in pairwise(levels)
            ]
        return F.cross_entropy(self.head(levels[0]), labels)


def _neighbours(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "node": torch.randn(batch_size, 602),
        "near": torch.randn(batch_size, 10, 602),
        "far": torch.randn(batch_size, 10, 15, 602),
        "labels": torch.randint(0, 41, (batch_size,)),
    }


class Folding(nn.Module):
    """Rows of related sequences and a picture of all pairs of places inform each other, recomputed."""

    def __init__(self, *, rows: int = 128, pairs: int = 96, blocks: int = 3) -> None:
        super().__init__()
        self.letters, self.pair = nn.Embedding(23, rows), nn.Linear(2 * rows, pairs)
        self.blocks = nn.ModuleList(FoldingBlock(rows, pairs) for _ in range(blocks))
        self.head, self.far = nn.Linear(rows, 23), nn.Linear(pairs, 64)

    def forward(self, letters: Tensor, hidden: Tensor, far: Tensor) -> Tensor:
        rows = self.letters(letters)
        num = rows.shape[2]
        first = rows[:, 0]
        ends = [first[:, :, None].expand(-1, -1, num, -1), first[:, None].expand(-1, num, -1, -1)]
        pairs = self.pair(torch.cat(ends, dim=-1))
        for block in self.blocks:
            rows, pairs = checkpoint(block, rows, pairs, use_reentrant=False)
        wrong = F.cross_entropy(self.head(rows).flatten(0, 2).float(), hidden.flatten())
        either = self.far(pairs + pairs.transpose(1, 2)).flatten(0, 2).float()
        return 2 * wrong + F.cross_entropy(either, far.flatten())


class FoldingBlock(nn.Module):
    def __init__(self, rows: int, pairs: int, *, heads: int = 4, small: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in (rows, pairs, rows, rows, pairs, pairs))
        self.mix, self.gate, self.out = (
            nn.Linear(rows, 3 * rows),
            nn.Linear(rows, rows),
            nn.Linear(rows, rows),
        )
        self.bias = nn.Linear(pairs, heads, bias=False)
        self.wide_rows = _layers(rows, 4 * rows, rows, kind=nn.ReLU)
        self.left, self.right = nn.Linear(rows, small), nn.Linear(rows, small)
        self.outer = nn.Linear(small * small, pairs)
        self.sides, self.gates = nn.Linear(pairs, 2 * pairs), nn.Linear(pairs, 2 * pairs)
        self.triangle, self.last = nn.Linear(pairs, pairs), nn.LayerNorm(pairs)
        self.wide_pairs = _layers(pairs, 4 * pairs, pairs, kind=nn.ReLU)

    def forward(self, rows: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        inside = self.norms[0](rows)
        query, key, value = self.mix(inside).unflatten(-1, (3, self.heads, -1)).unbind(dim=-3)
        scores = torch.einsum("bsihd,bsjhd->bshij", query / query.shape[-1] ** 0.5, key)
        scores = scores + self.bias(self.norms[1](pairs)).permute(0, 3, 1, 2)[:, None]
        found = torch.einsum("bshij,bsjhd->bsihd", scores.softmax(dim=-1), value).flatten(-2)
        rows = rows + self.out(torch.sigmoid(self.gate(inside)) * found)
        rows = rows + self.wide_rows(self.norms[2](rows))
        inside = self.norms[3](rows)
        outer = torch.einsum("bsix,bsjy->bijxy", self.left(inside), self.right(inside)) / rows.shape[1]
        pairs = pairs + self.outer(outer.flatten(-2))
        inside = self.norms[4](pairs)
        one, two = (torch.sigmoid(self.gates(inside)) * self.sides(inside)).chunk(2, dim=-1)
        pairs = pairs + self.triangle(self.last(torch.einsum("bikc,bjkc->bijc", one, two)))
        pairs = pairs + self.wide_pairs(self.norms[5](pairs))
        return rows, pairs


def _alignment(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "letters": torch.randint(0, 23, (batch_size, 32, length)),
        "hidden": torch.randint(0, 23, (batch_size, 32, length)),
        "far": torch.randint(0, 64, (batch_size, length, length)),
    }


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any = _own) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


MESSAGES = _subject("messages", Messages, _molecules)
FORCES = _subject("forces", Forces, _trajectory)
TURNING = _subject("turning-points", Turning, _crystals)
SAMPLED = _subject("sampled-neighbours", Sampled, _neighbours)
FOLDING = _subject("folding", Folding, _alignment)

CONFIGURATIONS: list[Configuration] = [
    MESSAGES.at(512, precision="fp32", optimizer="adam"),
    FORCES.at(64, precision="fp32", optimizer="adam"),
    TURNING.at(256, precision="fp32", optimizer="adam"),
    TURNING.at(512, precision="bf16", optimizer="adamw-loop"),
    SAMPLED.at(1024, precision="fp32", optimizer="adam"),
    FOLDING.at(2, sizes={"length": 192}, precision="bf16", clip_norm=0.1, optimizer="adam"),
    FOLDING.at(1, sizes={"length": 192}, precision="fp32", accumulation=2),
]
