"""What pandas between Spark and Arrow keeps, where a version of Spark has no other way."""

from __future__ import annotations

import datetime
import zoneinfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import sparkdl
from sparkdl.compat import from_pandas, table_from_pandas, table_to_pandas

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


def test_a_group_comes_back_as_it_was() -> None:
    schema = pa.schema(
        [
            ("n", pa.int32()),
            ("m", pa.map_(pa.string(), pa.int64())),
            ("t", pa.timestamp("us", "UTC")),
        ]
    )
    rows = pd.DataFrame({"n": [1, 2], "m": [{"a": 1}, {}], "t": [pd.Timestamp(NOON)] * 2})
    rows["m"] = rows["m"].map(lambda pairs: list(pairs.items()))
    table = table_from_pandas(rows, schema, ZONE)
    back = table_to_pandas(table, schema)
    assert back["m"].tolist() == [{"a": 1}, {}]
    assert back["n"].tolist() == [1, 2]
    assert back["t"][0] == pd.Timestamp(NOON, tz=ZONE)
