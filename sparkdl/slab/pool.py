"""Buffers of a slab root: pooled, stamped, memory-mapped files.

[Note: who may write a buffer] A buffer is a file of fixed size with a one-page header. To write, an
attempt *claims* a buffer. It takes the file's lock without waiting, and only if the stamp in the header
says that no iteration needs the content any more. Otherwise it tries the next file, and makes a new one
if none is free. The stamp holds the *submission* (a number that grows with each) and a
random nonce of this claim. A reference carries the nonce, and its reader checks it before and after
reading. Therefore:

* A live reader is safe: buffers of its submission are not free for anyone.
* A zombie attempt that still writes holds the lock, so nobody claims its buffer.
* A zombie reader finds another nonce and fails, and nobody waits for it.
* A dead process holds no lock.

The number of files of a node is at most the number of buffers that one iteration needs there (twice
that for state, because version t is read while t+1 is written), plus one for each attempt that failed
or was speculative.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import struct
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sparkdl.errors import SlabFullError, StaleReferenceError
from sparkdl.process.system import allocate, map_privately
from sparkdl.slab.release import released, watch
from sparkdl.slab.root import Root, SlabConfig, open_private, open_root

HEADER_BYTES = 4096
_STAMP = struct.Struct("<8sq16s")
_MAGIC = b"sparkdl1"
_NO_NONCE = bytes(16)
MAX_OPEN_BUFFERS = 256


@dataclass(frozen=True)
class Reference:
    """A handle of the bytes of one write in a slab of one node."""

    path: str
    nonce: str  # of the write, in hex
    node_id: str
    offset: int  # bytes from the start of the payload
    nbytes: int

    def part(self, offset: int, nbytes: int) -> Reference:
        """Return the reference to ``nbytes`` bytes of this one, ``offset`` bytes in."""
        return Reference(self.path, self.nonce, self.node_id, self.offset + offset, nbytes)

    def parts(self, most: int) -> list[Reference]:
        """Return references to consecutive parts of up to ``most`` bytes."""
        starts = range(0, self.nbytes, most)
        return [self.part(start, min(most, self.nbytes - start)) for start in starts]


class _Mapped:
    """One mapped file, kept open by this process so that its pages stay mapped."""

    def __init__(self, path: str) -> None:
        self.fd = open_private(path, os.O_RDWR)
        # The map is closed with the last array that views it.
        weakref.finalize(self, os.close, self.fd)
        self.map = mmap.mmap(self.fd, 0)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)
        self._private: mmap.mmap | None = None

    def stamp(self) -> tuple[int, bytes]:
        magic, submission, nonce = _STAMP.unpack_from(self.map, 0)
        return (submission, nonce) if magic == _MAGIC else (-1, _NO_NONCE)

    def private(self) -> np.ndarray:
        """Return the file's present content; writes to it stay in this process, until the next call."""
        self._private = map_privately(self.fd, self._private)
        return np.frombuffer(self._private, dtype=np.uint8)


class Claim:
    """A buffer held for writing until the ``with`` block ends."""

    def __init__(self, path: str, mapped: _Mapped, nonce: bytes, node_id: str, nbytes: int) -> None:
        self.reference = Reference(path, nonce.hex(), node_id, 0, nbytes)
        self.bytes = mapped.bytes[HEADER_BYTES : HEADER_BYTES + nbytes]
        """The payload, uint8, writable, page-aligned; content undefined until written."""


