"""Files of snapshots on a node: whole, or not there."""

from __future__ import annotations

import resource
from pathlib import Path

from sparkdl.engines.gang.snapshots import SnapshotFiles


def test_of_what_cannot_be_written_nothing_is_left(tmp_path: Path) -> None:
    files, failed = SnapshotFiles(tmp_path), ""
    files.write("snapshot", 0, b"small")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # of any file, pytest's own too
    try:
        files.write("snapshot", 1, bytes(5000))
    except OSError as error:
        failed = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "too large" in failed
    assert files.there("snapshot", 2) == [True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot-0"]
