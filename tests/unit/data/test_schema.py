"""Columns to tensors: which types are taken, and which row is to blame when a value is not."""

from __future__ import annotations

import decimal
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import message_of
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as sql

from sparkdl import Convert
from sparkdl import Sequence as Sequence_
from sparkdl.data.columns.base import Column
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field
from sparkdl.data.row_errors import BadRow, RowError
from sparkdl.data.schema import columns_of, quoted
from sparkdl.errors import DataError

quick = settings(deadline=None, max_examples=100)

DROP = 'Drop such rows with df.dropna(subset=["x"]), or fill them.'
SAME_SHAPE = "Every row must have the same shape: filter out, pad or truncate such rows."
VARYING = (
    f'{SAME_SHAPE} Rows of varying length are padded with columns={{"x": sparkdl.Sequence()}}.'
)
TWO_FOR_ONE = "has 2 values where row {} has 1"
NO_VALUES = "Filter out such rows, or leave the column out."
INSIDE_ARRAYS = (
    "dropna does not look into arrays: filter out such rows with functions.exists, or fill them "
    "with functions.transform."
)
INSIDE_VECTORS = (
    "dropna does not look into vectors: fix them at their source, or convert them to arrays with "
    "pyspark.ml.functions.vector_to_array and filter out such rows with functions.exists."
)

VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)
VECTOR_COLUMN = Column("x", "float32", depth=1, vector=True)
NAN = float("nan")


def lists(depth: int, item: pa.DataType | None = None) -> pa.DataType:
    """``array<...<item>>``; double by default."""
    kind = item or pa.float64()
    for _ in range(depth):
        kind = pa.list_(kind)
    return kind


def dense(*values: float) -> dict[str, Any]:
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size: int, entries: dict[int, float]) -> dict[str, Any]:
    return {
        "type": 0,
        "size": size,
        "indices": list(entries),
        "values": [float(value) for value in entries.values()],
    }


def problem_of(array: pa.Array, column: Column, first_row: int = 0) -> BadRow:
    with pytest.raises(RowError) as caught:
        to_numpy(array, column, first_row)
    assert str(caught.value) == caught.value.problem.text
    return caught.value.problem


# Values


@pytest.mark.parametrize(
    ("kind", "values", "dtype"),
    [
        (pa.int8(), [-128, 127], "int8"),
        (pa.int16(), [-(2**15), 2**15 - 1], "int16"),
        (pa.int32(), [-(2**31), 2**31 - 1], "int32"),
        (pa.int64(), [-(2**63), 2**63 - 1], "int64"),
        (pa.float32(), [0.1, 3e38], "float32"),
        (pa.float64(), [0.1, -1e308], "float64"),
        (pa.float64(), [0.1, 1e300], "float64"),
        (pa.float64(), [0.1, 2.5], "float32"),
        (pa.bool_(), [True, False], "bool"),
    ],
)
def test_numbers_of_each_type(kind: pa.DataType, values: list[Any], dtype: str) -> None:
    found = to_numpy(pa.array(values, kind), Column("x", dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.array(values, dtype))


@pytest.mark.parametrize("depth", [0, 1])
def test_decimals_become_floats(depth: int) -> None:
    values: Any = [decimal.Decimal("1.25"), decimal.Decimal("-3.50")]
    kind = pa.decimal128(10, 2)
    array = pa.array([values] if depth else values, lists(depth, kind))
    found = to_numpy(array, Column("x", "float32", depth))
    assert found.dtype == np.float32
    assert found.tolist() == ([[1.25, -3.5]] if depth else [1.25, -3.5])


@pytest.mark.parametrize(
    ("kind", "dtype"), [(pa.float64(), "float32"), (pa.int64(), "int64"), (pa.bool_(), "bool")]
)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 2), (5, 1, 2, 3)])
def test_arrays_of_any_depth(kind: pa.DataType, dtype: str, shape: tuple[int, ...]) -> None:
    expected = (np.arange(np.prod(shape)).reshape(shape) % 7).astype(dtype)
    array = pa.array(expected.tolist(), lists(len(shape) - 1, kind))
    found = to_numpy(array, Column("x", dtype, len(shape) - 1))
    assert found.dtype == dtype
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, expected)


