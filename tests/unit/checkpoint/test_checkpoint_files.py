"""Folders on local and remote file systems: whole files or none, and plain names only."""

from __future__ import annotations

import os
import pickle
import resource
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import run_fresh
from permissions import unprivileged
from pyarrow import fs

from sparkdl.checkpoint import files
from sparkdl.checkpoint.files import Folder, unfinished
from sparkdl.errors import CheckpointError


@pytest.fixture(name="folder", params=["path", "file:///", "file:/", "memory://"])
def a_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    kind = request.param
    path = tmp_path / "with space" / "run"
    folder = {
        "path": lambda: Folder.of(path),
        "file:///": lambda: Folder.of(path.as_uri()),
        "file:/": lambda: Folder.of(f"file:{path.as_uri().removeprefix('file://')}"),
        "memory://": lambda: Folder.of(f"memory://{secrets.token_hex(4)}/run"),
    }[kind]()
    if kind != "memory://":
        assert folder.uri == str(path)
    folder.make()
    return folder


def test_what_is_written_can_be_read_listed_and_deleted(folder: Folder) -> None:
    folder.make()  # once more does no harm
    assert folder.entries() == {}
    folder.write("a.bin", b"12345")
    folder.write("b.bin", b"")
    inner = folder.folder("inner")
    inner.make()
    inner.write("c", b"c")
    found = {name: (entry.kind, entry.nbytes) for name, entry in folder.entries().items()}
    assert {k: v for k, v in found.items() if k != "inner"} == {
        "a.bin": ("file", 5),
        "b.bin": ("file", 0),
    }
    assert found["inner"][0] == "folder"
    assert folder.read("a.bin") == b"12345"
    folder.delete("a.bin")
    folder.delete("a.bin")  # gone already
    folder.delete_empty()  # is not
    assert set(folder.entries()) == {"b.bin", "inner"}
    inner.delete("c")
    inner.delete_empty()
    inner.delete_empty()
    assert set(folder.entries()) == {"b.bin"}


def test_a_folder_travels(folder: Folder) -> None:
    folder.write("a", b"1")
    again = pickle.loads(pickle.dumps(folder))
    assert again == folder
    assert again.read("a") == b"1"


def test_a_missing_folder_is_empty_and_a_missing_file_is_named(folder: Folder) -> None:
    assert folder.folder("none").entries() == {}
    with pytest.raises(CheckpointError, match=r"cannot move .*/run/absent\.bin: .*nowhere"):
        folder.move("absent.bin", Folder("nowhere://run"))
    with pytest.raises(CheckpointError, match=r"cannot read .*/run/absent\.bin"):
        folder.read("absent.bin")


TRICKS = [
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    ".hidden",
    "a\0",
    "a\n",
    "~",
    "a\\b",
    "%2e%2e",
]


@pytest.mark.parametrize("name", TRICKS)
def test_only_plain_names_are_taken(folder: Folder, name: str) -> None:
    for act in (folder.read, folder.delete, folder.folder, lambda n: folder.write(n, b"")):
        with pytest.raises(CheckpointError, match="not a plain file name"):
            act(name)
    assert folder.entries() == {}


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("/a/b/", "/a/b"),
        ("file:/a%20b", "/a b"),
        ("file:///a/run#1?x", "/a/run#1?x"),
        ("file://localhost/a", "/a"),
        ("hdfs:/a/b/", "hdfs:///a/b"),
        ("hdfs://host:8020/a//", "hdfs://host:8020/a"),
        ("s3://bucket/a/?region=eu", "s3://bucket/a?region=eu"),
    ],
)
def test_paths_and_uris(path: str, uri: str) -> None:
    assert Folder.of(path).uri == uri


def test_a_file_uri_of_a_host_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r'the host "node7".*file:///ck/run'):
        Folder.of("file://node7/ck/run")


