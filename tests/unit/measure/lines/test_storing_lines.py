from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from flatout.measure.lines.storing_lines import find_storing_line, storing_lines


def marked(tmp_path: Path, source: str) -> tuple[str, int]:
    """A file with `source`, and the number of the line marked HERE."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(source))
    lines = path.read_text().splitlines()
    return str(path), next(number for number, line in enumerate(lines, start=1) if "HERE" in line)


@pytest.mark.parametrize(
    "store",
    [
        "kept.append(loss)",
        "kept += [loss]",
        "kept = kept + [loss]",
        "kept[step] = loss",
        "kept['loss'].append(loss)",
        "kept.setdefault('loss', loss)",
        "other, kept = model(x, kept)",
        "kept: list = [*kept, loss]",
        "print(kept := kept + [loss])",
    ],
)
def test_the_store_that_grows_wins_over_the_one_that_begins(tmp_path: Path, store: str) -> None:
    path, line = marked(
        tmp_path,
        f"""
        def main():
            kept = []
            for step in range(10):
                {store}  # HERE
            kept = []
        """,
    )
    found = find_storing_line(path, "kept")
    assert found is not None and (found.line, found.function, found.in_loop) == (line, "main", True)


def test_numbers_are_passed_over_for_tensors(tmp_path: Path) -> None:
    path, line = marked(
        tmp_path,
        """
        for step in range(10):
            kept.append(loss.item())
            kept.append(float(loss))
            kept.append(loss.detach().cpu())
            kept.append(loss)  # HERE
        """,
    )
    found = find_storing_line(path, "kept")
    assert found is not None and found.line == line


def test_a_detached_store_wins_over_the_empty_beginning(tmp_path: Path) -> None:
    path, line = marked(
        tmp_path,
        """
        def main():
            kept, others = [], []
            for step in range(10):
                kept.append(loss.detach())  # HERE
        """,
    )
    found = find_storing_line(path, "kept")
    assert found is not None and found.line == line


def test_attributes_and_names_are_told_apart(tmp_path: Path) -> None:
    path, line = marked(
        tmp_path,
        """
        class Trainer:
            def __init__(self):
                self.history = []

            def step(self, loss):
                history.append(loss)
                self.history.append(loss)  # HERE
        """,
    )
    found = find_storing_line(path, "history", attribute=True)
    assert found is not None and (found.line, found.function) == (line, "Trainer.step")
    assert found.through_self
    other = find_storing_line(path, "history")
    assert other is not None and other.line == line - 1


def test_lines_bound_the_search(tmp_path: Path) -> None:
    path, line = marked(
        tmp_path,
        """
        def train():
            for _ in range(3):
                kept.append(loss)

        def test():
            for _ in range(3):
                kept.append(loss)  # HERE
        """,
    )
    found = find_storing_line(path, "kept", lines=(line - 2, line))
    assert found is not None and found.line == line


def test_what_cannot_be_read_or_parsed_has_no_stores(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def (")
    assert storing_lines(str(broken)) == storing_lines(str(tmp_path / "absent.py")) == ()
    assert find_storing_line(str(broken), "kept") is None


def test_a_second_search_through_a_large_code_base_parses_nothing_again(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"module{number}.py") for number in range(600)]
    for path in paths:
        storing_lines(path)
    before = storing_lines.cache_info().misses
    for path in paths:
        storing_lines(path)
    assert storing_lines.cache_info().misses == before
