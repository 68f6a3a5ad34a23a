"""What every room stands on; nothing here imports another room, or torch.

errors              the tree of errors, and the exit code of each
units, decisions    numbers as people read them; a choice with its reason and its source
codec, documents    dataclasses as JSON, and files that say what they are
atomic_files        files that are there with all of their content, or not at all
runs                `.flatout/runs`: the home of every run, its header, and how it is found again
torchrun            what a launcher says by environment variables
interrupts          Ctrl-C and SIGTERM, at moments when a run is whole
script              a user's script or module, checked, and run as Python itself would
user_code           functions and modules that users name; what other packages add by entry points
lazy_names          names of a module that are imported on first use
packages            optional packages, and models and data that packages carry
tensorboard_files   curves for TensorBoard, written without TensorBoard
"""

from __future__ import annotations

from collections.abc import Callable

# What long work tells whoever started it.
OnProgress = Callable[[str], None]  # in words, what is being done
OnCount = Callable[[int, int], None]  # how many are done, of how many


def ignore(*_told: object) -> None:
    """Discard the message."""
