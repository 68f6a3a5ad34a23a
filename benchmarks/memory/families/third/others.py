"""Third unseen set, everything else: graphs, flows of time, sets, splines, tables, worlds and inner loops."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject


class EdgeAttention(nn.Module):
    """Attention along the edges of a graph: a softmax over the edges that end in the same node."""

    def __init__(self, width: int, *, heads: int = 8) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.source, self.target = (nn.Parameter(torch.zeros(heads, width // heads)) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        h = self.mix(self.norm(x)).view(-1, self.heads, self.source.shape[1])
        score = F.leaky_relu((h * self.source).sum(-1)[start] + (h * self.target).sum(-1)[end], 0.2)
        weight = (score - score.max().detach()).exp()
        total = torch.zeros(h.shape[:2], device=x.device, dtype=weight.dtype).index_add(0, end, weight)
        weight = F.dropout(weight / (total[end] + 1e-9), 0.2, self.training)
        found = torch.zeros_like(h).index_add(0, end, (h[start] * weight[..., None]).to(h.dtype))
        return x + F.elu(found.flatten(1))


class Graph(nn.Module):
    def __init__(self, width: int = 256, num_layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(100, width)
        self.layers = nn.ModuleList(EdgeAttention(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 40)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, edges)
        scores: Tensor = self.head(x)
        return scores


def _graph(*, batch_size: int, nodes: int) -> dict[str, Tensor]:
    count = batch_size * nodes
    return {
        "x": torch.randn(count, 100),
        "edges": torch.randint(0, count, (2, 8 * count)),
        "labels": torch.randint(0, 40, (count,)),
    }


def _graph_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["edges"]), batch["labels"])


class Flowing(nn.Module):
    """Features that move by a differential equation, in steps of the fourth order."""

    def __init__(self, width: int = 64, *, steps: int = 6) -> None:
        super().__init__()
        self.steps, self.enter = steps, nn.Conv2d(3, width, 4, 2, 1)
        self.first, self.second = (nn.Conv2d(width + 1, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(16, width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def slope(self, time: float, x: Tensor) -> Tensor:
        now = torch.full_like(x[:, :1], time)
        x = F.softplus(self.norms[0](self.first(torch.cat([now, x], dim=1))))
        found: Tensor = self.norms[1](self.second(torch.cat([now, x], dim=1)))
        return found

    def forward(self, x: Tensor) -> Tensor:
        x, step = self.enter(x), 1 / self.steps
        for at in range(self.steps):
            now = at * step
            one = self.slope(now, x)
            two = self.slope(now + step / 2, x + step / 2 * one)
            three = self.slope(now + step / 2, x + step / 2 * two)
            four = self.slope(now + step, x + step * three)
            x = x + step / 6 * (one + 2 * two + 2 * three + four)
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


def _small_images(*, batch_size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch_size, 3, 32, 32), "labels": torch.randint(0, 10, (batch_size,))}


def _class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


class Induced(nn.Module):
    """A set reads a few points of its own and is read by them: attention that grows with the set alone."""

    def __init__(self, width: int, *, points: int = 32) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, points, width))
        self.gather, self.spread = (nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.wide = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        points = self.points.expand(x.shape[0], -1, -1)
        seen = self.norms[0](points + self.gather(points, x, x)[0])
        x = self.norms[1](x + self.spread(x, seen, seen)[0])
        found: Tensor = x + self.wide(x)
        return found


class Clusters(nn.Module):
    def __init__(self, width: int = 256, num_layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.layers = nn.Sequential(*(Induced(width) for _ in range(num_layers)))
        self.head = nn.Linear(width, 5 * 4)

    def forward(self, points: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.enter(points)).amax(dim=1))
        return found.view(-1, 4, 5)


def _sets(*, batch_size: int, points: int) -> dict[str, Tensor]:
    return {"points": torch.randn(batch_size, points, 2)}


def _mixture_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The likelihood of every point under the clusters that were named for its set."""
    share, centre, spread = model(batch["points"]).float().split([1, 2, 2], dim=-1)
    spread = F.softplus(spread)
    away = (batch["points"][:, :, None] - centre[:, None]) / spread[:, None]
    each = (
        -0.5 * away.square().sum(-1)
        - spread.log().sum(-1)[:, None]
        + share.squeeze(-1).log_softmax(-1)[:, None]
    )
    return -each.logsumexp(dim=-1).mean()


