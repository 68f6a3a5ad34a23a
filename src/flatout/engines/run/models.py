"""A model from a folder as `save_pretrained` writes it: without noise on stderr, and whole.

transformers draws the weights that a folder lacks at random, and says so in a table among its log lines.
What runs on such a model looks like any other result, so it is refused here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout.errors import BadInput, import_extra

HINT = "give --model a folder that save_pretrained wrote"


def check_folder(folder: Path) -> None:
    """Refuse what cannot be a model folder before anything slow is imported."""
    if not folder.is_dir():
        raise BadInput(f"no model folder at {folder}", hint=HINT)
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} has no config.json", hint=HINT)


def load_pretrained(
    kind: str, folder: Path, *, what: str, extra: str, unread: str | None = None, **options: Any
) -> Any:
    """A model by transformers' class `kind`; `what` names it to people.

    Weights whose names hold `unread` are read by nobody here, and may be missing.
    """
    check_folder(folder)
    transformers = import_extra("transformers", extra=extra)
    try:
        with quietly(extra=extra):
            model, report = getattr(transformers, kind).from_pretrained(
                folder, local_files_only=True, output_loading_info=True, **options
            )
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"{folder} holds no {what} that can be loaded: {first_line(error)}", hint=HINT
        ) from error
    missing = sorted(name for name in report["missing_keys"] if unread is None or unread not in name)
    if missing:
        raise BadInput(f"{folder} lacks {len(missing)} weights of its {what}, first {missing[0]}", hint=HINT)
    return model


def first_line(error: Exception) -> str:
    """Why, in one line."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__


@contextlib.contextmanager
def quietly(*, extra: str) -> Iterator[None]:
    """Keep transformers' bars and reports off stderr, and leave the user's choice as it was."""
    logging = import_extra("transformers.utils.logging", extra=extra)
    enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if enabled:
            logging.enable_progress_bar()
