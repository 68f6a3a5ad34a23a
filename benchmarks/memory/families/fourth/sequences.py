"""Fourth unseen set, sequences: captions, translation, speech made and heard, memories, characters, pairs."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.memory.configuration import Configuration, Subject, token_ids

VOCABULARY = 10_000


class Captions(nn.Module):
    """Words for a picture, one by one, each after a look at the places of the picture."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in ((3, 64), (64, 128), (128, 256), (256, width)):
            layers += [nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        self.see = nn.Sequential(*layers)
        self.embedding = nn.Embedding(VOCABULARY, 300)
        self.start, self.start_cell = nn.Linear(width, width), nn.Linear(width, width)
        self.cell = nn.LSTMCell(300 + width, width)
        self.of_place, self.of_state, self.score = (
            nn.Linear(width, 256),
            nn.Linear(width, 256),
            nn.Linear(256, 1),
        )
        self.gate, self.drop = nn.Linear(width, width), nn.Dropout(0.5)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        places = self.see(images).flatten(2).transpose(1, 2)
        mean = places.mean(dim=1)
        hidden, state = self.start(mean), self.start_cell(mean)
        embedded, scores, looks = self.embedding(words), [], []
        for at in range(words.shape[1] - 1):
            alike = self.score(torch.relu(self.of_place(places) + self.of_state(hidden)[:, None])).squeeze(2)
            weights = alike.softmax(dim=1)
            seen = (places * weights[..., None]).sum(dim=1) * torch.sigmoid(self.gate(hidden))
            hidden, state = self.cell(torch.cat([embedded[:, at], seen], dim=1), (hidden, state))
            scores.append(self.head(self.drop(hidden)))
            looks.append(weights)
        return torch.stack(scores, dim=1), torch.stack(looks, dim=1)


def _captioned(*, batch_size: int, image: int) -> dict[str, Tensor]:
    words = token_ids(batch_size, 21, vocabulary=VOCABULARY)
    return {"images": torch.randn(batch_size, 3, image, image), "words": words}


def _caption_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores, looks = model(batch["images"], batch["words"])
    wrong = F.cross_entropy(scores.flatten(0, 1), batch["words"][:, 1:].flatten())
    return wrong + ((1.0 - looks.sum(dim=1)) ** 2).mean()


class Translator(nn.Module):
    """A GRU reads, another writes; each step of the writer multiplies its state with all that was read."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, 256), nn.Embedding(VOCABULARY, 256)
        self.read = nn.GRU(256, width, num_layers=2, dropout=0.2, bidirectional=True)
        self.less = nn.Linear(2 * width, width)
        self.cells = nn.ModuleList([nn.GRUCell(256 + width, width), nn.GRUCell(width, width)])
        self.general, self.join = nn.Linear(width, width, bias=False), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.less(self.read(self.source(source).transpose(0, 1))[0]).transpose(0, 1)
        keys = self.general(memory)
        states = [memory.mean(dim=1), memory.amax(dim=1)]
        context, written = memory.new_zeros(memory.shape[0], memory.shape[2]), []
        words = F.dropout(self.target(target), 0.2, self.training)
        for word in words.unbind(dim=1):
            x = torch.cat([word, context], dim=1)
            for at, cell in enumerate(self.cells):
                x = states[at] = cell(x, states[at])
            weights = torch.einsum("bw,blw->bl", x, keys).softmax(dim=-1)
            context = torch.einsum("bl,blw->bw", weights, memory)
            context = torch.tanh(self.join(torch.cat([x, context], dim=1)))
            written.append(context)
        scores: Tensor = self.head(torch.stack(written, dim=1))
        return scores


def _pairs(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "source": token_ids(batch_size, length, vocabulary=VOCABULARY),
        "target": token_ids(batch_size, 26, vocabulary=VOCABULARY),
    }


def _translation_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["source"], batch["target"][:, :-1])
    return F.cross_entropy(scores.transpose(1, 2), batch["target"][:, 1:], label_smoothing=0.1)


class Voice(nn.Module):
    """Letters become a spectrogram, frame after frame, with a look that knows where it looked before."""

    def __init__(self, width: int = 256, *, mels: int = 80) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.near = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5)
                )
                for _ in range(3)
            )
        )
        self.read = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.before = nn.Sequential(nn.Linear(mels, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.attend, self.write = nn.LSTMCell(128 + width, 512), nn.LSTMCell(512 + width, 512)
        self.query, self.key = nn.Linear(512, 128, bias=False), nn.Linear(width, 128, bias=False)
        self.where, self.place = nn.Conv1d(2, 32, 31, padding=15, bias=False), nn.Linear(32, 128, bias=False)
        self.score, self.frame = nn.Linear(128, 1, bias=False), nn.Linear(512 + width, mels)
        wide = [mels, 256, 256, mels]
        self.after = nn.Sequential(
            *(
                nn.Sequential(nn.Conv1d(a, b, 5, padding=2), nn.BatchNorm1d(b), nn.Tanh())
                for a, b in itertools.pairwise(wide)
            )
        )

    def forward(self, letters: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.read(self.near(self.embedding(letters).transpose(1, 2)).transpose(1, 2))[0]
        keys, batch = self.key(memory), letters.shape[0]
        shown = F.dropout(self.before(F.pad(frames, (0, 0, 1, 0))[:, :-1]), 0.5, training=True)
        first = [memory.new_zeros(batch, 512), memory.new_zeros(batch, 512)]
        second = [memory.new_zeros(batch, 512), memory.new_zeros(batch, 512)]
        context, total = memory.new_zeros(batch, memory.shape[2]), memory.new_zeros(batch, memory.shape[1])
        weights, made = total, []
        for at in range(frames.shape[1]):
            first = list(self.attend(torch.cat([shown[:, at], context], dim=1), (first[0], first[1])))
            places = self.place(self.where(torch.stack([weights, total], dim=1)).transpose(1, 2))
            alike = self.score(torch.tanh(self.query(first[0])[:, None] + keys + places)).squeeze(-1)
            weights = alike.softmax(dim=1)
            total = total + weights
            context = torch.bmm(weights[:, None].to(memory.dtype), memory).squeeze(1)
            second = list(self.write(torch.cat([first[0], context], dim=1), (second[0], second[1])))
            made.append(self.frame(torch.cat([second[0], context], dim=1)))
        rough = torch.stack(made, dim=1)
        return rough, rough + self.after(rough.transpose(1, 2)).transpose(1, 2)


def _spoken(*, batch_size: int, frames: int) -> dict[str, Tensor]:
    return {
        "letters": token_ids(batch_size, 90, vocabulary=64),
        "frames": torch.randn(batch_size, frames, 80),
    }


def _voice_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    rough, fine = model(batch["letters"], batch["frames"])
    return F.mse_loss(rough, batch["frames"]) + F.mse_loss(fine, batch["frames"])


class Transducer(nn.Module):
    """Sound and letters joined at every pair of places; all paths through the pairs are summed up."""

    def __init__(self, width: int = 320, *, letters: int = 64) -> None:
        super().__init__()
        self.hear = nn.LSTM(160, width, num_layers=3, batch_first=True, dropout=0.1)
        self.embedding, self.spell = nn.Embedding(letters, 128), nn.LSTM(128, width, batch_first=True)
        self.of_sound, self.of_text = nn.Linear(width, 256), nn.Linear(width, 256)
        self.head = nn.Linear(256, letters)

    def forward(self, sound: Tensor, text: Tensor) -> Tensor:
        heard = self.of_sound(self.hear(sound)[0])
        spelled = self.of_text(self.spell(self.embedding(F.pad(text, (1, 0))))[0])
        scores: Tensor = self.head(torch.tanh(heard[:, :, None] + spelled[:, None]))
        return scores


def _heard(*, batch_size: int, length: int) -> dict[str, Tensor]:
    text = torch.randint(1, 64, (batch_size, 24))
    return {"sound": torch.randn(batch_size, length, 160), "text": text}


def _transducer_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The forward sums of the lattice, column by column."""
    text = batch["text"]
    chances = model(batch["sound"], text).float().log_softmax(dim=-1)
    stay = chances[..., 0]
    go = chances[:, :, :-1].gather(3, text[:, None, :, None].expand(-1, chances.shape[1], -1, 1)).squeeze(3)
    column = F.pad(go[:, 0].cumsum(dim=1), (1, 0))
    for at in range(1, chances.shape[1]):
        arrive = column + stay[:, at - 1]
        climbed = F.pad(go[:, at].cumsum(dim=1), (1, 0))
        column = torch.logcumsumexp(arrive - climbed, dim=1) + climbed
    return -(column[:, -1] + stay[:, -1, -1]).mean() / text.shape[1]


class Memory(nn.Module):
    """A text in segments: what a segment leaves in a few tokens, the next one reads."""

    def __init__(self, width: int = 512, *, num_memory: int = 16, segment: int = 256) -> None:
        super().__init__()
        self.segment = segment
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(segment, width) * 0.02)
        self.start = nn.Parameter(torch.randn(num_memory, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        memory, num = self.start.expand(ids.shape[0], -1, -1), self.start.shape[0]
        size = self.segment + 2 * num
        closed = torch.ones(size, size, dtype=torch.bool, device=ids.device).triu(1)
        closed[:, :num] = False
        scores = []
        for part in ids.split(self.segment, dim=1):
            x = torch.cat([memory, self.embedding(part) + self.places, memory], dim=1)
            x = self.layers(x, mask=closed)
            memory = x[:, -num:]
            scores.append(self.head(x[:, num:-num]))
        return torch.cat(scores, dim=1)


def _ids(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {"ids": token_ids(batch_size, length + 1, vocabulary=VOCABULARY)}


def _next_id(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["ids"]
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Characters(nn.Module):
    """Words from their characters by convolutions, a highway, a recurrent stack, and rare words set apart."""

    def __init__(self, width: int = 400) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16, padding_idx=0)
        sizes = {1: 25, 2: 50, 3: 75, 4: 100, 5: 125, 6: 150}
        self.views = nn.ModuleList(nn.Conv1d(16, num, side) for side, num in sizes.items())
        total = sum(sizes.values())
        self.gate, self.wide = nn.Linear(total, total), nn.Linear(total, total)
        self.read = nn.LSTM(total, width, num_layers=2, dropout=0.5, batch_first=True)
        self.rare = nn.AdaptiveLogSoftmaxWithLoss(width, 50_000, cutoffs=[2_000, 10_000])

    def forward(self, letters: Tensor, words: Tensor) -> Tensor:
        batch, length, _ = letters.shape
        x = self.embedding(letters.flatten(0, 1)).transpose(1, 2)
        x = torch.cat([torch.tanh(view(x)).amax(dim=2) for view in self.views], dim=1)
        share = torch.sigmoid(self.gate(x) - 2)
        x = share * F.relu(self.wide(x)) + (1 - share) * x
        states = self.read(x.view(batch, length, -1))[0]
        loss: Tensor = self.rare(states.flatten(0, 1), words.flatten()).loss
        return loss


def _letters(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "letters": token_ids(batch_size, length, 21, vocabulary=100),
        "words": token_ids(batch_size, length, vocabulary=50_000),
    }


def _word_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["letters"], batch["words"])
    return loss


def _class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


class Alike(nn.Module):
    """Two sentences, each read both ways as a packed sequence and kept as its largest values."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 300)
        self.read = nn.LSTM(300, width, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(8 * width, 512), nn.Tanh(), nn.Dropout(0.1), nn.Linear(512, 3))

    def encode(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        states = pad_packed_sequence(self.read(packed)[0], batch_first=True, padding_value=-1e4)[0]
        return states.amax(dim=1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        one, two = (self.encode(batch[name], batch["lengths"]) for name in ("first", "second"))
        scores: Tensor = self.head(torch.cat([one, two, (one - two).abs(), one * two], dim=1))
        return scores


def _two_sentences(*, batch_size: int, length: int) -> dict[str, Tensor]:
    return {
        "first": token_ids(batch_size, length, vocabulary=VOCABULARY),
        "second": token_ids(batch_size, length, vocabulary=VOCABULARY),
        "lengths": torch.full((batch_size,), length),
        "labels": torch.randint(0, 3, (batch_size,)),
    }


def _alike_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch), batch["labels"])


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


CAPTIONS = _subject("captions", Captions, _captioned, _caption_loss)
TRANSLATOR = _subject("translator", Translator, _pairs, _translation_loss)
VOICE = _subject("voice", Voice, _spoken, _voice_loss)
TRANSDUCER = _subject("transducer", Transducer, _heard, _transducer_loss)
MEMORY = _subject("segments", Memory, _ids, _next_id)
CHARACTERS = _subject("characters", Characters, _letters, _word_loss)
ALIKE = _subject("sentence-pairs", Alike, _two_sentences, _alike_loss)

CONFIGURATIONS: list[Configuration] = [
    CAPTIONS.at(32, sizes={"image": 224}, precision="fp32", optimizer="adam", clip_norm=5.0),
    CAPTIONS.at(64, sizes={"image": 192}, precision="bf16"),
    TRANSLATOR.at(64, sizes={"length": 40}, precision="fp32", optimizer="adam", clip_norm=1.0),
    TRANSLATOR.at(128, sizes={"length": 40}, precision="fp16", clip_norm=1.0),
    VOICE.at(32, sizes={"frames": 120}, precision="fp32", optimizer="adam", clip_norm=1.0),
    TRANSDUCER.at(16, sizes={"length": 120}, precision="fp32", optimizer="adam"),
    TRANSDUCER.at(32, sizes={"length": 120}, precision="bf16", clip_norm=5.0),
    MEMORY.at(8, sizes={"length": 1024}, precision="bf16", clip_norm=1.0),
    MEMORY.at(8, sizes={"length": 512}, precision="pure-bf16", accumulation=2),
    CHARACTERS.at(64, sizes={"length": 35}, precision="fp32", optimizer="sgd", clip_norm=5.0),
    ALIKE.at(256, sizes={"length": 40}, precision="fp32", optimizer="sgd", clip_norm=5.0),
]
