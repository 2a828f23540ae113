"""Files of others: what is opened at all, how much of it, and what JSON is taken."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
import safetensors.torch
import torch

from sparkdl.checkpoint.files import Folder
from sparkdl.codec.files import mappable, parse_json, parse_tensors, read_plain
from sparkdl.errors import CheckpointError


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_plain(path) == read_plain(path, limit=5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, and 4 at most are expected"):
        read_plain(path, limit=4)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_nothing_else_is_opened_and_nothing_waits(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if kind == "link":
        (tmp_path / "b").write_bytes(b"1")
        path.symlink_to(tmp_path / "b")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    with pytest.raises(OSError, match=r"symbolic links|not a regular file"):
        read_plain(path)


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_folder_reads_no_more_than_it_should(place: str, tmp_path: Path) -> None:
    path = str(tmp_path) if place == "local" else f"memory://{secrets.token_hex(4)}/run"
    folder = Folder.of(path)
    folder.make()
    folder.write("a", b"12345")
    assert folder.read("a") == folder.read("a", limit=5) == b"12345"
    with pytest.raises(CheckpointError, match="it has 5 bytes, and 4 at most are expected"):
        folder.read("a", limit=4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is given twice"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 5000, "integer string conversion"),
        ('{"a": 1', "Expecting"),
        ("", "Expecting"),
    ],
)
def test_json_that_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_json(text.encode())


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e400", "[-1e400]"])
def test_numbers_may_have_to_be_finite(text: str) -> None:
    assert parse_json(text.encode()) is not None
    with pytest.raises(ValueError, match="is not an allowed number"):
        parse_json(text.encode(), finite=True)


def test_tensors_and_metadata_come_back() -> None:
    tensors = {"a": torch.arange(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    found, metadata = parse_tensors(safetensors.torch.save(tensors, {"k": "v"}))
    assert metadata == {"k": "v"}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert parse_tensors(safetensors.torch.save({}))[1] == {}


def test_what_is_mapped_is_what_was_looked_at(tmp_path: Path) -> None:
    """Though another file takes the name in between."""
    path, other = tmp_path / "a", tmp_path / "b"
    safetensors.torch.save_file({"a": torch.zeros(2)}, path)
    safetensors.torch.save_file({"a": torch.ones(2)}, other)
    with mappable(path) as file:
        os.replace(other, path)
        assert torch.equal(safetensors.torch.load_file(file)["a"], torch.zeros(2))


def test_a_link_of_the_users_own_is_followed_where_that_is_meant(tmp_path: Path) -> None:
    """As the weights of a model hub are links to where it keeps them."""
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "blob")
    (tmp_path / "a").symlink_to(tmp_path / "blob")
    with mappable(tmp_path / "a", links=True) as file:
        assert safetensors.torch.load_file(file).keys() == {"a"}
    with pytest.raises(OSError, match="symbolic links"), mappable(tmp_path / "a"):
        pass
