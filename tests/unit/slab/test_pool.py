"""Pooled buffers: nobody writes what another may still read, and the number of files is bounded."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from innards import eventually
from mistakes import message_of

from sparkdl.errors import SlabFullError, StaleReferenceError
from sparkdl.slab import pool as module
from sparkdl.slab.pool import HEADER_BYTES, WATCHED, Pool, Reference, open_pool, release
from sparkdl.slab.root import Root, SlabConfig, open_root, remove_root

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def slab(slab: SlabConfig) -> SlabConfig:
    open_root(slab, create=True)
    return slab


@pytest.fixture
def pool(slab: SlabConfig) -> Iterator[Pool]:
    pool = Pool(slab)
    yield pool
    pool.close()


def write(
    pool: Pool, submission: int, oldest_needed: int, data: bytes = b"12345678", role: str = "state"
) -> Reference:
    with pool.claim(role, len(data), submission, oldest_needed) as claim:
        claim.bytes[:] = np.frombuffer(data, np.uint8)
        return claim.reference


def buffers(slab: SlabConfig) -> list[Path]:
    root = open_root(slab)
    return sorted(path for base in root.directories for path in base.glob("*-*-*"))


# Reading and writing


def test_what_is_claimed_and_written_is_read_whole_and_in_parts(pool: Pool) -> None:
    data = bytes(range(256)) * 40
    reference = write(pool, submission=1, oldest_needed=1, data=data)
    assert (reference.offset, reference.nbytes, reference.node_id) == (0, len(data), pool.node_id)
    assert bytes(pool.read(reference)) == data
    part = reference.part(2, 6)
    assert bytes(pool.read(part)) == data[2:8]
    assert bytes(pool.read(part.part(1, 3))) == data[3:6]
    assert bytes(pool.read(reference.part(10, 0))) == b""


def test_processes_of_a_node_read_what_each_other_wrote(pool: Pool, slab: SlabConfig) -> None:
    """Also those that are forked, as Spark's Python workers are, have the node's one id."""
    assert in_child(_read_in_child, slab, write(pool, 1, 1, b"from here")) == b"from here"
    reference = in_child(_write_in_child, slab, b"from there")
    assert reference.node_id == pool.node_id
    assert bytes(pool.read(reference)) == b"from there"


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 100_000])
def test_a_buffer_has_its_size_and_its_blocks(pool: Pool, slab: SlabConfig, nbytes: int) -> None:
    """A sparse file would kill its writer (SIGBUS) on the day that the directory is full."""
    with pool.claim("state", nbytes, 1, 1) as claim:
        assert claim.bytes.shape == (nbytes,)
        assert claim.bytes.ctypes.data % HEADER_BYTES == 0 or nbytes == 0
    (path,) = buffers(slab)
    status = path.stat()
    assert status.st_size == HEADER_BYTES + nbytes
    assert status.st_blocks * 512 >= status.st_size
    assert status.st_mode & 0o777 == 0o600


# Staleness


def test_a_reference_is_stale_once_its_buffer_is_claimed_again(pool: Pool) -> None:
    old = write(pool, submission=1, oldest_needed=1)
    with pool.claim("state", 8, submission=2, oldest_needed=2) as claim:
        assert claim.reference.path == old.path
        with pytest.raises(StaleReferenceError) as caught:  # from the claim on, not from its end
            pool.read(old)
    assert str(caught.value) == f"slab {old.path} was written again since"
    pool.check(claim.reference)


def test_a_write_during_a_reading_is_noticed_after_it(pool: Pool, slab: SlabConfig) -> None:
    reference = write(pool, 1, 1)
    view = pool.read(reference)
    write(Pool(slab), 2, 2, b"xxxxxxxx")
    assert bytes(view) == b"xxxxxxxx"
    with pytest.raises(StaleReferenceError, match="was written again since"):
        pool.check(reference)


def test_what_is_lent_is_what_was_written_and_writing_to_it_is_nobodys_business(
    pool: Pool, slab: SlabConfig
) -> None:
    """Also when the same file is lent again, after a write or after another version came into it."""
    other = Pool(slab)
    first = write(pool, 1, 0)
    lent = other.map_private(first.part(2, 4))
    assert bytes(lent) == b"3456"
    lent[:] = 0
    assert bytes(pool.read(first)) == b"12345678"
    assert bytes(other.read(first)) == b"12345678"
    assert bytes(other.map_private(first)) == b"12345678"
    other.map_private(first)[:4] = 0
    second = write(pool, 3, 2, b"abcdefgh")
    assert second.path == first.path
    assert bytes(other.map_private(second)) == b"abcdefgh"
    with pytest.raises(StaleReferenceError):
        other.check(first)
    other.close()
    assert bytes(lent)  # a view outlives its mapping


def test_no_claim_where_the_root_is_gone(slab: SlabConfig) -> None:
    pool = Pool(slab)
    remove_root(slab)
    assert pool.node_id == ""
    assert message_of(StaleReferenceError, pool.claim("state", 8, 1, 1).__enter__) == (
        f"the slab root {slab.name} was deleted"
    )


def test_a_deleted_buffer_is_stale_and_not_written_again(pool: Pool, slab: SlabConfig) -> None:
    """This process still has it mapped, but nobody else could find it."""
    first = write(pool, 1, 1)
    Path(first.path).unlink()
    assert message_of(StaleReferenceError, Pool(slab).read, first) == (
        f"slab {first.path} was deleted"
    )
    second = write(pool, 2, 2)
    assert second.path != first.path
    assert in_child(_read_in_child, slab, second) == b"12345678"


# Who may write


@pytest.mark.parametrize("oldest_needed", [6, 5, 4])
def test_only_buffers_below_the_floor_are_free(pool: Pool, oldest_needed: int) -> None:
    """One stamped 5 is of the floor's own submission: version t, which is still read."""
    first = write(pool, submission=5, oldest_needed=5)
    second = write(pool, submission=7, oldest_needed=oldest_needed)
    assert (first.path == second.path) == (oldest_needed == 6)
    if oldest_needed < 6:
        pool.check(first)


