"""The slab root of a run on this node: directories, the token, and sweeping.

Two processes share a node exactly if they read the same random token file in the root. Host names are
not trusted, because containers share or duplicate them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkdl.process.memory import left_for_files
from sparkdl.process.system import boot_id, parent, pid_namespace, start_time

SHARED_MEMORY = Path("/dev/shm")
SMALL_BYTES = 64 << 10
"""Anything smaller goes into shared memory as long as a page is free."""
MARK = "sparkdl-"
SWEEP_AFTER_SECONDS = 60.0
OPEN_TRIES = 16
"""The number of tries to make a root that is deleted while it is made."""


@dataclass(frozen=True)
class SlabConfig:
    """The location of a run's slabs; it travels with the run's tasks."""

    directory: str
    name: str  # the unpredictable name of the run's root
    samples: str = ""  # the root of samples placed before; its token is that of both

    @staticmethod
    def new(directory: str, application_id: str, samples: str = "") -> SlabConfig:
        return SlabConfig(directory, f"{MARK}{application_id}-{secrets.token_hex(8)}", samples)


@dataclass(frozen=True)
class Root:
    """An open root: directories for buffers (first choice first), and the node's token."""

    directories: tuple[Path, ...]
    node_id: str
    made: tuple[int, int] = (0, 0)
    """Identifies the token file: a token that was deleted and made again is a different one."""

    def directories_for(self, nbytes: int) -> tuple[Path, ...]:
        """Return the directories in which to try to put ``nbytes``, first choice first.

        Shared memory is left out if that would leave too little memory and there is another directory.
        """
        first, *others = self.directories
        asks = others and nbytes >= SMALL_BYTES and first.is_relative_to(SHARED_MEMORY)
        return tuple(others) if asks and left_for_files() < nbytes else self.directories


_open_roots: dict[str, Root] = {}


def open_root(config: SlabConfig, create: bool = False) -> Root | None:
    """Return this process's root of ``config``, or None if this node has none.

    With ``create``, make the root (mode 0700) and sweep roots whose application is dead. A root
    that is not a directory of this user with mode 0700 is a PermissionError.
    """
    root, shared = _open_roots.get(config.name), None
    if config.samples:
        other = open_root(SlabConfig(config.directory, config.samples), create)
        shared = None if other is None else other.node_id
    if (
        root is not None
        and _made(root.directories[0]) == root.made
        and shared in (None, root.node_id)
    ):
        return root
    _open_roots.pop(config.name, None)
    places = [base / config.name for base in _bases(config.directory)]
    known = [n for n, place in enumerate(places) if (place / "token").exists()]
    if not known:
        if not create:
            return None
        _sweep([place.parent for place in places])
    tries = iter(range(OPEN_TRIES - 1))
    while True:
        try:
            root = _opened(places[known[0] if known else 0 :], shared)
        except FileNotFoundError:  # something deletes it at this moment
            if not create:
                return None
            if next(tries, None) is None:
                raise
            known = []
        except OSError as error:
            if known or error.errno is None:
                raise
            if error.errno != errno.ENOSPC or len(places) == 1:
                raise _no_place(places[0].parent, error) from None
            del places[0]  # not a page is left there
        else:
            _open_roots[config.name] = root
            return root


def _no_place(directory: Path, error: OSError) -> OSError:
    from sparkdl.errors import SlabFullError

    return SlabFullError(
        f"slabs cannot be written to {directory} ({error.strerror}). Point spark.sparkdl.slab.dir "
        "at a writable directory that each node has for itself."
    )


def _opened(places: Sequence[Path], shared: str | None) -> Root:
    """Open the root in these directories. The first has the token, unless it is ``shared``."""
    directories = tuple(map(_private_directory, places))
    for path in directories:
        _check_not_shared(path)
        _mark_alive(path, _holder())
    node_id = _node_id(directories[0])
    return Root(directories, shared or node_id, _made(directories[0]))


