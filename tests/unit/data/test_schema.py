"""Columns to tensors: which types are taken, and which row is to blame when a value is not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import message_of
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as sql

from sparkdl import Convert, Sequence
from sparkdl.data.columns.base import Column
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field
from sparkdl.data.row_errors import BadRow, RowError
from sparkdl.data.schema import columns_of, quoted
from sparkdl.errors import DataError

quick = settings(deadline=None, max_examples=50)

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


@quick
@given(
    st.sampled_from([(pa.float64(), "float32"), (pa.int64(), "int64"), (pa.bool_(), "bool")]),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_arrays_of_any_depth(
    kind: tuple[pa.DataType, str], shape: list[int], before: int, after: int
) -> None:
    """What Arrow hands over is often a window of a larger array."""
    (item, dtype), rows, depth = kind, shape[0], len(shape) - 1
    total = (before + rows + after, *shape[1:])
    whole = (np.arange(np.prod(total)).reshape(total) % 7).astype(dtype)
    array = pa.array(whole.tolist(), lists(depth, item)).slice(before, rows)
    found = to_numpy(array, Column("x", dtype, depth))
    assert found.dtype == dtype
    assert found.flags.c_contiguous
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
    values: list[Any], depth: int, row: int, text: str, remedy: str
) -> None:
    array = pa.array(values, lists(depth))
    expected = BadRow("x", 1000 + row, text.format(1000), remedy)
    assert problem_of(array, Column("x", "float32", depth), 1000) == expected


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
    rows: list[Any], row: int, text: str, remedy: str | None
) -> None:
    expected = BadRow("x", 1000 + row, text.format(1000), remedy or SAME_SHAPE)
    assert problem_of(pa.array(rows, VECTOR), VECTOR_COLUMN, 1000) == expected


def test_a_mistake_in_a_slice_is_counted_from_the_slice() -> None:
    array = pa.array([[1.0], [2.0], [3.0], [None]], lists(1)).slice(2)
    assert problem_of(array, Column("x", "float64", 1), 100).row == 101


@pytest.mark.parametrize(
    ("array", "column", "text", "limit"),
    [
        (pa.array([1.0, float("inf")]), Column("x", "float32"), "is inf", "3.4e+38"),
        (pa.array([1.0, 1e39]), Column("x", "float32"), "is inf", "3.4e+38"),
        (pa.array([1.0, -float("inf")]), Column("x", "float64"), "is inf", "1.8e+308"),
        (pa.array([[1.0], [1e39]]), Column("x", "float32", 1), "holds inf", "3.4e+38"),
        (pa.array([dense(1), dense(1e39)], VECTOR), VECTOR_COLUMN, "holds inf", "3.4e+38"),
    ],
    ids=["infinite", "too large", "-infinite", "in an array", "in a vector"],
)
@pytest.mark.filterwarnings("error")
def test_infinite_or_too_large_for_the_models_floats(
    array: pa.Array, column: Column, text: str, limit: str
) -> None:
    remedy = (
        f"It is infinite, or beyond the {limit} of {column.dtype}: filter out such rows, or scale "
        "the numbers."
    )
    assert problem_of(array, column) == BadRow("x", 1, text, remedy)


def test_the_message_of_a_problem() -> None:
    problem = BadRow("x", 7, "is null", "Drop it.")
    assert problem.message("partition 2") == 'column "x", row 7 of partition 2: is null. Drop it.'
    assert problem.message("it", "field") == 'field "x", row 7 of it: is null. Drop it.'


# Schemas

TENSORS: dict[str, tuple[Any, ...]] = {  # type, dtype, depth, and whether it is a vector
    "byte": (sql.ByteType(), "int8", 0),
    "short": (sql.ShortType(), "int16", 0),
    "int": (sql.IntegerType(), "int32", 0),
    "long": (sql.LongType(), "int64", 0),
    "float": (sql.FloatType(), "<float>", 0),
    "double": (sql.DoubleType(), "<float>", 0),
    "decimal": (sql.DecimalType(10, 2), "<float>", 0),
    "bool": (sql.BooleanType(), "bool", 0),
    "vector": (VectorUDT(), "<float>", 1, True),
    "array": (sql.ArrayType(sql.DoubleType()), "<float>", 1),
    "matrix": (sql.ArrayType(sql.ArrayType(sql.IntegerType())), "int32", 2),
}
OTHERS: dict[str, sql.DataType] = {
    "char": sql.CharType(3),
    "dates": sql.ArrayType(sql.DateType()),
    "struct": sql.StructType([sql.StructField("a", sql.IntegerType())]),
    "vectors": sql.ArrayType(VectorUDT()),
}
TYPES = {**{name: kind for name, (kind, *_) in TENSORS.items()}, **OTHERS}
SCHEMA = sql.StructType([sql.StructField(name, kind) for name, kind in TYPES.items()])
THE_COLUMNS = f"The DataFrame has: {', '.join(TYPES)}."
TEXT = (
    "is of type char(3): tokenize text with columns={...: sparkdl.Text(tokenizer)}, number "
    "categories with pyspark.ml.feature.StringIndexer, or cast it if it holds numbers."
)
DATES = (
    "is of type array<date>, which cannot become a tensor: use numbers, arrays of numbers or "
    "pyspark.ml.linalg vectors. Take a number of it in Spark, such as a field or the days since a "
    'start (functions.datediff), or give columns={"dates": sparkdl.Convert(function)}, a function of '
    "its Python value."
)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("float_dtype", ["float32", "float64"])
def test_columns_that_become_tensors(name: str, float_dtype: str) -> None:
    _, dtype, *rest = TENSORS[name]
    column = Column(name, dtype.replace("<float>", float_dtype), *rest)
    assert columns_of(SCHEMA, [name], [], float_dtype) == ((column,), ())
    assert columns_of(SCHEMA, [], [name], float_dtype) == ((), (column,))


def test_all_mistakes_are_told_at_once() -> None:
    """More of the messages are rows of tests/spark/bad_data.py."""
    features = ["int", "char", "doubel", "struct.a"]
    message = message_of(
        DataError, columns_of, SCHEMA, features, ["vectors", "dates", "xyzzy"], "float32"
    )
    assert message.splitlines() == [
        "6 problems:",
        f'  - feature column "char" {TEXT}',
        f'  - feature column "doubel" is missing. Did you mean "double"? {THE_COLUMNS}',
        '  - feature column "struct.a" is missing. A field of a struct is not a column: '
        f'df.withColumn("a", df["struct.a"]) makes it one. {THE_COLUMNS}',
        '  - label column "vectors" is an array of vectors: use nested arrays, or one vector a row.',
        f'  - label column "dates" {DATES}',
        f'  - label column "xyzzy" is missing. {THE_COLUMNS} To train without a label, set '
        "label=None.",
    ]


def test_names_are_quoted_for_spark() -> None:
    assert [quoted(name) for name in ("a.b", "a`b", "a b")] == ["`a.b`", "`a``b`", "`a b`"]


def test_whole_numbers_where_floats_were_trained() -> None:
    """Of arrays that are padded by a fraction, and of what a function makes, too."""
    schema = sql.StructType(
        [
            sql.StructField("s", sql.ArrayType(sql.LongType())),
            sql.StructField("text", sql.StringType()),
            sql.StructField("index", sql.LongType()),
        ]
    )
    specs = {"s": Sequence(padding=-0.5), "text": Convert(json.loads)}
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