class Pool:
    """This process's view of the buffers of one slab root."""

    def __init__(self, config: SlabConfig) -> None:
        self.config = config
        self._mapped: OrderedDict[str, _Mapped] = OrderedDict()

    @property
    def node_id(self) -> str:
        """Return the node's id; empty if this node has no slab root of the run."""
        root = open_root(self.config)
        return root.node_id if root else ""

    @contextlib.contextmanager
    def claim(self, role: str, nbytes: int, submission: int, oldest_needed: int) -> Iterator[Claim]:
        """Hold a buffer for writing until the block ends. See [Note: who may write a buffer].

        One of the same role and size is reused if its stamp is below ``oldest_needed``. Raise
        SlabFullError without room, and StaleReferenceError if the root was deleted.
        """
        root = open_root(self.config)
        if root is None:
            raise StaleReferenceError(f"the slab root {self.config.name} was deleted")
        prefix = f"{role}-{nbytes}-"
        path, mapped = self._free(root, prefix, oldest_needed) or self._create(root, prefix, nbytes)
        nonce = secrets.token_bytes(16)
        try:
            _STAMP.pack_into(mapped.map, 0, _MAGIC, submission, nonce)
            yield Claim(path, mapped, nonce, root.node_id, nbytes)
        finally:
            fcntl.flock(mapped.fd, fcntl.LOCK_UN)

    def read(self, reference: Reference) -> np.ndarray:
        """Return the referenced bytes (uint8, a view of the map). Call :meth:`check` after use."""
        mapped = self.check(reference)
        start = HEADER_BYTES + reference.offset
        return mapped.bytes[start : start + reference.nbytes]

    def map_private(self, reference: Reference) -> np.ndarray:
        """Return the referenced bytes in a private map, so that user code may write to them.

        Writes affect no other process. The bytes are the referenced ones if :meth:`check` passes
        afterwards.
        """
        mapped = self.check(reference)
        start = HEADER_BYTES + reference.offset
        return mapped.private()[start : start + reference.nbytes]

    def check(self, reference: Reference) -> _Mapped:
        """Raise :class:`StaleReferenceError` unless the buffer still holds the referenced write."""
        try:
            mapped = self._open(reference.path)
        except FileNotFoundError:
            raise StaleReferenceError(f"slab {reference.path} was deleted") from None
        if mapped.stamp()[1].hex() != reference.nonce:
            raise StaleReferenceError(f"slab {reference.path} was written again since")
        return mapped

    def _free(self, root: Root, prefix: str, oldest_needed: int) -> tuple[str, _Mapped] | None:
        """Lock and return a free buffer; try those that this process has mapped before listing all."""
        known = [path for path in self._mapped if path.rpartition("/")[2].startswith(prefix)]
        for path in sorted(known):
            if mapped := self._lock(path, oldest_needed):
                return path, mapped
        names = [
            f"{directory}/{name}"
            for directory in root.directories
            for name in os.listdir(directory)
            if name.startswith(prefix)
        ]
        for path in sorted(set(names).difference(known)):
            if mapped := self._lock(path, oldest_needed):
                return path, mapped
        return None

    def _lock(self, path: str, oldest_needed: int) -> _Mapped | None:
        """Lock and return the buffer if it is free."""
        mapped = self._open(path)
        if mapped.stamp()[0] >= oldest_needed:
            return None
        try:
            fcntl.flock(mapped.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if mapped.stamp()[0] < oldest_needed and os.fstat(mapped.fd).st_nlink:  # not a deleted file
            return mapped
        fcntl.flock(mapped.fd, fcntl.LOCK_UN)
        return None

    def _create(self, root: Root, prefix: str, nbytes: int) -> tuple[str, _Mapped]:
        """Make a locked file; it gets its final name only once it has its size and its lock."""
        for directory in root.directories_for(HEADER_BYTES + nbytes):
            name = prefix + secrets.token_hex(8)
            path, draft = str(directory / name), str(directory / f"new-{name}")
            if not _reserve(draft, HEADER_BYTES + nbytes):
                continue
            mapped = _Mapped(draft)
            fcntl.flock(mapped.fd, fcntl.LOCK_EX)
            os.rename(draft, path)
            self._keep(path, mapped)
            return path, mapped
        raise SlabFullError(
            f"there is no room for a slab of {nbytes:,} bytes in "
            f"{', '.join(map(str, root.directories))}. Free space there, or point "
            "spark.sparkdl.slab.dir at a larger directory."
        )

    def _open(self, path: str) -> _Mapped:
        mapped = self._mapped.get(path)
        if mapped is None:
            mapped = _Mapped(path)
            self._keep(path, mapped)
        self._mapped.move_to_end(path)
        return mapped

    def _keep(self, path: str, mapped: _Mapped) -> None:
        watch(self.config)
        self._mapped[path] = mapped
        while len(self._mapped) > MAX_OPEN_BUFFERS:
            self._mapped.popitem(last=False)

    def close(self) -> None:
        """Drop every mapping. A claimed buffer stays open, and locked, until its claim ends."""
        self._mapped = OrderedDict()


_pools: dict[str, Pool] = {}


def open_pool(config: SlabConfig) -> Pool:
    """Return this process's pool of ``config``. It is closed when the run ends on this node."""
    pool = _pools.get(config.name)
    if pool is None:
        pool = _pools[config.name] = Pool(config)
    return pool


@released
def _close_pool(run: str) -> None:
    pool = _pools.pop(run, None)
    if pool is not None:
        pool.close()


def _reserve(path: str, nbytes: int) -> bool:
    """Make a file with all blocks allocated (writing to a sparse one could later end in SIGBUS)."""
    fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        allocate(fd, nbytes)
    except OSError as error:
        os.unlink(path)
        if error.errno == errno.ENOSPC:
            return False
        raise
    finally:
        os.close(fd)
    return True
