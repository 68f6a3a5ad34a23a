"""Token numbers as texts, many rows in one call.

transformers decodes a batch in a loop over its rows; the library below a fast tokenizer decodes the rows on
all cores.  That library is asked where the tokenizer adds nothing of its own to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.ground.errors import import_extra


def decode_rows(tokenizer: Any, rows: Sequence[Sequence[int]], *, extra: str) -> list[str]:
    """Return the text of each row without special tokens, in one call of the tokenizer."""
    numbers = [list(tokens) for tokens in rows]
    if not numbers:
        return []
    fast = import_extra("transformers", extra=extra).PreTrainedTokenizerFast
    kind = type(tokenizer)
    plain = all(getattr(kind, name, None) is getattr(fast, name) for name in ("decode", "_decode"))
    if not plain or tokenizer.clean_up_tokenization_spaces:
        return list(tokenizer.batch_decode(numbers, skip_special_tokens=True))
    return list(tokenizer.backend_tokenizer.decode_batch(numbers, skip_special_tokens=True))
