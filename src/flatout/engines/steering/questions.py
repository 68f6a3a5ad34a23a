"""Contrastive questions: one text, an answer that shows a behaviour and one that does not.

A file is JSON lines, or one JSON list, of either form:

    {"question": "...", "answer_matching_behavior": "(A)", "answer_not_matching_behavior": "(B)"}
    {"prompt": "...", "positive": "...", "negative": "..."}

A question's key is a hash of its content.  The split into train, search and fresh goes by that key, so that
it does not depend on the order of the file, and equal questions never stand on both sides of a split: a
vector that was fitted or chosen on a question cannot be tested on it.

Neutral texts are what a steered model should still find as likely as before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from flatout.engines.run.models import has_chat_template, write_chats
from flatout.engines.run.row_files import read_rows
from flatout.ground.errors import BadInput

FORMS = (
    ("question", "answer_matching_behavior", "answer_not_matching_behavior"),
    ("prompt", "positive", "negative"),
)
# Plain statements of several kinds, in words that any model knows; a model of another language needs its own.
NEUTRAL = (
    "The river rises in the mountains and flows through three countries before it reaches the sea.",
    "Water boils at a lower temperature at high altitude because the air pressure is lower there.",
    "The train leaves the station at eight in the morning and arrives in the city before noon.",
    "A triangle with three equal sides also has three equal angles of sixty degrees.",
    "Most of the houses in the old town were built of stone in the eighteenth century.",
    "To make bread, mix flour, water, salt and yeast, let the dough rest, and bake it until it is brown.",
    "The library is open from Monday to Friday, and on Saturday until one in the afternoon.",
    "Bees collect nectar from flowers and turn it into honey, which they keep in the hive for the winter.",
    "The committee met in May, read the report, and decided to build the bridge in the following year.",
    "A year has three hundred and sixty-five days, and every fourth year usually has one more.",
    "In the north of the island there are forests of pine, and in the south fields of wheat.",
    "The function returns the sum of the two numbers, or zero if the list is empty.",
)
HINT = "one object per line: " + " or ".join("{" + ", ".join(form) + "}" for form in FORMS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A prompt and two answers that may follow it; the key names its content in the file."""

    prompt: str
    positive: str
    negative: str
    key: str


class QuestionSplit(NamedTuple):
    """Questions to fit, to search and to test with; no question is in two of them."""

    train: list[Question]
    search: list[Question]
    fresh: list[Question]


def question_of(prompt: str, *, positive: str, negative: str) -> Question:
    """Make a question with the key of its content."""
    content = json.dumps([prompt, positive, negative]).encode()
    return Question(
        prompt=prompt, positive=positive, negative=negative, key=hashlib.sha256(content).hexdigest()[:32]
    )


def read_questions(path: Path | str) -> list[Question]:
    """Read the questions of a JSON-lines file or of a JSON list; errors name the line."""
    return read_rows(Path(path), read=_read_question, hint=HINT)


def _read_question(row: Mapping[str, Any]) -> Question:
    form = next((form for form in FORMS if form[0] in row), None)
    if form is None:
        form = ("", *FORMS[1][1:])  # two free texts share no prompt
    missing = [name for name in form if name and name not in row]
    if missing:
        raise BadInput(f"{missing[0]!r} is missing")
    text, positive, negative = (row[name] if name else "" for name in form)
    for name, value in zip(form, (text, positive, negative), strict=True):
        if not isinstance(value, str):
            raise BadInput(f"{name!r} is a {type(value).__name__}, not a text")
    for name, value in zip(form[1:], (positive, negative), strict=True):
        if not value:
            raise BadInput(f"{name!r} is empty", hint="an answer has at least one character")
    if positive == negative:
        raise BadInput(f"both answers are {positive[:40]!r}", hint="the two answers must differ")
    return question_of(text, positive=positive, negative=negative)


def split_questions(
    questions: Sequence[Question], *, seed: int, shares: Sequence[float] = (0.5, 0.25, 0.25)
) -> QuestionSplit:
    """Split questions by their content into three parts that share none, each in the order of the file.

    Distinct questions are ranked by a hash of seed and key, and the ranking is cut at the shares.  A share
    above 0 gets at least one question.
    """
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise BadInput(f"shares={shares} must be three numbers of at least 0 that sum to 1")
    keys = {question.key for question in questions}
    wanted = sum(share > 0 for share in shares)
    if len(keys) < wanted:
        raise BadInput(
            f"{len(keys)} distinct questions cannot be split into {wanted} parts",
            hint=f"give at least {wanted}, or fit on all of them with flatout steer fit --whole",
        )
    ranked = sorted(keys, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    part_of = {
        key: part
        for part, (first, last) in enumerate(pairwise(_cuts(len(ranked), shares)))
        for key in ranked[first:last]
    }
    parts: tuple[list[Question], list[Question], list[Question]] = ([], [], [])
    for question in questions:
        parts[part_of[question.key]].append(question)
    return QuestionSplit(train=parts[0], search=parts[1], fresh=parts[2])


def _cuts(count: int, shares: Sequence[float]) -> list[int]:
    """Return where to cut `count` items; no part with a share stays empty."""
    sizes = [
        round(count * last) - round(count * first) for first, last in pairwise((0.0, *accumulate(shares)))
    ]
    for part, share in enumerate(shares):
        if share > 0 and sizes[part] == 0:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[part] = 1
    return [0, *accumulate(sizes)]


def write_prompts(
    questions: Sequence[Question], *, tokenizer: Any = None, system: str | None = None
) -> list[Question]:
    """Write questions as the model reads them: in the tokenizer's chat template where it has one.

    Without a template (or without `tokenizer`) the answer follows the prompt after a space or a line break of
    its own.
    """
    if has_chat_template(tokenizer):
        written = write_texts([one.prompt for one in questions], tokenizer, system=system)
        return [replace(one, prompt=prompt) for one, prompt in zip(questions, written, strict=True)]
    return [
        replace(
            one,
            positive=_with_space(one.prompt, one.positive),
            negative=_with_space(one.prompt, one.negative),
        )
        for one in questions
    ]


def write_texts(texts: Sequence[str], tokenizer: Any, *, system: str | None = None) -> list[str]:
    """Write texts in the tokenizer's chat template, where it has one, by one call."""
    if not texts or not has_chat_template(tokenizer):
        return list(texts)
    return write_chats(texts, tokenizer, system=system)


def _with_space(text: str, answer: str) -> str:
    return answer if not text or text[-1].isspace() or answer[:1].isspace() else f" {answer}"


def read_neutral(path: str | Path | None) -> list[str]:
    """Read the lines of a file, or take `NEUTRAL`.

    A vector that makes a model agree with everything may also make it forget how sentences go.  The
    perplexity of these texts, steered over unsteered, says so.
    """
    if path is None:
        return list(NEUTRAL)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path} cannot be read: {error}", hint="give a text file, one text per line"
        ) from None
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise BadInput(f"{path} holds no text", hint="give one text per line")
    return texts
