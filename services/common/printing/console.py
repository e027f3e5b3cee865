"""The console of all commands. In a pipe or a file a line is a line, whatever its length."""

from __future__ import annotations

from typing import Any

import rich.console

LONGEST = 100_000
"""Columns off a terminal."""


class Console(rich.console.Console):
    """Rich's, but off a terminal no line is broken, since `grep` and the clipboard want whole commands, and
    none ends in blanks, as those of its tables do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.is_terminal and options.get("width") is None:
            self.width = LONGEST

    def print(self, *objects: Any, **options: Any) -> None:
        if self.is_terminal or options.get("end", "\n") != "\n":  # a piece of a line may end in a blank
            super().print(*objects, **options)
            return
        with self.capture() as printed:
            super().print(*objects, **options)
        if text := "\n".join(line.rstrip(" ") for line in printed.get().split("\n")):
            self.file.write(text)
            self.file.flush()