@pytest.mark.parametrize("again", [False, True])
def test_a_buffer_held_for_writing_is_free_for_nobody(
    pool: Pool, slab: SlabConfig, again: bool
) -> None:
    """An attempt that the driver has given up may still write when its submission is long past.
    Its buffer is new, or used again."""
    if again:
        write(pool, submission=1, oldest_needed=1)
    with pool.claim("state", 8, submission=2, oldest_needed=2) as held:
        other = in_child(_write_in_child, slab, b"87654321", 9)
        assert other.path != held.reference.path
        held.bytes[:] = 7
        assert bytes(pool.read(held.reference)) == b"\7" * 8
    paths = {held.reference.path, other.path}
    assert in_child(_write_in_child, slab, b"abcdefgh", 99).path in paths
    assert len(buffers(slab)) == 2


def test_a_buffer_that_somebody_else_takes_meanwhile_is_not_free(
    pool: Pool, slab: SlabConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at its stamp and its lock."""
    first, flock, taken = write(pool, 1, 1), fcntl.flock, list[Reference]()

    def later(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        taken.append(write(Pool(slab), 9, 9))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", later)
    assert write(pool, 9, 9).path != first.path
    assert [reference.path for reference in taken] == [first.path]
    pool.check(taken[0])


def test_a_buffer_held_by_a_dead_process_is_free(pool: Pool, slab: SlabConfig) -> None:
    with held_by_child(slab) as (child, path):
        assert write(pool, 9, 9).path != path
        child.kill()
        child.join()
    with pool.claim("state", 8, 10, 10) as one, pool.claim("state", 8, 10, 10) as other:
        assert path in {one.reference.path, other.reference.path}
    assert len(buffers(slab)) == 2


def test_a_claim_is_over_when_its_block_fails(pool: Pool, slab: SlabConfig) -> None:
    with pytest.raises(RuntimeError, match="in the block"), pool.claim("state", 8, 1, 1) as claim:
        raise RuntimeError("in the block")
    assert write(pool, 2, 2).path == claim.reference.path


@pytest.mark.parametrize(("role", "nbytes"), [("gradient", 8), ("state", 9), ("state", 80)])
def test_roles_and_sizes_do_not_mix(pool: Pool, role: str, nbytes: int) -> None:
    first = write(pool, 1, 1)
    with pool.claim(role, nbytes, 5, 5) as claim:
        assert claim.reference.path != first.path
        assert claim.bytes.shape == (nbytes,)


@pytest.mark.parametrize("sized", [False, True])
def test_a_file_in_the_making_is_no_buffer(
    pool: Pool, slab: SlabConfig, monkeypatch: pytest.MonkeyPatch, sized: bool
) -> None:
    """Before it has its size another process cannot map it; before its lock it must not claim it."""
    drafts: list[str] = []
    others: list[str] = []
    real = module._reserve

    def reserve(path: str, nbytes: int) -> bool:
        if drafts:  # the other process's own
            return real(path, nbytes)
        drafts.append(path)
        if not sized:
            Path(path).touch()
            others.append(write(Pool(slab), 1, 1).path)
            Path(path).unlink()
        made = real(path, nbytes)
        if sized:
            others.append(write(Pool(slab), 1, 1).path)
        return made

    monkeypatch.setattr(module, "_reserve", reserve)
    own = write(pool, 1, 1).path
    assert sorted(map(str, buffers(slab))) == sorted([own, *others])
    assert len({own, *others, *drafts}) == 3


# Bounds


def test_the_number_of_files_stays_bounded(pool: Pool, slab: SlabConfig) -> None:
    """Two versions of the state, one gradient, over 1,000 iterations by two processes' pools."""
    pools = [pool, Pool(slab)]
    for submission in range(1, 1001):
        writer = pools[submission % 2]
        write(writer, submission, oldest_needed=submission, role="gradient")
        reference = write(writer, submission, oldest_needed=submission - 1)
        pools[0].check(reference)
    names = [path.name.split("-")[0] for path in buffers(slab)]
    assert sorted(names) == ["gradient", "state", "state"]
    pools[1].close()


def test_attempts_of_one_tick_each_have_a_buffer(pool: Pool, slab: SlabConfig) -> None:
    references = [write(pool, submission=1, oldest_needed=1) for _ in range(3)]
    assert len({reference.path for reference in references}) == 3
    for reference in references:
        pool.check(reference)
    for submission in range(2, 20):
        write(pool, submission, submission)
    assert len(buffers(slab)) == 3


@pytest.mark.linux
def test_mappings_are_bounded(
    pool: Pool, slab: SlabConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_BUFFERS", 4)
    references = [write(pool, 1, 1, bytes([i]) * 8) for i in range(20)]
    assert len(pool._mapped) == 4
    assert open_files(slab) == 4
    assert [bytes(pool.read(r))[0] for r in references] == list(range(20))
    assert open_files(slab) == 4
    view = pool.read(references[0])
    pool.close()
    assert bytes(view) == bytes(8)  # which outlives its mapping
    del view
    assert open_files(slab) == 0


def test_a_claimed_buffer_stays_locked_beyond_the_bound(
    pool: Pool, slab: SlabConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many buffers are opened meanwhile; its lock is given back through its file."""
    monkeypatch.setattr(module, "MAX_OPEN_BUFFERS", 2)
    with contextlib.ExitStack() as stack:
        claims = [stack.enter_context(pool.claim("state", 8, 1, 1)) for _ in range(5)]
        for claim in claims:
            fd = os.open(claim.reference.path, os.O_RDWR)
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(fd)
    write(pool, 1, 1)
    assert len(pool._mapped) == 2


# Room


def fallocate_that_fails(monkeypatch: pytest.MonkeyPatch, failures: int, error: int) -> list[int]:
    """The first ``failures`` calls; return what is asked for."""
    real, calls = module.allocate, list[int]()

    def fallocate(fd: int, length: int) -> None:
        calls.append(length)
        if len(calls) <= failures:
            raise OSError(error, os.strerror(error))
        real(fd, length)

    monkeypatch.setattr(module, "allocate", fallocate)
    return calls


def test_no_room_says_what_to_do(
    pool: Pool, slab: SlabConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fallocate_that_fails(monkeypatch, failures=99, error=errno.ENOSPC)
    root = open_root(slab)
    assert message_of(SlabFullError, write, pool, 1, 1, bytes(1234)) == (
        f"there is no room for a slab of 1,234 bytes in {root.directories[0]}. Free space there, "
        "or point spark.sparkdl.slab.dir at a larger directory."
    )
    assert calls == [HEADER_BYTES + 1234]
    assert buffers(slab) == []


@pytest.fixture
def disk(slab: SlabConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A second directory of the root."""
    root, second = open_root(slab), tmp_path / "disk"
    second.mkdir()
    both = Root((*root.directories, second), root.node_id)
    monkeypatch.setattr(module, "open_root", lambda slab: both)
    return second


def test_a_full_directory_gives_way_to_the_next(
    pool: Pool, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fallocate_that_fails(monkeypatch, failures=1, error=errno.ENOSPC)
    reference = write(pool, 1, 1)
    assert Path(reference.path).parent == disk
    assert len(calls) == 2
    assert not [path for path in disk.parent.rglob("*state*") if path.parent != disk]
    assert write(pool, 2, 2).path == reference.path  # found again in the second directory


def test_another_error_is_not_taken_for_a_full_directory(
    pool: Pool, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallocate_that_fails(monkeypatch, failures=1, error=errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        write(pool, 1, 1)
    assert not isinstance(caught.value, SlabFullError)
    assert not list(disk.parent.rglob("*state*"))


# The pools of a process


@pytest.mark.linux
def test_a_process_has_one_pool_a_run_and_none_of_runs_that_are_over(
    slab: SlabConfig, tmp_path: Path
) -> None:
    over = SlabConfig.new(str(tmp_path), "over")
    open_root(over, create=True)
    write(open_pool(over), 1, 1)
    assert open_pool(SlabConfig(over.directory, over.name)) is open_pool(over)
    assert open_files(over) == 1
    remove_root(over)
    assert eventually(lambda: not open_files(over))
    pool = open_pool(slab)
    release(slab.name)
    assert open_pool(slab) is not pool


# Helpers


def open_files(slab: SlabConfig) -> int:
    """How many buffers of the root this process holds open."""
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(f"/{slab.name}/" in link and not link.endswith(WATCHED) for link in links)


def in_child(task: Any, *args: Any) -> Any:
    """The result of ``task(*args)`` in another process."""
    receiver, sender = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_run_in_child, args=(sender, task, args))
    child.start()
    result = receiver.recv()
    child.join()
    return result


def _run_in_child(sender: Connection, task: Any, args: tuple[Any, ...]) -> None:
    sender.send(task(*args))


def _read_in_child(slab: SlabConfig, reference: Reference) -> bytes:
    return bytes(Pool(slab).read(reference))


def _write_in_child(slab: SlabConfig, data: bytes, submission: int = 1) -> Reference:
    return write(Pool(slab), submission, submission, data)


@contextlib.contextmanager
def held_by_child(slab: SlabConfig) -> Iterator[tuple[Any, str]]:
    """A process that holds a buffer of submission 1 until it is killed, and the buffer's path."""
    receiver, sender = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_hold, args=(slab, sender))
    child.start()
    try:
        yield child, receiver.recv()
    finally:
        child.kill()
        child.join()


def _hold(slab: SlabConfig, sender: Connection) -> None:
    with Pool(slab).claim("state", 8, 1, 1) as claim:
        sender.send(claim.reference.path)
        multiprocessing.Event().wait()
