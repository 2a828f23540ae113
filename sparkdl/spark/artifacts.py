"""Files that a session of Spark Connect sends to its server, in place of broadcasts."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pyspark import SparkFiles

INLINE_BYTES = 1 << 20
"""The most bytes that travel inside a task or a query; more go apart from it."""
_sent: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""The names of the files that each session of Spark Connect has."""


@dataclass(frozen=True)
class Artifact:
    """A file that a Spark Connect session sends to its server, in place of a broadcast.

    Each executor fetches it from there. It is deleted with the session.
    """

    name: str

    @staticmethod
    def of(data: bytes, name: str, session: Any) -> Artifact:
        """Send bytes as a file, unless the session has it, and return the artifact.

        The name must belong to these bytes alone, since a session replaces no file.
        """
        sent = _sent.setdefault(session, set())
        if name not in sent:
            with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
                path = Path(folder, name)
                path.write_bytes(data)
                session.addArtifacts(path.as_uri(), file=True)
            sent.add(name)
        return Artifact(name)

    @property
    def value(self) -> bytes:
        """The bytes, in an executor."""
        return Path(SparkFiles.get(self.name)).read_bytes()

    def destroy(self) -> None:
        """Do nothing, since a session cannot delete a file."""


def sent_bytes(data: bytes, kind: str, session: Any) -> bytes | Artifact:
    """Return bytes as they travel with a query: themselves, or the artifact that has them."""
    if len(data) <= INLINE_BYTES:
        return data
    name = hashlib.blake2b(data, digest_size=16).hexdigest()
    return Artifact.of(data, f"sparkdl-{name}.{kind}", session)


def received_bytes(sent: bytes | Artifact) -> bytes:
    """Return in an executor the bytes that :func:`sent_bytes` sent."""
    return sent if isinstance(sent, bytes) else sent.value
