"""Neutral texts: what a steered model should still find as likely as before.

A vector that makes a model agree with everything may also make it forget how sentences go.  Their perplexity,
steered over unsteered, says so.  Plain statements of several kinds, in words that any model knows; give a
file of your own where your model speaks another language.
"""

from __future__ import annotations

from pathlib import Path

from flatout.errors import BadInput

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


def read_neutral(path: str | Path | None) -> list[str]:
    """The lines of a file, or the texts above."""
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
