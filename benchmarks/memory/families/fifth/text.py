"""Fifth unseen set, text and sequences: retrieval, language models, rewards, tags, buckets and molecules."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from benchmarks.memory.configuration import Configuration, Subject, token_ids

VOCABULARY = 20_000


class LateInteraction(nn.Module):
    """A score for a document: each word of the question takes its best word of the document (ColBERT)."""

    def __init__(self, width: int = 384, *, depth: int = 6) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.leave = nn.Linear(width, 128, bias=False)

    def encode(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return F.normalize(self.leave(self.encoder(x, src_key_padding_mask=ids == 0)), dim=-1)

    def forward(self, questions: Tensor, documents: Tensor) -> Tensor:
        asked, read = self.encode(questions), self.encode(documents)
        alike = torch.einsum("qiw,djw->qdij", asked, read)
        alike = alike.masked_fill((documents == 0)[None, :, None, :], -1e4)
        scores = alike.amax(dim=-1).sum(dim=-1)
        return F.cross_entropy(scores / 0.5, torch.arange(scores.shape[0], device=scores.device))


def _questions(*, batch_size: int, length: int) -> dict[str, Tensor]:
    documents = torch.randint(1, VOCABULARY, (batch_size, length))
    documents[:, -5:] = 0
    return {"questions": torch.randint(1, VOCABULARY, (batch_size, 32)), "documents": documents}


class StateChunks(nn.Module):
    """One layer of a state space whose decays are numbers, in chunks (Mamba 2)."""

    def __init__(self, width: int, *, heads: int = 16, state: int = 64, chunk: int = 64) -> None:
        super().__init__()
        self.heads, self.state, self.chunk, self.inner = heads, state, chunk, 2 * width
        self.enter = nn.Linear(width, 2 * self.inner + 2 * state + heads, bias=False)
        mixed = self.inner + 2 * state
        self.mix = nn.Conv1d(mixed, mixed, 4, groups=mixed, padding=3)
        self.rate, self.shift = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.skip, self.norm = nn.Parameter(torch.ones(heads)), nn.RMSNorm(self.inner)
        self.leave = nn.Linear(self.inner, width, bias=False)

    @staticmethod
    def sums(x: Tensor) -> Tensor:
        """The sum from each place to each later one, and minus infinity to earlier ones."""
        length = x.shape[-1]
        lower = torch.tril(torch.ones(length, length, dtype=torch.bool, device=x.device), -1)
        x = x[..., None].expand(*x.shape, length).masked_fill(~lower, 0).cumsum(dim=-2)
        return x.masked_fill(~torch.tril(torch.ones_like(lower)), -math.inf)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        gate, mixed, step = self.enter(x).split([self.inner, self.inner + 2 * self.state, self.heads], dim=-1)
        mixed = F.silu(self.mix(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        value, into, out = mixed.split([self.inner, self.state, self.state], dim=-1)
        step = F.softplus(step.float() + self.shift)
        decay = -(self.rate.exp() * step).unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2)
        value = (value.unflatten(-1, (self.heads, -1)) * step[..., None]).unflatten(1, (-1, self.chunk))
        into, out = (part.float().unflatten(1, (-1, self.chunk)) for part in (into, out))
        total = decay.cumsum(dim=-1)
        near = torch.exp(self.sums(decay))
        found = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", out, into, near, value)
        left = torch.exp(total[..., -1:] - total)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", into, left, value)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
        passed = torch.exp(self.sums(F.pad(total[..., -1], (1, 0))))
        states = torch.einsum("bhzc,bchpn->bzhpn", passed, states)[:, :-1]
        found = found + torch.einsum("bcln,bchpn,bhcl->bclhp", out, states, total.exp())
        found = (found + value * self.skip[:, None]).reshape(batch, length, -1)
        return self.leave(self.norm(found.to(x.dtype) * F.silu(gate)))


class StateModel(nn.Module):
    def __init__(self, width: int = 512, *, depth: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(StateChunks(width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(depth + 1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = x + layer(norm(x))
        return F.linear(self.norms[-1](x), self.embedding.weight)


def _ids(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"ids": token_ids(batch_size, length, vocabulary=VOCABULARY)}


def _next_id(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores, ids = model(batch["ids"]), batch["ids"]
    return F.cross_entropy(scores[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


class LossInChunks(torch.autograd.Function):
    """Cross entropy over a large vocabulary, some rows at a time, its gradient made in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        found, slope = torch.zeros((), device=x.device), torch.empty_like(x)
        slope_weight = torch.zeros_like(weight)
        for some, known, out in zip(x.split(1024), labels.split(1024), slope.split(1024), strict=True):
            scores = (some @ weight.to(some.dtype).T).float()
            total = torch.logsumexp(scores, dim=-1, keepdim=True)
            found += (total[:, 0] - scores.gather(1, known[:, None])[:, 0]).sum()
            scores.sub_(total).exp_()
            scores.scatter_add_(1, known[:, None], torch.full_like(known[:, None], -1, dtype=scores.dtype))
            scores = scores.to(some.dtype)
            out.copy_(scores @ weight.to(some.dtype))
            slope_weight += scores.T @ some
        ctx.save_for_backward(slope, slope_weight)
        return found / x.shape[0]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        slope, slope_weight = ctx.saved_tensors
        share = slopes[0] / slope.shape[0]
        return slope * share, slope_weight * share, None


