"""A fix in the words of the framework that runs the job.

Where `transformers.Trainer` or Lightning owns the training loop, there is no line of torch to edit: the same
change is an argument of theirs.
"""

from __future__ import annotations

from flatout.measure.evidence import Evidence, Loader

WATCHES = ("lightning", "lightning_fabric", "torch")  # libraries that put code of theirs around DataLoader()


def by_argument(
    evidence: Evidence, fix: str, *, transformers: str | None = None, lightning: str | None = None
) -> str:
    """`fix`, or the argument that does the same where a framework's loop takes the steps."""
    arguments = {"transformers": transformers, "lightning": lightning}
    argument = arguments.get(evidence.job.framework or "")
    return fix if argument is None else f"pass {argument}"


def loader_arguments(loader: Loader, **arguments: object) -> str:
    """`give this DataLoader num_workers=2`, or how the library that makes it is told the same."""
    library = made_by(loader)
    prefix = "dataloader_" if library == "transformers" else ""
    words = " and ".join(f"{prefix}{name}={value}" for name, value in arguments.items())
    if library == "transformers":
        return f"give TrainingArguments {words}"
    return f"give the DataLoader that {library} makes {words}" if library else f"give this DataLoader {words}"


def made_by(loader: Loader) -> str | None:
    """The library whose line makes a loader; None where it is the user's own."""
    library = (loader.via or "").partition("/")[0]
    return None if library in ("", *WATCHES) else library
