"""What a client of Spark Connect reads in a folder that others may write to."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.connect import fit as large_result
from sparkdl.connect.fit import store_rows
from sparkdl.errors import CheckpointError


class Session:
    """Runs the task of a query here."""

    def range(self, start: int, stop: int, step: int, partitions: int) -> Session:
        self._ids = pa.RecordBatch.from_pydict({"id": list(range(start, stop))})
        return self

    def mapInArrow(self, task: Any, schema: str) -> Session:
        self._found = list(task([self._ids]))
        return self

    def toArrow(self) -> pa.Table:
        empty = pa.schema({"number": pa.int64(), "data": pa.binary()})
        return pa.Table.from_batches(self._found, None if self._found else empty)


class Marks:
    """What a pickle may do when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def flipped(pieces: list[Path], mark: Path) -> None:
    data = bytearray(pieces[1].read_bytes())
    data[-1] ^= 1
    pieces[1].write_bytes(data)


def cut(pieces: list[Path], mark: Path) -> None:
    pieces[-1].write_bytes(pieces[-1].read_bytes()[:-1])


def exchanged(pieces: list[Path], mark: Path) -> None:
    pieces[0].rename(f"{pieces[0]}.aside")
    pieces[1].rename(pieces[0])
    Path(f"{pieces[0]}.aside").rename(pieces[1])


def forged(pieces: list[Path], mark: Path) -> None:
    pieces[0].write_bytes(pickle.dumps(Marks(mark)))


@pytest.fixture(name="rows")
def some_rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    monkeypatch.setattr(large_result, "PIECE_BYTES", 100)
    return {"result": pickle.dumps("x" * 90), "current": bytes(range(256)), "ema": b""}


def test_rows_come_back_and_nothing_stays(rows: dict[str, bytes], tmp_path: Path) -> None:
    stored = pickle.loads(pickle.dumps(store_rows(tmp_path, rows)))
    assert stored.fetch(Session()) == rows
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [flipped, cut, exchanged, forged])
def test_rows_that_somebody_has_changed_are_refused(
    change: Callable[[list[Path], Path], None], rows: dict[str, bytes], tmp_path: Path
) -> None:
    stored = store_rows(tmp_path, rows)
    change(sorted(Path(stored.uri).iterdir()), tmp_path / "ran")
    with pytest.raises(CheckpointError, match=r"/piece-0000\d is not the part of the result that "):
        pickle.loads(stored.fetch(Session())["result"])
    assert not (tmp_path / "ran").exists()
