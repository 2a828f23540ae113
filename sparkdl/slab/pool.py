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

Release of what the processes of a node keep of a run between its tasks.

Spark's workers are pooled. Each keeps the replica, the mapped slabs and other parts of a run for its
next task, while the task that ends the run on a node runs in only one of them. Without further
measures, the others would keep this memory until their next fit, or until Spark ends them after an idle
minute. Therefore a process that keeps something of a run *watches* the run's slab root: a thread
notices that the root was removed, and calls every function that was registered by :func:`released`.
What these drop is only a cache: a task that is still running builds it again.

A GPU's memory must be free when the next fit or prediction begins. The process that removes a root
therefore waits for the watchers that keep something on a GPU.

For the same reason a module that predicts is kept on a GPU for :data:`KEPT_SECONDS` after its last use,
but no longer than until this process needs the memory for a fit. Released memory also goes back to the
GPU driver; torch would keep it for this process.

Results that are too large for one frame: they stay in a slab of their node and are read in parts.

[Note: large bytes] The executor's JVM holds every frame as a whole in its heap. The driver's JVM also
holds what comes to the driver, and Spark ends a job whose results take more than
``spark.driver.maxResultSize``. No frame can have 2 GB. So weights, moments and what is derived from
them travel in parts of bounded size.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import secrets
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from sparkdl.errors import SlabFullError, StaleReferenceError
from sparkdl.process.memory import give_heap_back
from sparkdl.process.system import allocate, map_privately
from sparkdl.slab.root import Root, SlabConfig, open_private, open_root, remove_root

WATCHED = "watched"
LOOK_SECONDS = 0.1
KEPT_SECONDS = 5.0
AWAITED_SECONDS = 10.0
"""The longest time that a process which removes a root waits for watchers, which may be busy."""

_Drop = TypeVar("_Drop", bound=Callable[[str], None])
_drops: list[Callable[[str], None]] = []
_watched: dict[str, int] = {}
"""The file descriptors by which this process watches roots, by run."""


def released(drop: _Drop) -> _Drop:
    """Register a function that drops what this process keeps of a run, given the run's slab root."""
    _drops.append(drop)
    return drop


def release(run: str) -> None:
    """Drop everything that this process keeps of the run whose slab root has the name ``run``."""
    for drop in _drops:
        drop(run)
    give_back()


def watch(config: SlabConfig, awaited: bool = False) -> None:
    """Release what this process keeps of a run as soon as the run's root on this node is removed.

    The root of samples that were placed before the run is watched too. If ``awaited``, the process
    that removes the root waits for this one.
    """
    if config.samples:
        watch(SlabConfig(config.directory, config.samples))
    held = _watched.get(config.name)
    if held is None:
        root = open_root(config)
        if root is None:
            return
        try:
            held = open_private(root.directories[-1] / WATCHED, os.O_RDWR | os.O_CREAT)
        except OSError:  # the disk is full, or the root was just removed
            return
        _watched[config.name] = held
        threading.Thread(target=_watch, args=(config.name, held), daemon=True).start()
    if awaited:
        fcntl.flock(held, fcntl.LOCK_SH)


def _watch(run: str, held: int) -> None:
    try:
        while os.fstat(held).st_nlink:
            time.sleep(LOOK_SECONDS)
        _watched.pop(run, None)  # a root of this name that is made from now on is watched anew
        release(run)
    finally:
        os.close(held)


def clean_here(config: SlabConfig) -> None:
    """Remove a run's slabs from this node, and release what this process keeps of the run.

    Wait for the processes that watch the root and keep something on a GPU.
    """
    held = -1
    with contextlib.suppress(OSError):  # nobody watches it, or it belongs to someone else
        if root := open_root(config):
            held = open_private(root.directories[-1] / WATCHED, os.O_RDONLY)
    remove_root(config)
    release(config.name)
    if held >= 0:
        until = time.monotonic() + AWAITED_SECONDS
        while not _free(held) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS / 4)
        os.close(held)


