"""Labels before the lines that the user's code prints in a worker, which tell whose lines they are."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

_label = ""


class _Labelled:
    """A text stream that puts the present label before each line, and writes each line at once.

    Lines of several workers do not mix, unless they are flushed before they are complete, and no
    line is lost with a worker that ends.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line = stream, ""

    def write(self, text: str) -> int:
        """Write the lines that are complete."""
        if not (_label or self._line):
            return self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._stream.write("".join(f"{_label}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the line that is not complete, too."""
        if self._line:
            self._stream.write(_label + self._line)
            self._line = ""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def label_output(label: str) -> None:
    """Put ``[label]`` before each line that this process prints or logs from now on.

    Args:
        label: The label, such as "replica 1, iteration 20"; empty for none.
    """
    global _label
    if label or _label:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, _Labelled):
                stream.flush()
            elif stream is not None and label:
                setattr(sys, name, _Labelled(stream))
    _label = f"[{label}] " if label else ""