class Spline(nn.Module):
    """A curve of its own for each pair of inputs and outputs, as a sum of splines."""

    def __init__(self, num_in: int, num_out: int, *, grid: int = 8, order: int = 3) -> None:
        super().__init__()
        self.order = order
        knots = torch.arange(-order, grid + order + 1) * (2 / grid) - 1
        self.register_buffer("knots", knots.expand(num_in, -1).contiguous())
        self.plain = nn.Parameter(torch.randn(num_out, num_in) * 0.05)
        self.curves = nn.Parameter(torch.randn(num_out, num_in, grid + order) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        knots, at = self.knots, x[..., None]
        bases = ((at >= knots[:, :-1]) & (at < knots[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (at - knots[:, : -(k + 1)]) / (knots[:, k:-1] - knots[:, : -(k + 1)])
            right = (knots[:, k + 1 :] - at) / (knots[:, k + 1 :] - knots[:, 1:-k])
            bases = left * bases[..., :-1] + right * bases[..., 1:]
        return F.linear(F.silu(x), self.plain) + F.linear(bases.flatten(1), self.curves.flatten(1))


def _spline_model() -> nn.Module:
    return nn.Sequential(*(Spline(a, b) for a, b in pairwise([784, 64, 64, 10])))


def _digits(*, batch_size: int) -> dict[str, Tensor]:
    return {"x": torch.rand(batch_size, 784), "labels": torch.randint(0, 10, (batch_size,))}


class HashedGrids(nn.Module):
    """Tables of features at many resolutions, looked up by the corners around each place."""

    def __init__(self, *, levels: int = 12, rows: int = 1 << 18, width: int = 2) -> None:
        super().__init__()
        self.rows, self.tables = rows, nn.Parameter(torch.randn(levels, rows, width) * 1e-4)
        self.register_buffer("sides", torch.tensor([int(16 * 1.5**at) for at in range(levels)]))
        corners = [[(n >> shift) & 1 for shift in range(3)] for n in range(8)]
        self.register_buffer("corners", torch.tensor(corners))
        self.register_buffer("primes", torch.tensor([1, 2654435761, 805459861]))
        self.net = nn.Sequential(
            nn.Linear(levels * width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
        )

    def forward(self, places: Tensor) -> Tensor:
        scaled = places[:, None] * self.sides[:, None]
        low = scaled.floor()
        part = (scaled - low)[:, :, None]
        corners = low.long()[:, :, None] + self.corners
        index = (corners * self.primes).sum(dim=-1) % self.rows
        level = torch.arange(self.tables.shape[0], device=places.device)[None, :, None]
        features = self.tables[level, index]
        weights = torch.where(self.corners.bool(), part, 1 - part).prod(dim=-1)
        found: Tensor = self.net((features * weights[..., None]).sum(dim=2).flatten(1))
        return found


def _places(*, batch_size: int) -> dict[str, Tensor]:
    return {"places": torch.rand(batch_size, 3), "colours": torch.rand(batch_size, 4)}


def _colour_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.huber_loss(model(batch["places"]).sigmoid(), batch["colours"])


class World(nn.Module):
    """A state of drawn categories and of a recurrent cell, carried through a film of observations."""

    def __init__(self, *, width: int = 512, groups: int = 32, classes: int = 32) -> None:
        super().__init__()
        self.groups, self.classes = groups, classes
        drawn = groups * classes
        self.see = nn.Sequential(nn.Linear(512, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.enter, self.cell = nn.Linear(drawn + 8, width), nn.GRUCell(width, width)
        self.before, self.after = nn.Linear(width, drawn), nn.Linear(2 * width, drawn)
        self.draw = nn.Sequential(nn.Linear(width + drawn, width), nn.ELU(), nn.Linear(width, 512))

    def forward(self, seen: Tensor, done: Tensor) -> Tensor:
        batch, length = seen.shape[:2]
        shape = (batch, self.groups, self.classes)
        inside = self.see(seen)
        hidden = inside.new_zeros(batch, self.cell.hidden_size)
        drawn, losses = inside.new_zeros(batch, self.groups * self.classes), []
        for at in range(length):
            hidden = self.cell(F.elu(self.enter(torch.cat([drawn, done[:, at]], dim=-1))), hidden)
            prior = self.before(hidden).view(shape).float().log_softmax(-1)
            scores = self.after(torch.cat([hidden, inside[:, at]], dim=-1)).view(shape)
            posterior = scores.float().log_softmax(-1)
            drawn = F.gumbel_softmax(posterior, hard=True).flatten(1)
            apart = F.kl_div(prior, posterior, log_target=True, reduction="batchmean")
            losses.append(
                F.mse_loss(self.draw(torch.cat([hidden, drawn], dim=-1)), seen[:, at]) + 0.1 * apart
            )
        return torch.stack(losses).mean()


def _film(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"seen": torch.randn(batch_size, length, 512), "done": torch.randn(batch_size, length, 8)}


def _world_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["seen"], batch["done"])
    return loss


class Columns(nn.Module):
    """A token for each column of a table, numbers and categories alike, read by attention."""

    def __init__(self, *, numbers: int = 40, categories: int = 20, width: int = 192) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.randn(numbers, width) * 0.1) for _ in range(2))
        self.tables = nn.ModuleList(nn.Embedding(1000, width) for _ in range(categories))
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            width, 8, 2 * width, 0.1, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, numbers: Tensor, names: Tensor) -> Tensor:
        tokens = [self.first.expand(numbers.shape[0], -1, -1), numbers[..., None] * self.scale + self.shift]
        tokens.append(torch.stack([table(names[:, at]) for at, table in enumerate(self.tables)], dim=1))
        found: Tensor = self.head(self.layers(torch.cat(tokens, dim=1))[:, 0])
        return found.squeeze(1)


def _table(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "numbers": torch.randn(batch_size, 40),
        "names": torch.randint(0, 1000, (batch_size, 20)),
        "value": torch.randn(batch_size),
    }


def _value_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.smooth_l1_loss(model(batch["numbers"], batch["names"]), batch["value"])


class Learner(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a in (3, width, width, width):
            layers += [nn.Conv2d(a, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


def _tasks(*, batch_size: int) -> dict[str, Tensor]:
    return {name: torch.randn(batch_size, 3, 32, 32) for name in ("support", "query")} | {
        f"{name} labels": torch.randint(0, 5, (batch_size,)) for name in ("support", "query")
    }


def _inner_loop_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss after three steps of descent, whose own gradients are differentiated."""
    weights = dict(model.named_parameters())
    for _ in range(3):
        said = torch.func.functional_call(model, weights, (batch["support"],))
        loss = F.cross_entropy(said, batch["support labels"])
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = zip(weights.items(), slopes, strict=True)
        weights = {name: weight - 0.1 * slope for (name, weight), slope in moved}
    said = torch.func.functional_call(model, weights, (batch["query"],))
    return F.cross_entropy(said, batch["query labels"])


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


GRAPH = _subject("edge-attention", Graph, _graph, _graph_loss)
FLOWING = _subject("flowing", Flowing, _small_images, _class_loss)
CLUSTERS = _subject("clusters", Clusters, _sets, _mixture_loss)
SPLINES = _subject("splines", _spline_model, _digits, _class_loss)
GRIDS = _subject("hashed-grids", HashedGrids, _places, _colour_loss)
WORLD = _subject("world", World, _film, _world_loss)
COLUMNS = _subject("columns", Columns, _table, _value_loss)
INNER = _subject("inner-loop", Learner, _tasks, _inner_loop_loss)

CONFIGURATIONS: list[Configuration] = [
    GRAPH.at(32, sizes={"nodes": 1000}, precision="fp32", optimizer="adam"),
    GRAPH.at(64, sizes={"nodes": 1000}, precision="bf16"),
    FLOWING.at(128, precision="fp32", optimizer="sgd-momentum"),
    FLOWING.at(256, precision="bf16"),
    CLUSTERS.at(64, sizes={"points": 1000}, precision="fp32", optimizer="adam"),
    CLUSTERS.at(128, sizes={"points": 1000}, precision="bf16"),
    SPLINES.at(2048, precision="fp32"),
    GRIDS.at(1 << 17, precision="fp32", optimizer="adam"),
    WORLD.at(64, sizes={"length": 32}, precision="fp32", clip_norm=100.0, optimizer="adam"),
    COLUMNS.at(1024, precision="fp32"),
    COLUMNS.at(2048, precision="bf16", optimizer="adamw-fused"),
    INNER.at(64, precision="fp32", optimizer="adam"),
]
