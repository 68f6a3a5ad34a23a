"""As much of a terminal's screen as Flatout, tqdm and a shell use."""

from __future__ import annotations

import re

TOKENS = re.compile(r"\x1b\[([0-9;?]*)([@-~])|\x1b([78D])|[\r\n\b]|[^\x1b\r\n\b]+")


class Screen:
    """What a terminal of unlimited height shows; a line feed also returns the carriage, as terminals do."""

    def __init__(self) -> None:
        self.rows: list[str] = [""]
        self.row = self.column = 0
        self._saved = (0, 0)

    def feed(self, text: str) -> list[str]:
        for token in TOKENS.finditer(text):
            self._take(token)
        return [row.rstrip() for row in self.rows]

    def _take(self, token: re.Match[str]) -> None:
        part, number, command, escape = token[0], token[1], token[2], token[3]
        steps = int(number) if number and number.isdigit() else 1
        if part == "\r":
            self.column = 0
        elif part == "\b":
            self.column -= 1
        elif part == "\n" or escape == "D":
            self.row += 1
            self.column = 0 if part == "\n" else self.column
            self.rows += [""] * (self.row + 1 - len(self.rows))
        elif escape == "7":
            self._saved = (self.row, self.column)
        elif escape == "8":
            self.row, self.column = self._saved
        elif command == "A":
            self.row = max(self.row - steps, 0)
        elif command == "B":
            self.row = min(self.row + steps, len(self.rows) - 1)
        elif command in ("K", "J"):
            self.rows[self.row] = "" if number == "2" else self.rows[self.row][: self.column]
            if command == "J":
                del self.rows[self.row + 1 :]
        elif command is None:
            old = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = old[: self.column] + part + old[self.column + len(part) :]
            self.column += len(part)
