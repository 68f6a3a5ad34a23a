"""A/B questions as questions with answers in words, which a small model can tell apart.

    python examples/steering/in_words.py corrigible.json --half second --out questions.jsonl

Sets such as those of Contrastive Activation Addition end a question with its choices, "(A) Yes (B) No", and
the answers are the letters.  A model of 135M parameters prefers one letter whatever it stands for; asked the
question alone, it does prefer one answer.  `--half` takes every question by a hash of its content, so that a
recipe can be chosen on one half and confirmed on the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path

from flatout.steering import question_of

QUESTION = re.compile(r"(?P<text>.*?)\s*(?:Choices:)?\s*\(A\)\s*(?P<A>.*?)\s*\(B\)\s*(?P<B>.*)", re.DOTALL)
KEYS = ("answer_matching_behavior", "answer_not_matching_behavior")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="JSON lists of A/B questions")
    parser.add_argument("--half", choices=("first", "second"), default=None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines: dict[str, None] = {}  # each once, in their order
    for path in options.files:
        for number, asked in enumerate(json.loads(path.read_text(encoding="utf-8")), start=1):
            found = in_words(asked)
            if found is None:
                raise SystemExit(f"{path}, question {number}: no choices (A) and (B)")
            if options.half in (None, half_of(found)) and found["positive"] != found["negative"]:
                lines[json.dumps(found)] = None
    options.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} questions in {options.out}")


def in_words(asked: dict[str, str]) -> dict[str, str] | None:
    """One question without its choices, and what the two letters stand for."""
    found = QUESTION.fullmatch(asked["question"].strip())
    if found is None:
        return None
    positive, negative = (found[asked[key].strip("() ")] for key in KEYS)
    return {"prompt": found["text"], "positive": positive.strip(), "negative": negative.strip()}


def half_of(found: dict[str, str]) -> str:
    """The half that a question belongs to, whatever file it stands in."""
    key = question_of(found["prompt"], positive=found["positive"], negative=found["negative"]).key
    return "second" if hashlib.sha256(key.encode()).digest()[-1] % 2 else "first"


if __name__ == "__main__":
    main()