@quick
@given(st.data())
def test_round_trip_of_slices(data: st.DataObject) -> None:
    """What Arrow hands over is often a window of a larger array."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4), label="shape"))
    rows = data.draw(st.integers(1, 8), label="rows")
    before, after = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)), label="around")
    depth = len(shape) - 1
    total = (before + rows + after, *shape[1:])
    number = st.floats(width=32, allow_nan=False, allow_infinity=False)
    count = int(np.prod(total))
    flat = data.draw(st.lists(number, min_size=count, max_size=count), label="values")
    whole = np.array(flat, np.float32).reshape(total)
    array = pa.array(whole.tolist(), lists(depth)).slice(before, rows)
    found = to_numpy(array, Column("x", "float32", depth))
    np.testing.assert_array_equal(found, whole[before : before + rows])


def test_a_slice_does_not_see_the_mistakes_around_it() -> None:
    array = pa.array([None, [[1.0]], [[2.0]], [[3.0], [4.0]], [[NAN]]], lists(2))
    found = to_numpy(array.slice(1, 2), Column("x", "float64", 2))
    assert found.tolist() == [[[1.0]], [[2.0]]]


# Vectors


@st.composite
def vector_columns(draw: st.DrawFn) -> tuple[list[dict[str, Any]], np.ndarray]:
    width = draw(st.integers(1, 5))
    number = st.floats(width=32, allow_nan=False, allow_infinity=False)
    rows, expected = [], []
    for _ in range(draw(st.integers(1, 8))):
        if draw(st.booleans()):
            values = draw(st.lists(number, min_size=width, max_size=width))
            rows.append(dense(*values))
            expected.append(values)
        else:
            entries = draw(st.dictionaries(st.integers(0, width - 1), number))
            entries = dict(sorted(entries.items()))
            rows.append(sparse(width, entries))
            expected.append([entries.get(i, 0.0) for i in range(width)])
    return rows, np.array(expected, np.float32)


@quick
@given(vector_columns(), st.integers(0, 3))
def test_mixed_vectors_and_slices(
    column: tuple[list[dict[str, Any]], np.ndarray], before: int
) -> None:
    rows, expected = column
    before = min(before, len(rows) - 1)
    array = pa.array([*rows, dense(9)], VECTOR).slice(before, len(rows) - before)
    np.testing.assert_array_equal(to_numpy(array, VECTOR_COLUMN), expected[before:])


# Mistakes


@pytest.mark.parametrize("first_row", [0, 1000])
@pytest.mark.parametrize(
    ("values", "depth", "row", "text", "remedy"),
    [
        ([1.0, None, None], 0, 1, "is null", DROP),
        ([[1.0], None], 1, 1, "is null", DROP),
        ([[1.0, 2.0], [3.0, None]], 1, 1, "holds a null", INSIDE_ARRAYS),
        ([[[1.0], [2.0]], [[1.0], None]], 2, 1, "holds a null", INSIDE_ARRAYS),
        ([[[1.0], [2.0]], [[1.0], [2.0]], [[3.0], [None]]], 2, 2, "holds a null", INSIDE_ARRAYS),
        ([1.0, 2.0, NAN], 0, 2, "is NaN", DROP),
        ([[1.0, 2.0], [NAN, 3.0]], 1, 1, "holds NaN", INSIDE_ARRAYS),
        ([[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [NAN]]], 2, 2, "holds NaN", INSIDE_ARRAYS),
        ([[1.0, 2.0], [3.0, 4.0], [5.0]], 1, 2, "has 1 values where row {} has 2", VARYING),
        ([[1.0], []], 1, 1, "has 0 values where row {} has 1", VARYING),
        ([[[1.0]], [[2.0]], [[3.0], [4.0]]], 2, 2, TWO_FOR_ONE, VARYING),
        ([[[1.0], [2.0]], [[3.0], [4.0, 5.0]]], 2, 1, TWO_FOR_ONE, SAME_SHAPE),
        ([[[[1.0]], [[2.0]]], [[[3.0]], [[4.0, 5.0]]]], 3, 1, TWO_FOR_ONE, SAME_SHAPE),
        ([[], []], 1, 0, "is an empty array", NO_VALUES),
        ([[[], []], [[], []]], 2, 0, "is an empty array", NO_VALUES),
    ],
)
def test_a_mistake_names_its_row(
    values: list[Any], depth: int, row: int, text: str, remedy: str, first_row: int
) -> None:
    array = pa.array(values, lists(depth))
    expected = BadRow("x", first_row + row, text.format(first_row), remedy)
    assert problem_of(array, Column("x", "float32", depth), first_row) == expected


@pytest.mark.parametrize("first_row", [0, 1000])
@pytest.mark.parametrize(
    ("rows", "row", "text", "remedy"),
    [
        ([dense(1), None], 1, "is null", DROP),
        ([dense(1, 2), dense(1)], 1, "has 1 values where row {} has 2", SAME_SHAPE),
        ([dense(1, 2), sparse(3, {0: 1})], 1, "has 3 values where row {} has 2", SAME_SHAPE),
        ([sparse(2, {}), sparse(2, {}), sparse(4, {})], 2, "has 4 values where row {} has 2", None),
        ([dense(1, 2), dense(1, NAN)], 1, "holds NaN", INSIDE_VECTORS),
        ([dense(1, 2), sparse(2, {}), sparse(2, {1: NAN})], 2, "holds NaN", INSIDE_VECTORS),
        ([dense(), dense()], 0, "is an empty vector", NO_VALUES),
        ([sparse(0, {})], 0, "is an empty vector", NO_VALUES),
    ],
)
def test_a_mistake_in_a_vector_names_its_row(
    rows: list[Any], row: int, text: str, remedy: str | None, first_row: int
) -> None:
    expected = BadRow("x", first_row + row, text.format(first_row), remedy or SAME_SHAPE)
    assert problem_of(pa.array(rows, VECTOR), VECTOR_COLUMN, first_row) == expected


def test_a_mistake_in_a_slice_is_counted_from_the_slice() -> None:
    array = pa.array([[1.0], [2.0], [3.0], [None]], lists(1)).slice(2)
    assert problem_of(array, Column("x", "float64", 1), 100).row == 101


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (float("inf"), "float32", "is inf"),
        (-float("inf"), "float64", "is inf"),
        (1e39, "float32", "is inf"),
        (1e39, "float64", None),
    ],
)
@pytest.mark.filterwarnings("error")
def test_infinite_or_too_large_for_the_models_floats(
    value: float, dtype: str, text: str | None
) -> None:
    limit = {"float32": "the 3.4e+38", "float64": "the 1.8e+308"}[dtype]
    remedy = (
        f"It is infinite, or beyond {limit} of {dtype}: filter out such rows, or scale the numbers."
    )
    for array, column, said in (
        (pa.array([1.0, value]), Column("x", dtype), text),
        (pa.array([[1.0], [value]]), Column("x", dtype, 1), text and "holds inf"),
        (pa.array([dense(1), dense(value)], VECTOR), VECTOR_COLUMN, "holds inf"),
    ):
        if column is VECTOR_COLUMN and dtype == "float64":
            continue
        if said is None:
            assert np.isfinite(to_numpy(array, column)).all()
        else:
            assert problem_of(array, column) == BadRow("x", 1, said, remedy)


def test_the_message_of_a_problem() -> None:
    problem = BadRow("x", 7, "is null", "Drop it.")
    assert problem.message("partition 2") == 'column "x", row 7 of partition 2: is null. Drop it.'
    assert problem.message("it", "field") == 'field "x", row 7 of it: is null. Drop it.'


# Schemas

_FIELDS: dict[str, sql.DataType] = {
    "byte": sql.ByteType(),
    "short": sql.ShortType(),
    "int": sql.IntegerType(),
    "long": sql.LongType(),
    "float": sql.FloatType(),
    "double": sql.DoubleType(),
    "decimal": sql.DecimalType(10, 2),
    "bool": sql.BooleanType(),
    "vector": VectorUDT(),
    "array": sql.ArrayType(sql.DoubleType()),
    "matrix": sql.ArrayType(sql.ArrayType(sql.IntegerType())),
    "string": sql.StringType(),
    "char": sql.CharType(3),
    "strings": sql.ArrayType(sql.StringType()),
    "dates": sql.ArrayType(sql.DateType()),
    "timestamp": sql.TimestampType(),
    "date": sql.DateType(),
    "binary": sql.BinaryType(),
    "map": sql.MapType(sql.StringType(), sql.IntegerType()),
    "struct": sql.StructType([sql.StructField("a", sql.IntegerType())]),
    "vectors": sql.ArrayType(VectorUDT()),
}
TENSORS = {  # dtype, depth, and whether it is a vector
    **{"byte": ("int8", 0), "short": ("int16", 0), "int": ("int32", 0), "long": ("int64", 0)},
    **{"float": ("<float>", 0), "double": ("<float>", 0), "decimal": ("<float>", 0)},
    **{"bool": ("bool", 0), "array": ("<float>", 1), "matrix": ("int32", 2)},
    "vector": ("<float>", 1, True),
}
SCHEMA = sql.StructType([sql.StructField(name, kind) for name, kind in _FIELDS.items()])
THE_COLUMNS = f"The DataFrame has: {', '.join(_FIELDS)}."
TEXT = (
    "convert text to numbers first, for example with pyspark.ml.feature.StringIndexer, or cast it "
    "if it holds numbers."
)
NO_TENSOR = (
    "which cannot become a tensor: use numbers, arrays of numbers or pyspark.ml.linalg vectors."
)


CONVERT = 'columns={{"{0}": sparkdl.Convert(function)}}, a function of its Python value.'
TIME = (
    ' Convert it to a number, such as functions.datediff("{0}", start), or '
    f'functions.unix_timestamp("{{0}}") minus a start (float32 has 7 digits), or give {CONVERT}'
)


def mistake(features: Sequence[str], label: Sequence[str] = ()) -> str:
    return message_of(DataError, columns_of, SCHEMA, features, label, "float32")


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("float_dtype", ["float32", "float64"])
def test_columns_that_become_tensors(name: str, float_dtype: str) -> None:
    dtype, *rest = TENSORS[name]
    column = Column(name, dtype.replace("<float>", float_dtype), *rest)
    assert columns_of(SCHEMA, [name], [], float_dtype) == ((column,), ())
    assert columns_of(SCHEMA, [], [name], float_dtype) == ((), (column,))


def test_columns_keep_the_order_they_are_named_in() -> None:
    inputs, labels = columns_of(SCHEMA, ["long", "array"], ["int", "bool"], "float32")
    assert [column.name for column in inputs] == ["long", "array"]
    assert [column.name for column in labels] == ["int", "bool"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("string", f"is of type string: {TEXT}"),
        ("char", f"is of type char(3): {TEXT}"),
        ("strings", f"is of type array<string>: {TEXT}"),
        ("timestamp", f"is of type timestamp, {NO_TENSOR}{TIME}"),
        ("date", f"is of type date, {NO_TENSOR}{TIME}"),
        ("dates", f"is of type array<date>, {NO_TENSOR} Or give {CONVERT}"),
        (
            "binary",
            "is of type binary, which cannot become a tensor by itself: say what it holds, as "
            'columns={"binary": sparkdl.Image()} for encoded images, or with '
            "sparkdl.Convert(function).",
        ),
        (
            "map",
            f"is of type map<string,int>, {NO_TENSOR} Select its values as columns, as "
            f'df["map"]["a key"], or give {CONVERT}',
        ),
        (
            "struct",
            f"is of type struct<a:int>, {NO_TENSOR} Select its fields as columns, as "
            f'df.withColumn("a", df["struct"]["a"]), or give {CONVERT}',
        ),
        ("vectors", "is an array of vectors: use nested arrays, or one vector a row."),
    ],
)
def test_columns_that_cannot(name: str, text: str) -> None:
    text = text.replace("{0}", name).replace("{{", "{").replace("}}", "}")
    assert mistake([name]) == f'feature column "{name}" {text}'
    assert mistake(["int"], [name]) == f'label column "{name}" {text}'


def test_a_column_that_is_missing() -> None:
    """It names the nearest, says how to do without a label, and points out a field of a struct."""
    assert mistake(["vecctor"]) == (
        f'feature column "vecctor" is missing. Did you mean "vector"? {THE_COLUMNS}'
    )
    assert mistake(["int"], ["xyzzy"]) == (
        f'label column "xyzzy" is missing. {THE_COLUMNS} To train without a label, set label=None.'
    )
    assert mistake(["struct.a"]) == (
        'feature column "struct.a" is missing. A field of a struct is not a column: '
        f'df.withColumn("a", df["struct.a"]) makes it one. {THE_COLUMNS}'
    )
    assert message_of(DataError, columns_of, sql.StructType([]), ["x"], [], "float32") == (
        'feature column "x" is missing. The DataFrame has: no columns.'
    )


def test_all_mistakes_are_told_at_once() -> None:
    assert mistake(["int", "string", "doubel"], ["vectors"]).splitlines() == [
        "3 problems:",
        f'  - feature column "string" is of type string: {TEXT}',
        f'  - feature column "doubel" is missing. Did you mean "double"? {THE_COLUMNS}',
        '  - label column "vectors" is an array of vectors: use nested arrays, or one vector a row.',
    ]


@pytest.mark.parametrize(
    ("name", "expected"), [("a", "`a`"), ("a.b", "`a.b`"), ("a`b", "`a``b`"), ("a b", "`a b`")]
)
def test_names_are_quoted_for_spark(name: str, expected: str) -> None:
    assert quoted(name) == expected


def test_whole_numbers_where_floats_were_trained() -> None:
    """Of arrays that are padded by a fraction, and of what a function makes, too."""
    schema = sql.StructType(
        [
            sql.StructField("s", sql.ArrayType(sql.LongType())),
            sql.StructField("text", sql.StringType()),
            sql.StructField("index", sql.LongType()),
        ]
    )
    specs = {"s": Sequence_(padding=-0.5), "text": Convert(json.loads)}
    fields = (
        Field("s", "float32", ()),
        Field("text", "float32", (2,)),
        Field("index", "int64", ()),
    )
    with pytest.raises(DataError, match=r"padding=-0.5 is no value"):
        columns_of(schema, ("s", "text", "index"), (), "float32", specs)
    columns, _ = columns_of(schema, ("s", "text", "index"), (), "float32", specs, fields)
    assert [column.dtype for column in columns] == ["float32", "float32", "int64"]
    made = to_numpy(pa.array(["[1, 2]", "[3, 4]"]), columns[1])
    assert isinstance(made, np.ndarray)
    assert (made.dtype, made.tolist()) == (np.float32, [[1, 2], [3, 4]])