def _free(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def give_back() -> None:
    """Give the memory that this process no longer uses back to the GPU driver and the system.

    Modules may be in reference cycles and frozen (see :mod:`sparkdl.spark.worker`), so that the garbage
    collector would not find them.
    """
    if torch.cuda.is_initialized():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        torch.cuda.empty_cache()
    give_heap_back()


def leave_room(device: torch.device) -> None:
    """Give a GPU's cached memory back if another process could not reserve as much as this one.

    Spark's idle workers take turns. Each computes an iteration of the shuffle engine once in a while,
    and needs then what this one has needed now.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if free < torch.cuda.memory_reserved(device):
            torch.cuda.empty_cache()


class Idle:
    """A cached object that is released, by calling ``drop``, once it has been idle for some time."""

    def __init__(self, drop: Callable[[], None], seconds: float = KEPT_SECONDS) -> None:
        self._drop, self._seconds = drop, seconds
        self._lock, self._used, self._watched = threading.Lock(), 0.0, False

    def used(self) -> None:
        """Note that the object is being used now."""
        with self._lock:
            self._used = time.monotonic()
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="sparkdl-idle", daemon=True).start()

    def _watch(self) -> None:
        while True:
            with self._lock:
                left = self._used + self._seconds - time.monotonic()
                if left <= 0:
                    self._watched = False
                    break
            time.sleep(left)
        self.drop()

    def drop(self) -> None:
        """Release the object now, because its memory is needed."""
        self._drop()
        give_back()


_idle: list[Idle] = []


def kept_while_used(drop: Callable[[], None]) -> Idle:
    """Return an :class:`Idle` that stays registered for the life of this process."""
    _idle.append(Idle(drop))
    return _idle[-1]


def make_room() -> None:
    """Release everything that is kept for predictions."""
    for kept in _idle:
        kept.drop()


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

    def within(self, file: np.ndarray) -> np.ndarray:
        """Return the bytes of the reference among those of its file."""
        start = HEADER_BYTES + self.offset
        return file[start : start + self.nbytes]

    def parts(self, most: int) -> list[Reference]:
        """Return references to consecutive parts of up to ``most`` bytes."""
        starts = range(0, self.nbytes, most)
        return [self.part(start, min(most, self.nbytes - start)) for start in starts]


class _Mapped:
    """One mapped file, kept open by this process so that its pages stay mapped."""

    def __init__(self, path: str) -> None:
        self.path, self.fd = path, open_private(path, os.O_RDWR)
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

    def __init__(self, mapped: _Mapped, nonce: bytes, node_id: str, nbytes: int) -> None:
        self.reference = Reference(mapped.path, nonce.hex(), node_id, 0, nbytes)
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
        free = (self._lock(path, oldest_needed) for path in self._paths(root, prefix))
        mapped = next(filter(None, free), None) or self._create(root, prefix, nbytes)
        nonce = secrets.token_bytes(16)
        try:
            _STAMP.pack_into(mapped.map, 0, _MAGIC, submission, nonce)
            yield Claim(mapped, nonce, root.node_id, nbytes)
        finally:
            fcntl.flock(mapped.fd, fcntl.LOCK_UN)

    def read(self, reference: Reference) -> np.ndarray:
        """Return the referenced bytes (uint8, a view of the map). Call :meth:`check` after use."""
        return reference.within(self.check(reference).bytes)

    def map_private(self, reference: Reference) -> np.ndarray:
        """Return the referenced bytes in a private map, so that user code may write to them.

        Writes affect no other process. The bytes are the referenced ones if :meth:`check` passes
        afterwards.
        """
        return reference.within(self.check(reference).private())

    def check(self, reference: Reference) -> _Mapped:
        """Raise :class:`StaleReferenceError` unless the buffer still holds the referenced write."""
        try:
            mapped = self._open(reference.path)
        except FileNotFoundError:
            raise StaleReferenceError(f"slab {reference.path} was deleted") from None
        if mapped.stamp()[1].hex() != reference.nonce:
            raise StaleReferenceError(f"slab {reference.path} was written again since")
        return mapped

    def _paths(self, root: Root, prefix: str) -> Iterator[str]:
        """Yield the paths of buffers, those that this process has mapped before listing all."""
        known = [path for path in self._mapped if path.rpartition("/")[2].startswith(prefix)]
        yield from sorted(known)
        paths = {
            f"{directory}/{name}"
            for directory in root.directories
            for name in os.listdir(directory)
            if name.startswith(prefix)
        }
        yield from sorted(paths.difference(known))

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

    def _create(self, root: Root, prefix: str, nbytes: int) -> _Mapped:
        """Make a locked file; it gets its final name only once it has its size and its lock."""
        for directory in root.directories_for(HEADER_BYTES + nbytes):
            name = prefix + secrets.token_hex(8)
            draft = str(directory / f"new-{name}")
            if not _reserve(draft, HEADER_BYTES + nbytes):
                continue
            mapped = _Mapped(draft)
            fcntl.flock(mapped.fd, fcntl.LOCK_EX)
            mapped.path = str(directory / name)
            os.rename(draft, mapped.path)
            self._keep(mapped)
            return mapped
        raise SlabFullError(
            f"there is no room for a slab of {nbytes:,} bytes in "
            f"{', '.join(map(str, root.directories))}. Free space there, or point "
            "spark.sparkdl.slab.dir at a larger directory."
        )

    def _open(self, path: str) -> _Mapped:
        mapped = self._mapped.get(path)
        if mapped is None:
            mapped = _Mapped(path)
            self._keep(mapped)
        self._mapped.move_to_end(path)
        return mapped

    def _keep(self, mapped: _Mapped) -> None:
        watch(self.config)
        self._mapped[mapped.path] = mapped
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


FRAME_BYTES = 16 << 20
"""The longest frame when large bytes are cut."""
LARGE_BYTES = 64 << 10
"""Results larger than this are left in a slab."""
ROLE = "result"


@dataclass(frozen=True)
class Left:
    """Bytes left in a slab; it takes the place of a result."""

    reference: Reference


def left_where_large(pool: Pool, result: Any, submission: int) -> Any:
    """Return ``result``, or :class:`Left` if it is large bytes or a large array and a slab has room.

    A rank of a gang has its state in memory, so the loss of its slabs does not cost the result.
    Buffers of results of earlier submissions are free.
    """
    if not isinstance(result, (bytes, np.ndarray)):
        return result
    data = np.frombuffer(result, dtype=np.uint8)
    if data.nbytes <= LARGE_BYTES:
        return result
    try:
        with pool.claim(ROLE, data.nbytes, submission, submission) as claim:
            claim.bytes[:] = data
            return Left(claim.reference)
    except (SlabFullError, StaleReferenceError):  # send it whole, however large: it may arrive
        return result


def read_part(pool: Pool, part: Reference) -> bytes:
    """Return a copy of the bytes; StaleReferenceError if they were deleted or written again."""
    data = pool.read(part).tobytes()
    pool.check(part)
    return data


def num_frames(references: Sequence[Reference]) -> int:
    """Return the number of frames that :func:`frames_of` yields."""
    return sum(-(-reference.nbytes // FRAME_BYTES) for reference in references)


def frames_of(pool: Pool, references: Sequence[Reference]) -> Iterator[bytes]:
    """Yield the bytes of some references, one after another, in frames of bounded length."""
    for reference in references:
        for part in reference.parts(FRAME_BYTES):
            yield pool.read(part).tobytes()
        pool.check(reference)


def fill(place: np.ndarray, frames: Iterator[bytes]) -> None:
    """Write the bytes of one reference into ``place`` from the next frames."""
    for start in range(0, len(place), FRAME_BYTES):
        frame = np.frombuffer(next(frames), dtype=np.uint8)
        place[start : start + FRAME_BYTES] = frame