def test_a_file_that_goes_while_its_folder_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the draft of a twin of the task, renamed at that moment."""
    folder = Folder.of(tmp_path)
    for name in ("a", "b", "c"):
        folder.write(name, b"12")
    look = files._entry

    def vanishing(entry: os.DirEntry[str]) -> files.Entry:
        if entry.name == "b":
            os.unlink(entry.path)
        return look(entry)

    monkeypatch.setattr(files, "_entry", vanishing)
    assert set(folder.entries()) == {"a", "c"}


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Folder.of("run").uri == str(tmp_path / "run")
    assert Folder.of("~/run").uri == os.path.expanduser("~/run")


def test_a_folder_in_a_uri_with_a_query() -> None:
    folder = Folder.of("s3://bucket/run?region=eu").folder("iteration-1")
    assert folder.uri == "s3://bucket/run/iteration-1?region=eu"
    assert folder.name == "iteration-1"


def test_messages_tell_no_password() -> None:
    folder = Folder.of("memory2://me:hunter2@place/run?secret_key=abc&region=eu")
    assert str(folder) == "memory2://(redacted)@place/run?secret_key=(redacted)&region=eu"
    with pytest.raises(CheckpointError) as caught:
        folder.make()
    assert "hunter2" not in str(caught.value)
    assert "memory2" in str(caught.value)


# Local


def test_a_file_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    """The limit on a file's size stands for a full disk: the system call fails half way."""
    folder = Folder.of(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"cannot write {tmp_path}/big: File too large"):
            folder.write("big", bytes(3 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert folder.entries() == {}


def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with (
        unprivileged(),
        pytest.raises(CheckpointError, match=f"cannot write {tmp_path}/a: Permission denied"),
    ):
        Folder.of(tmp_path).write("a", b"")


def test_a_folder_that_is_not_here_is_not_made_by_writing(tmp_path: Path) -> None:
    """An executor that does not share the file system must fail, not write where nobody looks."""
    with pytest.raises(CheckpointError, match="No such file or directory"):
        Folder.of(tmp_path / "none").write("a", b"1")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"cannot make the folder {tmp_path}/file/run"):
        Folder.of(tmp_path / "file" / "run").make()


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("secret")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(inner / "pipe")
    folder = Folder.of(inner)
    assert {name: entry.kind for name, entry in folder.entries().items()} == {
        "link": "other",
        "pipe": "other",
    }
    for name in ("link", "pipe"):
        with pytest.raises(CheckpointError, match=name):
            folder.read(name)


def test_a_killed_writer_leaves_no_file_under_the_name(tmp_path: Path) -> None:
    """A process that dies between writing and renaming leaves a temporary file at most."""
    code = (
        "import os, sys; from sparkdl.checkpoint.files import Folder\n"
        "os.replace = lambda *_: os._exit(9)\n"
        "Folder.of(sys.argv[1]).write('a.bin', b'12345')\n"
    )
    done = run_fresh(code, str(tmp_path))
    assert done.returncode == 9
    (left,) = Folder.of(tmp_path).entries()
    assert unfinished(left) == "a.bin"
    Folder.of(tmp_path).delete(left)
    assert list(tmp_path.iterdir()) == []


# Remote


class Store:
    """A local folder that moves as S3 does: by a copy, of 5 GiB at most (here: of 4 bytes)."""

    type_name = "s3"

    def __init__(self) -> None:
        self._files = fs.LocalFileSystem()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def move(self, source: str, target: str) -> None:
        if self._files.get_file_info(source).size > 4:
            raise OSError("the specified copy source is larger than the maximum allowable size")
        self._files.move(source, target)


def test_nothing_is_copied_on_s3(tmp_path: Path) -> None:
    files.Remote(Store()).write(f"{tmp_path}/slice", ".slice.part", b"123456")
    assert [path.name for path in tmp_path.iterdir()] == ["slice"]
    assert (tmp_path / "slice").read_bytes() == b"123456"


def test_an_unknown_file_system_is_named() -> None:
    with pytest.raises(CheckpointError, match="nosuch"):
        Folder.of("nosuch://a/b").make()


def test_without_fsspec_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from sparkdl.checkpoint.files import Folder\n"
        "Folder.of('memory://a').make()\n"
    )
    done = run_fresh(code)
    assert 'pip install fsspec (the extra "remote")' in done.stderr
