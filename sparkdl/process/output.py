"""Lines that the user's code and its libraries print: labelled in a worker, and reported once.

A label before each line tells which task of which iteration printed it. Libraries that report what they
load do so at each load, in each process that builds the model; :func:`reports_silenced` silences all
reports but the first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

_label = ""
_VERBOSITY = "TRANSFORMERS_VERBOSITY"


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
    """Put ``[label]`` (empty: nothing) before each line that this process prints from now on."""
    global _label
    if label or _label:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, _Labelled):
                stream.flush()
            elif stream is not None and label:
                setattr(sys, name, _Labelled(stream))
    _label = f"[{label}] " if label else ""


def print_escaped(text: str, end: str = "\n") -> None:
    """Print a text of another process, with escapes for letters that stdout's encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end)


@contextlib.contextmanager
def reports_silenced() -> Iterator[None]:
    """Silence what transformers prints inside the block: warnings, load reports and progress bars.

    Afterwards its settings are what they were. If it is imported only inside the block, its progress
    bars are drawn, except in workers, see :mod:`sparkdl.daemon`.
    """
    library = _logging_of_transformers()
    if library is not None:
        level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
        library.set_verbosity_error()
        library.disable_progress_bar()
        try:
            yield
        finally:
            library.set_verbosity(level)
            if bars:
                library.enable_progress_bar()
        return
    if _VERBOSITY in os.environ:
        yield
        return
    os.environ[_VERBOSITY] = "error"  # which the import reads
    try:
        yield
    finally:
        del os.environ[_VERBOSITY]
        library = _logging_of_transformers()
        if library is not None:
            library.set_verbosity_warning()


def _logging_of_transformers() -> Any:
    return sys.modules.get("transformers.utils.logging")
