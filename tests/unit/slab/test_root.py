"""The slab root of a node: private, one token, and swept when its application is dead."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sparkdl.data import partition_reader
from sparkdl.data.fields import Field, RowFile
from sparkdl.data.partition_reader import MappedColumn, SegmentWriter, map_file
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.process.system import boot_id, pid_namespace
from sparkdl.slab import root as module
from sparkdl.slab.pool import Pool
from sparkdl.slab.root import (
    MARK,
    SWEEP_AFTER_SECONDS,
    SlabConfig,
    open_root,
    read_private,
    remove_root,
    write_private,
)

# A package without content: the real one would load torch, which takes seconds.
OPEN_AND_PRINT = """
import importlib, sys, types
sys.modules["sparkdl"] = types.ModuleType("sparkdl")
sys.modules["sparkdl"].__path__ = [sys.argv[3]]
sys.modules["sparkdl.slab"] = types.ModuleType("sparkdl.slab")
sys.modules["sparkdl.slab"].__path__ = [sys.argv[3] + "/slab"]
module = importlib.import_module("sparkdl.slab.root")
root = module.open_root(module.SlabConfig(sys.argv[1], sys.argv[2]), create=True)
print(root.node_id, flush=True)
sys.stdin.read()
"""


PACKAGE = str(Path(module.__file__).parents[1])


def start(slab: SlabConfig) -> subprocess.Popen[str]:
    """A process that opens the root, prints the token, and lives until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", OPEN_AND_PRINT, slab.directory, slab.name, PACKAGE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def token_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def dead_root(path: Path) -> Path:
    """A root with the mark of a process of this PID namespace that is no more."""
    child = subprocess.Popen(["true"])
    child.wait()
    path.mkdir(parents=True, mode=0o700)
    (path / f"alive.{boot_id()}.{pid_namespace()}.{child.pid}.12345").touch()
    return path


def precious(folder: Path) -> Path:
    """A file that must stay."""
    folder.mkdir()
    (folder / "precious").write_text("mine")
    return folder / "precious"


@pytest.fixture
def auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SlabConfig, Path, Path]]:
    """A root in shared memory and in the local directory, which is not there yet, and these two."""
    memory, local = tmp_path / "memory", tmp_path / "local"
    memory.mkdir()
    monkeypatch.setattr(module, "SHARED_MEMORY", memory)
    monkeypatch.setattr(module, "_open_roots", {})
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{local},{tmp_path / 'other'}")
    slab = SlabConfig.new("auto", "test")
    yield slab, memory, local
    remove_root(slab)


def root_in(slab: SlabConfig) -> Path:
    return Path(slab.directory) / slab.name


# Opening


def test_names_are_unpredictable(tmp_path: Path) -> None:
    one, other = (SlabConfig.new(str(tmp_path), "app-7") for _ in range(2))
    assert one.name != other.name
    assert one.name.startswith(f"{MARK}app-7-")
    assert len(one.name) == len(f"{MARK}app-7-") + 16


