"""The colours of tokens.css by name, as they are on white paper: what figure files are drawn in."""

from __future__ import annotations

import re
from importlib import resources

LIGHT: dict[str, str] = dict(
    re.findall(
        r"--([\w-]+): light-dark\((#\w+), #\w+\)",
        resources.files("flatout.page").joinpath("tokens.css").read_text(encoding="utf-8"),
    )
)
