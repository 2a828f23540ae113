"""What pandas between Spark and Arrow keeps, where a version of Spark has no other way."""

from __future__ import annotations

import datetime
import zoneinfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import sparkdl
from sparkdl.compat import _Groups, from_pandas, to_pandas

ZONE = "Europe/Berlin"
NOON = datetime.datetime(2024, 6, 1, 12, 0)
PAIR = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.float64()))])
KEPT = {
    "numbers": (pd.Series([1, 2]), pa.int64(), [1, 2]),
    "numbers with a null": (pd.Series([1.0, np.nan]), pa.int64(), [1, None]),
    "arrays": (pd.Series([np.array([1.0, 2.0]), None]), pa.list_(pa.float32()), [[1.0, 2.0], None]),
    "structs": (
        pd.DataFrame({"a": [1.0, np.nan], "b": [np.array([0.5]), None]}),
        PAIR,
        [{"a": 1, "b": [0.5]}, None],
    ),
    "text": (pd.Series(["ü", None]), pa.string(), ["ü", None]),
    "bytes": (pd.Series([b"\0", b""]), pa.binary(), [b"\0", b""]),
    "times": (
        pd.Series([pd.Timestamp(NOON)]),
        pa.timestamp("us", tz="UTC"),
        [NOON.replace(tzinfo=zoneinfo.ZoneInfo(ZONE))],
    ),
    "times without a zone": (pd.Series([pd.Timestamp(NOON)]), pa.timestamp("us"), [NOON]),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept(case: str) -> None:
    values, kind, expected = KEPT[case]
    assert from_pandas(values, kind, ZONE).to_pylist() == expected


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pd.Series([2.0**53, np.nan]), pa.int64()),
        (pd.Series([np.array([2.0**53, np.nan])]), pa.list_(pa.int64())),
    ],
    ids=["a column", "arrays"],
)
def test_numbers_that_pandas_cannot_tell_apart_are_an_error(values, kind) -> None:
    with pytest.raises(sparkdl.DataError, match="above 2\\*\\*53"):
        from_pandas(values, kind)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([float("nan"), None, 1.0]),
        pa.array([2**53 + 1, None]),
        pa.array(["ü", None]),
        pa.array([None, None], pa.float32()),
        pa.array([], pa.float32()),
        pa.array([[1.0, 2.0], None], pa.list_(pa.float32())),
    ],
    ids=["NaN and null", "large numbers", "text", "nulls", "no row", "arrays"],
)
def test_predictions_that_come_back(values: pa.Array) -> None:
    """Also as one of several outputs, beside a reason."""
    both = pa.StructArray.from_arrays([values, pa.nulls(len(values), pa.string())], ["a", "why"])
    frame = to_pandas(both)
    for series in (to_pandas(values), frame["a"]):
        back = pa.Array.from_pandas(series, type=values.type)
        assert str(back.to_pylist()) == str(values.to_pylist()), "NaN is not null"
    assert frame.columns.tolist() == ["a", "why"]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_rows_of_a_group_may_lie_in_several_batches(size: int) -> None:
    """Groups are as long as their key says, but the last of each belongs to the second table."""
    keys = [1, 2, 2, 3, 3, 3]
    values = pa.array([0.0, float("nan"), None, 1.0, 2.0, 3.0])
    packed = pa.StructArray.from_arrays([values], ["c0"])
    whole = pa.RecordBatch.from_pydict(
        {
            "first": pa.array([True, True, False, True, False, False]),
            "k0": pa.array(keys),
            "side": pa.array([0, 0, 1, 0, 0, 1], pa.int32()),
            "rows0": packed,
            "rows1": packed,
        }
    )
    batches = [whole.slice(at, size) for at in range(0, len(keys), size)]

    def both(left: pa.Table, right: pa.Table) -> pa.Table:
        texts = [str(left["a"].to_pylist()), str(right["b"].to_pylist())]
        return pa.table({"left": texts[:1], "right": texts[1:]})

    found = pa.Table.from_batches(_Groups(both, (("a",), ("b",)))(iter(batches))).to_pydict()
    assert found == {"left": ["[0.0]", "[nan]", "[1.0, 2.0]"], "right": ["[]", "[None]", "[3.0]"]}

    def one(key: tuple[pa.Scalar, ...], rows: pa.Table) -> pa.Table:
        return pa.table({"key": [key[0].as_py()], "rows": [rows.num_rows]})

    batches = [batch.select(["first", "k0", "side", "rows0"]) for batch in batches]
    found = pa.Table.from_batches(_Groups(one, (("a",),))(iter(batches))).to_pydict()
    assert found == {"key": [1, 2, 3], "rows": [1, 1, 2]}, "those of the first side alone"