def test_a_relative_directory_is_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors of one host, each in its own working directory, are then nodes of their own."""
    slab = SlabConfig.new("slabs/deep", "test")
    monkeypatch.chdir(tmp_path)
    root = open_root(slab, create=True)
    assert root.directories == (tmp_path / "slabs" / "deep" / slab.name,)
    remove_root(slab)


def test_auto_is_shared_memory_then_the_local_directory(auto) -> None:
    slab, memory, local = auto
    root = open_root(slab, create=True)
    assert root.directories == (memory / slab.name, local / slab.name)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in root.directories)
    assert (memory / slab.name / "token").is_file()
    remove_root(slab)
    assert not any(path.exists() for path in root.directories)


def test_auto_without_shared_memory(auto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slab, memory, _ = auto
    memory.rmdir()
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert open_root(slab, create=True).directories == (tmp_path / slab.name,)


@pytest.mark.parametrize("name", ["_check_not_shared", "_mark_alive", "_made"])
@pytest.mark.parametrize("times", [3, 1000])
def test_a_root_that_is_deleted_while_it_is_made_is_made_again(
    slab: SlabConfig, monkeypatch: pytest.MonkeyPatch, name: str, times: int
) -> None:
    """A thousand times: a file is missing, not a directory that cannot be written."""
    step, left = getattr(module, name), iter(range(times))

    def deleted(path: Path, *arguments: object) -> object:
        if next(left, None) is not None:
            shutil.rmtree(path)
            (path / "token").stat()
        return step(path, *arguments)

    monkeypatch.setattr(module, name, deleted)
    with pytest.raises(FileNotFoundError) if times > 3 else contextlib.nullcontext():
        assert open_root(slab, create=True).directories[0].is_dir()
    remove_root(slab)


@pytest.mark.parametrize("what", ["link", "file", 0o750, 0o720, 0o701, "another user's"])
def test_a_root_that_is_not_ours_is_refused(
    slab: SlabConfig, tmp_path: Path, what: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere, mine = root_in(slab), tmp_path / "elsewhere", os.getuid()
    elsewhere.mkdir(mode=0o700)
    if what == "link":
        path.symlink_to(elsewhere)
    elif what == "file":
        path.touch(0o600)
    else:
        path.mkdir()
        path.chmod(what if isinstance(what, int) else 0o700)
        if not isinstance(what, int):
            monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(PermissionError) as caught:
        open_root(slab, create=True)
    assert str(caught.value) == f"slab root {path} is not a directory of this user with mode 0700"
    monkeypatch.undo()
    assert list(elsewhere.iterdir()) == []
    if what == "link":
        path.unlink()


# Links inside


def linked_segment(place: Path) -> None:
    with pytest.raises(OSError, match="File exists"):
        SegmentWriter(str(place / "samples-1-0"), [FIELD], [])
    MappedColumn.map([RowFile(str(place / "samples-1-0"), 4096)], 0, FIELD)


def linked_buffer(place: Path) -> None:
    with Pool(SlabConfig(str(place.parent), place.name)).claim("state", 8, 1, 1):
        pass


def linked_root(place: Path) -> None:
    module._open_roots.clear()
    open_root(SlabConfig(str(place.parent), place.name))


FIELD = Field("x", "float32", ())
USES: dict[str, Callable[[Path], object]] = {
    "token": linked_root,
    "alive.*": linked_root,
    "recipe": lambda place: read_private(place / "recipe"),
    "samples-1-0-0.values": linked_segment,
    "samples-1.order": lambda place: map_file(str(place / "samples-1.order"), "int64", (-1,)),
    "state-8-abc": linked_buffer,
    "new-state-8-guessed": linked_buffer,
}


@pytest.mark.parametrize("name", USES)
def test_a_link_in_place_of_a_file_is_not_followed(
    slab: SlabConfig, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As somebody may leave it who can write there after all."""
    open_root(slab, create=True)
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine" * 4096)
    place = root_in(slab)
    path = next(place.glob(name), place / name)
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    if name.endswith("guessed"):
        monkeypatch.setattr(secrets, "token_hex", lambda nbytes: "guessed")
    with pytest.raises(OSError, match=r"symbolic links|File exists"):
        USES[name](place)
    assert outside.read_bytes() == b"mine" * 4096


def test_the_root_and_all_files_are_for_this_user_alone(slab: SlabConfig) -> None:
    before = os.umask(0)
    try:
        root = open_root(slab, create=True)
        writer = PartitionWriter(slab)
        writer.add(["x"], [np.zeros(3)])
        writer.finish()
        write_private(root_in(slab) / "recipe", b"")
        with Pool(slab).claim("state", 8, 1, 1):
            pass
    finally:
        os.umask(before)
    assert root.directories == (root_in(slab),)
    assert stat.S_IMODE(root_in(slab).stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in root_in(slab).iterdir()}
    assert len(modes) == 7
    assert set(modes.values()) == {0o600}


# The token


def test_processes_of_a_node_read_the_same_token(slab: SlabConfig) -> None:
    processes = [start(slab) for _ in range(3)]  # all at once: one of them makes it
    node_ids = {token_of(process) for process in processes}
    for process in processes:
        process.communicate()
    root = open_root(slab)
    assert node_ids == {root.node_id}
    assert len(root.node_id) == 32
    kinds = sorted(path.name.split(".")[0] for path in root_in(slab).iterdir())
    assert kinds == ["alive"] * 4 + ["token"]


