"""Columns of any type with any values in them, for property tests.

SPARKDL_EXAMPLES=5000 in the environment draws so many examples, others at each run.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import numpy as np
from hypothesis import strategies as st
from pyspark.sql import types as sql

from sparkdl import Convert, Image, Masked, Sequence, Text

EXAMPLES = int(os.environ.get("SPARKDL_EXAMPLES", "0"))

FLOATS = st.floats() | st.sampled_from([0.0, 1e39, -1e308, float("nan"), float("inf")])
SCALARS: dict[str, tuple[sql.DataType, st.SearchStrategy[Any]]] = {
    "byte": (sql.ByteType(), st.integers(-128, 127)),
    "int": (sql.IntegerType(), st.integers(-(2**31), 2**31 - 1)),
    "long": (sql.LongType(), st.integers(-(2**63), 2**63 - 1)),
    "float": (sql.FloatType(), st.floats(width=32)),
    "double": (sql.DoubleType(), FLOATS),
    "decimal": (
        sql.DecimalType(38, 10),
        st.decimals(-(10**20), 10**20, allow_nan=False, places=10),
    ),
    "boolean": (sql.BooleanType(), st.booleans()),
    "string": (sql.StringType(), st.text(max_size=5)),
    "binary": (sql.BinaryType(), st.binary(max_size=5)),
    "date": (sql.DateType(), st.dates(datetime.date(1970, 1, 1))),
    "timestamp": (sql.TimestampNTZType(), st.datetimes(datetime.datetime(1970, 1, 1))),
    "interval": (
        sql.DayTimeIntervalType(),
        st.timedeltas(datetime.timedelta(-9), datetime.timedelta(9)),
    ),
    "void": (sql.NullType(), st.none()),
}


@st.composite
def columns(draw: st.DrawFn) -> tuple[sql.DataType, list[Any]]:
    """A Spark type, nested or not, and a few values of it."""
    kind, values = SCALARS[draw(st.sampled_from(sorted(SCALARS)))]
    spoiled = draw(st.booleans())
    lengths = st.integers(0, 3) if spoiled else st.just(draw(st.integers(1, 3)))
    for wrap in draw(st.lists(st.sampled_from(["array", "array", "map", "struct"]), max_size=2)):
        values = values | st.none() if spoiled else values
        if wrap == "array":
            kind = sql.ArrayType(kind)
            values = lengths.flatmap(
                lambda n, values=values: st.lists(values, min_size=n, max_size=n)
            )
        elif wrap == "map":
            kind = sql.MapType(sql.StringType(), kind)
            values = st.dictionaries(st.text(max_size=2), values, max_size=2)
        else:
            kind = sql.StructType([sql.StructField("a", kind)])
            values = st.fixed_dictionaries({"a": values})
    values = values | st.none() if spoiled else values
    return kind, draw(st.lists(values, max_size=5))


SPECS = st.sampled_from(
    [
        None,
        Image(),
        Sequence(),
        Sequence(max_length=2, lengths=True),
        Sequence(mask=True, padding_side="left"),
        Masked(),
        Sequence(Sequence()),
        Text(lambda texts: [[len(text)] for text in texts]),
        Convert(lambda value: value),
        Convert(float),
        Convert(lambda value: np.zeros(len(value))),
    ]
)