def open_private(path: str | Path, flags: int) -> int:
    """Open a file (no link) of a slab root, a new one with mode 0600: the opener of ``open``."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def read_private(path: str | Path) -> bytes:
    """Return the content of a file of a slab root."""
    with open(path, "rb", opener=open_private) as file:
        return file.read()


def write_private(path: str | Path, data: bytes | Iterable[bytes]) -> None:
    """Make a file of a slab root from bytes or pieces; FileExistsError if the name is taken."""
    with open(path, "xb", opener=open_private) as file:
        for piece in [data] if isinstance(data, bytes) else data:
            file.write(piece)


def remove_root(config: SlabConfig) -> None:
    """Remove the root from this node. Mappings that other processes still hold stay valid."""
    root = _open_roots.pop(config.name, None)
    known = root.directories if root else ()
    for directory in {*known, *(base / config.name for base in _bases(config.directory))}:
        shutil.rmtree(directory, ignore_errors=True)


def marked_directory(base: Path) -> Path:
    """Make a directory of mode 0700 in ``base``, which is swept once this process is dead.

    Also sweep what other processes have left there.
    """
    _sweep([base])
    path = base / f"{MARK}{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    _mark_alive(path, os.getpid())
    return path


def _bases(directory: str) -> list[Path]:
    """Return the parent directories of roots, first choice first; they may not exist yet."""
    if directory != "auto":
        return [Path(directory).absolute()]
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or os.environ.get("TMPDIR", "/tmp")
    bases = [Path(local)]
    if os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        bases.insert(0, SHARED_MEMORY)
    return bases


def _private_directory(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not _is_ours(path):
            path.lstat()  # raises an error if it was deleted
            raise PermissionError(
                f"slab root {path} is not a directory of this user with mode 0700"
            ) from None
    return path


def _node_id(root: Path) -> str:
    """Read the token, or make it if this process is the first (link is atomic, the first wins)."""
    with contextlib.suppress(FileNotFoundError):
        return read_private(root / "token").decode()  # needs no room on the disk
    draft = root / f"token.{secrets.token_hex(8)}"
    try:
        write_private(draft, secrets.token_hex(16).encode())
        os.link(draft, root / "token")
    except FileExistsError:
        pass
    finally:
        draft.unlink(missing_ok=True)
    return read_private(root / "token").decode()


def _made(root: Path) -> tuple[int, int]:
    """Return the inode and change time of the token, which differ after it was made again."""
    try:
        status = os.stat(f"{root}/token")
    except FileNotFoundError:
        return (-1, -1)
    return status.st_ino, status.st_ctime_ns


def _holder() -> int:
    """Return the process that outlives workers: the JVM above the worker daemon."""
    if "SPARK_PYTHON_RUNTIME" in os.environ or "PYTHON_WORKER_FACTORY_SOCK_DIR" in os.environ:
        return parent(os.getppid()) or os.getppid()
    return os.getpid()


def _mark_alive(root: Path, holder: int) -> None:
    """Leave the identity of the process that holds the directory."""
    mark = root / f"alive.{boot_id()}.{pid_namespace()}.{holder}.{start_time(holder)}"
    os.close(open_private(mark, os.O_WRONLY | os.O_CREAT))


def _marks(root: Path) -> list[list[str]]:
    """Return boot, PID namespace, number and start time of each process that holds the directory."""
    return [mark.name.split(".")[1:] for mark in root.glob("alive.*")]


def _check_not_shared(root: Path) -> None:
    """Raise OSError if processes of another machine hold the directory."""
    if any(boot != boot_id() for boot, *_ in _marks(root)):
        raise OSError(
            f"slab root {root} is in use by another machine: spark.sparkdl.slab.dir must be a "
            "local directory of each node, not one that nodes share"
        )


def _sweep(bases: list[Path]) -> None:
    """Remove roots of this user that no living process of this machine and PID namespace holds.

    Each directory of a root has the marks, because the others may have been lost: shared memory,
    for example, is empty after a restart. A root is marked before anything is put into it, so a
    root without a mark is empty, and a directory without a mark that is not empty is no root. Links
    are neither followed nor removed.
    """
    for base in bases:
        for path in base.glob(MARK + "*"):
            if not _is_ours(path):
                continue
            with contextlib.suppress(OSError):
                if marks := _marks(path):
                    if all(map(_is_dead, marks)):
                        shutil.rmtree(path, ignore_errors=True)
                elif time.time() - path.lstat().st_mtime >= SWEEP_AFTER_SECONDS:
                    path.rmdir()


def _is_ours(path: Path) -> bool:
    """Return whether the path is a directory of this user with no access for others."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    mode = status.st_mode
    return stat.S_ISDIR(mode) and status.st_uid == os.getuid() and not mode & 0o077


def _is_dead(mark: list[str]) -> bool:
    """Return whether a process is known to be dead, as far as this process can see."""
    return mark[:2] == [boot_id(), pid_namespace()] and start_time(int(mark[2])) != mark[3]