def test_a_root_made_again_has_another_token(slab: SlabConfig) -> None:
    """What an earlier life of the node wrote must not be taken for this one's."""
    first = open_root(slab, create=True)
    remove_root(slab)
    assert open_root(slab) is None
    second = open_root(slab, create=True)
    assert first.node_id != second.node_id


def test_a_root_deleted_behind_our_back_is_noticed(slab: SlabConfig) -> None:
    root = open_root(slab, create=True)
    assert root is not None
    (root_in(slab) / "token").unlink()
    assert open_root(slab) is None


# Removing and sweeping


def test_remove_takes_everything(slab: SlabConfig) -> None:
    """Also by a process that never opened it."""
    open_root(slab, create=True)
    (root_in(slab) / "gradient-8-abc").write_bytes(b"12345678")
    module._open_roots.clear()
    remove_root(slab)
    assert not root_in(slab).exists()
    remove_root(slab)  # twice does no harm


@pytest.mark.parametrize("zombie", [False, True])
def test_the_dead_are_swept_and_the_living_kept(tmp_path: Path, zombie: bool) -> None:
    """Also those that are killed and for which nobody has waited yet."""
    living, dying, new = (SlabConfig.new(str(tmp_path), name) for name in ("a", "b", "c"))
    processes = {slab.name: start(slab) for slab in (living, dying)}
    for process in processes.values():
        assert token_of(process)
    killed = processes[dying.name]
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    if not zombie:
        killed.wait()
    assert root_in(dying).exists()
    open_root(new, create=True)
    assert root_in(living).exists()
    assert not root_in(dying).exists()
    processes[living.name].communicate()
    remove_root(new)
    open_root(new, create=True)
    assert not root_in(living).exists()
    remove_root(new)
    killed.wait()


@pytest.mark.parametrize(
    ("seconds", "swept"), [(SWEEP_AFTER_SECONDS - 30, False), (SWEEP_AFTER_SECONDS + 1, True)]
)
def test_a_root_without_a_mark_is_swept_when_it_is_old(
    slab: SlabConfig, tmp_path: Path, seconds: float, swept: bool
) -> None:
    """A young one may belong to a process that is just making it."""
    path = tmp_path / f"{MARK}unmarked"
    path.mkdir(mode=0o700)
    age(path, seconds)
    open_root(slab, create=True)
    assert path.exists() != swept


@pytest.mark.parametrize(
    ("mark", "swept"),
    [
        (f"alive.{boot_id()}.{pid_namespace()}.{os.getpid()}.1", True),  # its number, used again
        (f"alive.{boot_id()}.another-namespace.1.1", False),  # not to be seen from here
        (f"alive.another-boot.{pid_namespace()}.1.1", False),  # of another machine, perhaps
        ("alive.garbage", False),
    ],
    ids=["another process", "another namespace", "another boot", "garbage"],
)
def test_marks(slab: SlabConfig, tmp_path: Path, mark: str, swept: bool) -> None:
    path = tmp_path / f"{MARK}other"
    path.mkdir(mode=0o700)
    (path / mark).touch()
    open_root(slab, create=True)
    assert path.exists() != swept


def test_sweeping_follows_no_link_out_of_a_dead_root(slab: SlabConfig, tmp_path: Path) -> None:
    dead, kept = dead_root(tmp_path / f"{MARK}dead"), precious(tmp_path / "kept")
    (dead / "inner").mkdir()
    (dead / "folder").symlink_to(kept.parent)
    (dead / "inner" / "file").symlink_to(kept)
    open_root(slab, create=True)
    assert not dead.exists()
    assert kept.read_text() == "mine"


def test_removing_follows_no_link(slab: SlabConfig, tmp_path: Path) -> None:
    """Neither out of the root, nor where the root itself was exchanged for a link."""
    kept = precious(tmp_path / "kept")
    open_root(slab, create=True)
    (root_in(slab) / "folder").symlink_to(kept.parent)
    remove_root(slab)
    assert not root_in(slab).exists()
    root_in(slab).symlink_to(kept.parent)
    remove_root(slab)
    assert kept.read_text() == "mine"
    root_in(slab).unlink()


def test_the_roots_of_others_are_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, mine = dead_root(tmp_path / f"{MARK}dead"), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    module._sweep([tmp_path])
    assert dead.exists()
    monkeypatch.setattr(os, "getuid", lambda: mine)
    module._sweep([tmp_path])
    assert not dead.exists()


