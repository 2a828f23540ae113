"""Folders of others: root may read and write anywhere, so a test gives that up for a moment."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """As a user whom the permissions of files bind."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(own)


@contextlib.contextmanager
def open_to_all() -> Iterator[Path]:
    """A folder that anybody reaches and writes into; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="open-to-all-") as name:
        path = Path(name)
        path.chmod(0o777)
        yield path