class ChunkedVocabulary(nn.Module):
    """A decoder with shared heads of keys, whose scores of all words never exist at once."""

    def __init__(self, width: int = 768, *, heads: int = 12, groups: int = 4, depth: int = 8) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.embedding = nn.Embedding(64_000, width)
        self.mix = nn.ModuleList(
            nn.Linear(width, width + 2 * groups * (width // heads), bias=False) for _ in range(depth)
        )
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * depth + 1))
        self.head = nn.Linear(width, 64_000, bias=False)

    def turned(self, x: Tensor, angle: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=-1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([one * cos - two * sin, one * sin + two * cos], dim=-1)

    def forward(self, ids: Tensor) -> Tensor:
        x, side = self.embedding(ids[:, :-1]), self.embedding.embedding_dim // self.heads
        rate = 10000 ** (-torch.arange(0, side, 2, device=ids.device) / side)
        angle = torch.arange(x.shape[1], device=ids.device)[:, None] * rate
        for at, (mix, out, up, down) in enumerate(zip(self.mix, self.out, self.up, self.down, strict=True)):
            parts = mix(self.norms[2 * at](x)).unflatten(-1, (-1, side)).transpose(1, 2)
            query, key, value = parts.split([self.heads, self.groups, self.groups], dim=1)
            query, key = self.turned(query, angle), self.turned(key, angle)
            seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            x = x + out(seen.transpose(1, 2).flatten(2))
            gate, inside = up(self.norms[2 * at + 1](x)).chunk(2, dim=-1)
            x = x + down(F.silu(gate) * inside)
        x = self.norms[-1](x).flatten(0, 1)
        found: Tensor = LossInChunks.apply(x, self.head.weight, ids[:, 1:].flatten())
        return found


class Rewarded(nn.Module):
    """Answers to the same question are better or worse than their group (GRPO)."""

    def __init__(self, width: int = 640, *, depth: int = 8) -> None:
        super().__init__()
        from transformers import Qwen2Config, Qwen2ForCausalLM

        shape = {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": 1792}
        heads = {"num_attention_heads": 10, "num_key_value_heads": 2}
        self.policy = Qwen2ForCausalLM(Qwen2Config(**shape, **heads, vocab_size=VOCABULARY))
        self.reference = copy.deepcopy(self.policy).requires_grad_(False).eval()

    @staticmethod
    def chances(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        scores = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        chosen = scores.gather(2, ids[:, 1:, None])[..., 0]
        return chosen - scores.logsumexp(dim=-1)

    def forward(self, ids: Tensor, mask: Tensor, gains: Tensor, old: Tensor) -> Tensor:
        found = self.chances(self.policy, ids, mask)
        with torch.no_grad():
            held = self.chances(self.reference, ids, mask)
        groups = gains.view(-1, min(8, len(gains)))  # fewer answers in a probe
        better = (
            (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-4)
        ).view(-1, 1)
        share = torch.exp(found - old)
        gained = torch.minimum(share * better, share.clamp(0.8, 1.2) * better)
        apart = torch.exp(held - found) - (held - found) - 1
        counted = mask[:, 1:]
        return -((gained - 0.04 * apart) * counted).sum() / counted.sum()


def _answers(*, batch_size: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(batch_size, length, dtype=torch.long)
    mask[:, -length // 8 :] = 0
    return {
        "ids": token_ids(batch_size, length, vocabulary=VOCABULARY),
        "mask": mask,
        "gains": torch.rand(batch_size),
        "old": -torch.rand(batch_size, length - 1),
    }


class Tagger(nn.Module):
    """A recurrent stack in both directions and a chain of tags, scored over all ways through it."""

    def __init__(self, width: int = 256, *, tags: int = 17) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(50_000, 300), nn.Dropout(0.5)
        self.read = nn.LSTM(300, width, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, tags)
        self.moves = nn.Parameter(torch.randn(tags, tags) * 0.1)
        self.first, self.last = nn.Parameter(torch.zeros(tags)), nn.Parameter(torch.zeros(tags))

    def forward(self, words: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        scores = self.head(self.drop(self.read(self.drop(self.words(words)))[0])).float()
        rows = torch.arange(words.shape[0], device=words.device)
        path = self.first[tags[:, 0]] + scores[rows, 0, tags[:, 0]]
        every = self.first + scores[:, 0]
        for at in range(1, words.shape[1]):
            here = mask[:, at]
            step = self.moves[tags[:, at - 1], tags[:, at]] + scores[rows, at, tags[:, at]]
            path = path + step * here
            longer = torch.logsumexp(every[:, :, None] + self.moves + scores[:, at, None], dim=1)
            every = torch.where(here[:, None], longer, every)
        ends = mask.sum(dim=1) - 1
        path = path + self.last[tags.gather(1, ends[:, None])[:, 0]]
        return (torch.logsumexp(every + self.last, dim=1) - path).mean()


def _sentences(*, batch_size: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(batch_size, length, dtype=torch.bool)
    mask[:, -length // 5 :] = False
    return {
        "words": token_ids(batch_size, length, vocabulary=50_000),
        "tags": torch.randint(0, 17, (batch_size, length)),
        "mask": mask,
    }


class Reranker(nn.Module):
    """Texts in order of worth; those of similar length lie in one batch, each of its own shape."""

    def __init__(self, width: int = 512, *, depth: int = 6) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(1024, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(depth))
        self.head = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places.weight[: ids.shape[1]]
        for at, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if at % 2 else layer(x)
        return self.head(x[:, 0]).squeeze(-1)


def _buckets(*, batch_size: int, longest: int) -> list[dict[str, Tensor]]:
    lengths = (longest, longest // 2, longest // 4, longest // 8 + 3)
    return [
        {
            "ids": token_ids(batch_size * longest // length, length, vocabulary=VOCABULARY),
            "worth": torch.rand(batch_size * longest // length),
        }
        for length in lengths
    ]


def _list_loss(model: nn.Module, batch: list[dict[str, Tensor]]) -> Tensor:
    losses = []
    for bucket in batch:
        scores = model(bucket["ids"]).float()
        listed = F.kl_div(scores.log_softmax(dim=0), bucket["worth"].softmax(dim=0), reduction="sum")
        losses.append(listed + 0.1 * F.binary_cross_entropy_with_logits(scores, bucket["worth"]))
    return torch.stack(losses).mean()


class Molecules(nn.Module):
    """Strings of molecules through a narrow place: a recurrent reader, a draw, and a recurrent writer."""

    def __init__(self, width: int = 512, *, latent: int = 128, letters: int = 45) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, 64)
        self.read = nn.GRU(64, 256, bidirectional=True, batch_first=True)
        self.shape, self.start = nn.Linear(512, 2 * latent), nn.Linear(latent, width)
        self.write = nn.GRU(64 + latent, width, num_layers=3, batch_first=True)
        self.head, self.value = (
            nn.Linear(width, letters),
            nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 1)),
        )

    def forward(self, ids: Tensor, value: Tensor) -> Tensor:
        seen = self.letters(ids)
        mean, spread = self.shape(self.read(seen)[1].transpose(0, 1).flatten(1)).float().chunk(2, dim=-1)
        drawn = mean + torch.exp(0.5 * spread) * torch.randn_like(mean)
        kept = torch.rand(ids.shape, device=ids.device) > 0.2
        told = torch.cat(
            [seen * kept[..., None], drawn[:, None].expand(-1, ids.shape[1], -1).to(seen.dtype)], dim=-1
        )
        first = self.start(drawn)[None].expand(3, -1, -1).contiguous()
        scores = self.head(self.write(told[:, :-1], first.to(told.dtype))[0])
        wrong = F.cross_entropy(scores.flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=0)
        apart = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(dim=1).mean()
        return wrong + 0.05 * apart + F.mse_loss(self.value(drawn)[:, 0].float(), value)


def _strings(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 45, (batch_size, length)), "value": torch.randn(batch_size)}


class DroppedWeights(nn.Module):
    """A recurrent language model whose own weights are dropped, and whose states are kept small (AWD)."""

    def __init__(self, width: int = 1150, *, words: int = 30_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 400)
        sizes = (400, width, width, 400)
        self.layers = nn.ModuleList(nn.LSTM(a, b) for a, b in pairwise(sizes))
        self.bias = nn.Parameter(torch.zeros(words))

    @staticmethod
    def drop_rows(x: Tensor, share: float) -> Tensor:
        """The same units are dropped at all times."""
        mask = x.new_empty(1, *x.shape[1:]).bernoulli_(1 - share) / (1 - share)
        return x * mask

    def forward(self, ids: Tensor) -> Tensor:
        kept = torch.ones(self.embedding.num_embeddings, 1, device=ids.device).bernoulli_(0.9) / 0.9
        x = self.drop_rows(F.embedding(ids[:-1], self.embedding.weight * kept), 0.4)
        for at, layer in enumerate(self.layers):
            weights = dict(layer.named_parameters())
            weights["weight_hh_l0"] = F.dropout(weights["weight_hh_l0"], 0.5, self.training)
            x, _ = torch.func.functional_call(layer, weights, (x,))
            raw, x = x, self.drop_rows(x, 0.25 if at < 2 else 0.4)
        scores = F.linear(x, self.embedding.weight, self.bias)
        wrong = F.cross_entropy(scores.flatten(0, 1).float(), ids[1:].flatten())
        return wrong + 2 * x.float().square().mean() + (raw[1:] - raw[:-1]).float().square().mean()


def _columns(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"ids": token_ids(length + 1, batch_size, vocabulary=30_000)}


class LowRank(nn.Module):
    """A frozen weight and a small change of it, as a parametrization."""

    def __init__(self, weight: Tensor, *, rank: int = 16) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1]) * 0.02)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).to(weight.dtype)


class RewardModel(nn.Module):
    """Which of two answers is better: a frozen bf16 decoder, parametrized low ranks, a head in fp32."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Qwen2Config, Qwen2Model

        shape = {"hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 2816}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
        self.base = Qwen2Model(Qwen2Config(**shape, **heads, vocab_size=VOCABULARY)).to(torch.bfloat16)
        self.base.requires_grad_(False)
        for layer in self.base.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.v_proj):
                parametrize.register_parametrization(part, "weight", LowRank(part.weight), unsafe=True)
        self.head = nn.Linear(1024, 1, bias=False)

    def forward(self, better: Tensor, worse: Tensor) -> Tensor:
        states = self.base(input_ids=torch.cat([better, worse])).last_hidden_state[:, -1]
        one, two = self.head(states.float())[:, 0].chunk(2)
        return -F.logsigmoid(one - two).mean() + 0.01 * (one + two).square().mean()


def _two_answers(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {name: token_ids(batch_size, length, vocabulary=VOCABULARY) for name in ("better", "worse")}


def _own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any = _own) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


LATE = _subject("late-interaction", LateInteraction, _questions)
STATES = _subject("state-chunks", StateModel, _ids, _next_id)
CHUNKED = _subject("chunked-vocabulary", ChunkedVocabulary, _ids)
REWARDED = _subject("rewarded-text", Rewarded, _answers)
TAGGER = _subject("tagger", Tagger, _sentences)
RERANKER = _subject("length-buckets", Reranker, _buckets, _list_loss)
MOLECULES = _subject("molecule-strings", Molecules, _strings)
DROPPED = _subject("dropped-weights", DroppedWeights, _columns)
REWARD = _subject("reward-model", RewardModel, _two_answers)

CONFIGURATIONS: list[Configuration] = [
    LATE.at(64, sizes={"length": 180}, precision="bf16"),
    LATE.at(32, sizes={"length": 180}, precision="tf32", optimizer="adamw-groups"),
    STATES.at(4, sizes={"length": 1024}, precision="bf16", clip_norm=1.0),
    CHUNKED.at(8, sizes={"length": 1025}, precision="bf16", clip_norm=1.0, optimizer="muon"),
    CHUNKED.at(4, sizes={"length": 1025}, precision="fp32", accumulation=4, optimizer="adamw-fused"),
    REWARDED.at(16, sizes={"length": 384}, precision="bf16", clip_norm=0.1, optimizer="adamw-schedule"),
    TAGGER.at(64, sizes={"length": 64}, precision="fp32", optimizer="sgd-momentum", clip_norm=5.0),
    RERANKER.at(16, sizes={"longest": 512}, precision="fp16", clip_norm=1.0),
    RERANKER.at(8, sizes={"longest": 512}, precision="fp32", optimizer="adamw-schedule"),
    MOLECULES.at(256, sizes={"length": 100}, precision="fp32", optimizer="adam", clip_norm=50.0),
    DROPPED.at(80, sizes={"length": 70}, precision="fp32", optimizer="asgd", clip_norm=0.25),
    REWARD.at(8, sizes={"length": 512}, precision="fp32", clip_norm=1.0, optimizer="adamw-schedule"),
]