def test_sweeping_touches_nothing_else(slab: SlabConfig, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / f"{MARK}link").symlink_to(target)
    (tmp_path / f"{MARK}file").touch()
    (tmp_path / f"{MARK}checkpoints").mkdir(mode=0o700)
    dead_root(tmp_path / f"{MARK}open").chmod(0o755)  # but roots are not open to others
    for name in ("checkpoints", "open"):
        (tmp_path / f"{MARK}{name}" / "work").mkdir()
        (tmp_path / f"{MARK}{name}" / "work" / "manifest.json").touch()
    before = {path.name for path in tmp_path.rglob("*")}
    for path in tmp_path.iterdir():
        age(path, 10 * SWEEP_AFTER_SECONDS)
    open_root(slab, create=True)
    assert before <= {path.name for path in tmp_path.rglob("*")}
    assert len(list(tmp_path.glob("*/work/manifest.json"))) == 2


def test_a_root_that_another_machine_holds_is_refused(slab: SlabConfig) -> None:
    """Through a file system that both have."""
    root_in(slab).mkdir(mode=0o700)
    (root_in(slab) / f"alive.another-boot.{pid_namespace()}.1.1").touch()
    with pytest.raises(OSError, match=f"{root_in(slab)} .*must be a local directory of each node"):
        open_root(slab, create=True)


def test_a_dead_root_goes_from_every_directory(auto) -> None:
    """Also what is left in one of them only: shared memory is empty after a restart."""
    slab, memory, local = auto
    for path in (memory / f"{MARK}dead", local / f"{MARK}dead", local / f"{MARK}spilled"):
        dead_root(path)
    open_root(slab, create=True)
    assert [path.name for path in memory.iterdir()] == [slab.name]
    assert [path.name for path in local.iterdir()] == [slab.name]


@pytest.mark.linux
def test_the_mark_of_a_spark_worker_names_the_jvm(
    slab: SlabConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JVM -> worker daemon -> worker: workers come and go, the JVM stays."""
    monkeypatch.setenv("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
    open_root(slab, create=True)
    (mark,) = root_in(slab).glob("alive.*")
    grandparent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    expected = grandparent if grandparent != "0" else str(os.getppid())
    assert mark.name.split(".")[3] == expected


def full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written under ``path`` any more."""
    written = write_private

    def write(target: str | Path, data: bytes) -> None:
        if Path(target).is_relative_to(path):
            Path(target).touch()
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        written(target, data)

    monkeypatch.setattr(module, "write_private", write)


def test_where_shared_memory_is_full_the_root_is_in_the_local_directory(
    auto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab, memory, local = auto
    full(memory, monkeypatch)
    root = open_root(slab, create=True)
    assert root.directories == (local / slab.name,)
    module._open_roots.clear()
    again = open_root(slab)  # of another process, which may find room by now
    assert again.node_id == root.node_id
    assert not list(memory.glob("*/token*"))
    remove_root(slab)
    assert not list(memory.iterdir())
    assert not list(local.iterdir())
    full(tmp_path, monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        open_root(slab, create=True)


def test_to_look_for_a_root_and_to_remove_it_make_no_directory(tmp_path: Path) -> None:
    slab = SlabConfig.new(str(tmp_path / "slabs"), "test")
    assert open_root(slab) is None
    remove_root(slab)
    assert not list(tmp_path.iterdir())


def test_a_full_root_can_still_be_opened(slab: SlabConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a new worker, when samples have filled the place."""
    root = open_root(slab, create=True)
    full(root_in(slab), monkeypatch)
    for create in (False, True):
        monkeypatch.setattr(module, "_open_roots", {})
        assert open_root(slab, create=create) == root


def test_partitions_share_what_is_mapped(slab: SlabConfig) -> None:
    """A mapping takes a file descriptor, and a worker may come to hold every partition."""
    root = open_root(slab, create=True)
    path = root.directories[0] / "samples-1.order"
    write_private(path, np.arange(6).tobytes())
    one, other = (map_file(str(path), "int64", (shape, -1)) for shape in (2, 3))
    assert np.shares_memory(one, other)
    assert one.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert other.shape == (3, 2)
    del one, other
    assert str(path) not in partition_reader._mapped
