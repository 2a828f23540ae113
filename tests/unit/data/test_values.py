"""Images, sequences, functions and weights: Arrow arrays in, arrays out, mistakes by row."""

from __future__ import annotations

import decimal
import io
import math
import sys
import zlib
from dataclasses import replace
from struct import pack as struct_of
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.ml.linalg import Vectors
from pyspark.sql import types as sql
from pyspark.sql.pandas.types import to_arrow_type

from sparkdl import Convert, Image, Masked, Sequence, Sparse
from sparkdl.data.columns.base import Column, ColumnSpec, suited
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Ragged
from sparkdl.data.row_errors import INSIDE_ARRAYS, SAME_SHAPE, BadRow, RowError

STRUCT = pa.struct(
    [
        ("origin", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("nChannels", pa.int32()),
        ("mode", pa.int32()),
        ("data", pa.binary()),
    ]
)
CV = {1: 0, 3: 16, 4: 24}


def pixels(channels: int, height: int = 5, width: int = 4, seed: int = 0) -> np.ndarray:
    """uint8 (H, W, C), channels in the order R, G, B, A."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (height, width, channels), dtype=np.uint8)


def struct(rgb: np.ndarray, **changes: Any) -> dict[str, Any]:
    """As Spark holds it: B, G, R, A."""
    height, width, channels = rgb.shape
    order = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[channels]
    made = {
        "origin": "file:/x",
        "height": height,
        "width": width,
        "nChannels": channels,
        "mode": CV[channels],
        "data": rgb[:, :, order].tobytes(),
    }
    return {**made, **changes}


def png(rgb: np.ndarray, kind: str = "PNG") -> bytes:
    sink = io.BytesIO()
    PIL.Image.fromarray(rgb[:, :, 0] if rgb.shape[2] == 1 else rgb).save(sink, kind)
    return sink.getvalue()


def images(values: list[Any], spec: Image, dtype: str = "float32", first_row: int = 0) -> Any:
    kind = STRUCT if isinstance(values[-1], dict) else pa.binary()
    column = Column("photo", dtype if spec.scale is not None else "uint8", 3, spec=spec)
    return to_numpy(pa.array(values, kind), column, first_row)


def problem(make: Any) -> BadRow:
    with pytest.raises(RowError) as caught:
        make()
    return caught.value.problem


# Images


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_bytes_and_structs_of_any_mode_are_converted(mode: str, channels: int) -> None:
    pictures = [pixels(channels, seed=i) for i in range(2)]
    plain = [picture[:, :, 0] if channels == 1 else picture for picture in pictures]
    pillows = [PIL.Image.fromarray(picture).convert(mode) for picture in plain]
    expected = [np.asarray(one).reshape(5, 4, -1).transpose(2, 0, 1) for one in pillows]
    for make in (struct, png):
        found = images([make(picture) for picture in pictures], Image(mode=mode, scale=None))
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, np.stack(expected))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scale(dtype: str) -> None:
    picture = pixels(3)
    found = images([png(picture)], Image(scale=1 / 255), dtype)
    assert found.dtype == dtype
    scale = np.dtype(dtype).type(1 / 255)
    np.testing.assert_array_equal(found[0], picture.transpose(2, 0, 1).astype(dtype) * scale)


def test_resizing_is_pillows_bilinear_for_both_kinds() -> None:
    picture = pixels(3, 9, 7)
    expected = np.asarray(PIL.Image.fromarray(picture).resize((6, 8), PIL.Image.BILINEAR))
    for value in (struct(picture), png(picture)):
        found = images([value, value], Image(size=(8, 6), scale=None))
        assert found.shape == (2, 3, 8, 6)
        np.testing.assert_array_equal(found[1], expected.transpose(2, 0, 1))


def test_jpeg_and_a_slice_of_a_column() -> None:
    values = [b"broken", png(pixels(3), "JPEG"), png(pixels(3, seed=1)), None]
    array = pa.array(values, pa.binary()).slice(1, 2)
    assert to_numpy(array, Column("photo", "float32", 3, spec=Image())).shape == (2, 3, 5, 4)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (None, "is null"),
        (
            b"not a picture",
            "is not an image that can be read (13 bytes; UnidentifiedImageError: cannot",
        ),
        (
            png(pixels(3, 50, 50))[:700],
            ("is not an image that can be read (700 bytes; OSError: image"),
        ),
    ],
)
def test_a_damaged_image_names_its_row(bad: bytes | None, text: str) -> None:
    found = problem(lambda: images([png(pixels(3)), bad], Image(), first_row=40))
    assert (found.column, found.row) == ("photo", 41)
    assert found.text.startswith(text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mode": -1, "height": -1}, "is an image that Spark could not read"),
        ({"mode": 21}, "is an image of OpenCV's type 21, which is not one of 0, 16, 24"),
        ({"data": b"123"}, "is an image of 5 x 4 x 3 pixels with 3 bytes of data"),
    ],
)
def test_a_damaged_struct_names_its_row(changes: dict[str, Any], text: str) -> None:
    values = [struct(pixels(3)), struct(pixels(3), **changes)]
    found = problem(lambda: images(values, Image()))
    assert found.row == 1
    assert found.text.startswith(text)


def test_images_of_two_sizes_need_one() -> None:
    values = [png(pixels(3)), png(pixels(3, 6, 4))]
    assert problem(lambda: images(values, Image(), first_row=7)) == BadRow(
        "photo",
        8,
        "is an image of 6 x 4 where row 7 is of 5 x 4",
        'Resize them: columns={"photo": sparkdl.Image(size=(height, width))}.',
    )
    assert images(values, Image(size=(3, 3))).shape == (2, 3, 3, 3)


def test_sixteen_bits_are_not_cut_to_eight() -> None:
    sink = io.BytesIO()
    PIL.Image.fromarray(np.full((4, 4), 1000, np.uint16)).save(sink, "PNG")
    found = problem(lambda: images([sink.getvalue()], Image(mode="L")))
    assert "more than 8 bits" in found.text


@pytest.mark.parametrize(("kind", "channels"), [(2, 3), (4, 2), (6, 4)], ids=["RGB", "LA", "RGBA"])
def test_nor_are_those_of_colours(kind: int, channels: int) -> None:
    """Which Pillow reads, but does not write: a PNG by its chunks."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checked = name + content
        return struct_of(">I", len(content)) + checked + struct_of(">I", zlib.crc32(checked))

    rows = (b"\0" + b"\x12\x34" * channels * 4) * 4
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        [
            chunk(b"IHDR", struct_of(">IIBBBBB", 4, 4, 16, kind, 0, 0, 0)),
            chunk(b"IDAT", zlib.compress(rows)),
            chunk(b"IEND", b""),
        ]
    )
    assert PIL.Image.open(io.BytesIO(data)).size == (4, 4)
    assert "more than 8 bits" in problem(lambda: images([data], Image())).text


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The struct is read without it; encoded bytes say what to install."""
    picture, encoded = pixels(3), png(pixels(3))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    np.testing.assert_array_equal(
        images([struct(picture)], Image(scale=None))[0], picture.transpose(2, 0, 1)
    )
    found = problem(lambda: images([encoded], Image()))
    assert found.text == "is an image that needs Pillow to be read"
    assert 'pip install pillow (the extra "images")' in found.remedy


# Sequences


def sequences(
    values: list[Any], spec: Sequence, depth: int = 1, kind: pa.DataType | None = None
) -> Ragged:
    item = kind or pa.float64()
    whole = item
    for _ in range(depth):
        whole = pa.list_(whole)
    array = pa.array(values, whole)
    column = Column("x", "int64" if pa.types.is_integer(item) else "float32", depth, spec=spec)
    found = to_numpy(array, column, 100)
    assert isinstance(found, Ragged)
    return found


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.integers(-9, 9), max_size=6), min_size=1, max_size=8),
    st.none() | st.integers(1, 6),
)
def test_sequences_keep_their_lengths(rows: list[list[int]], max_length: int | None) -> None:
    found = sequences(rows, Sequence(max_length=max_length), kind=pa.int64())
    assert found.dtype == np.int64
    assert [row.tolist() for row in found] == [row[:max_length] for row in rows]


def nested(levels: int, items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists of lists of any length."""
    return st.lists(nested(levels - 1, items) if levels > 1 else items, max_size=3)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(nested(3, st.integers(0, 9)), min_size=1, max_size=5), st.none() | st.integers(1, 3)
)
def test_lists_of_lists_keep_their_lengths(rows: list[Any], most: int | None) -> None:
    spec = Sequence(Sequence(Sequence(max_length=most)))
    found = sequences(rows, spec, depth=3, kind=pa.int64())
    cut = [[[inner[:most] for inner in middle] for middle in row] for row in rows]
    assert found.dtype == np.int64
    assert found.tolist() == cut
    padded = found.padded()
    assert padded.shape[0] == len(rows)
    assert padded.ndim == 4
    assert int(padded.sum()) == sum(sum(map(sum, middle)) for row in cut for middle in row)
    again = found[np.array([len(rows) - 1, 0])]
    assert again.tolist() == [cut[-1], cut[0]]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([[[1.0]], [[2.0], None]], "holds a null"),
        ([[[1.0]], [[2.0], [math.nan]]], "holds NaN"),
        ([[[1.0]], None], "is null"),
    ],
)
def test_a_mistake_in_lists_of_lists_names_its_row(values: list[Any], text: str) -> None:
    found = problem(lambda: sequences(values, Sequence(Sequence()), 2))
    assert (found.column, found.row, found.text) == ("x", 101, text)


VECTORS = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)


def vectors(rows: list[Any], size: int = 5, dtype: str = "float32") -> Ragged:
    """A row is a mapping of a sparse vector, or a list of a dense one."""
    made = [
        {"type": 0, "size": size, "indices": [*row], "values": [*row.values()]}
        if isinstance(row, dict)
        else row and {"type": 1, "size": None, "indices": None, "values": row}
        for row in rows
    ]
    spec = Sparse(5)
    found = to_numpy(pa.array(made, VECTORS), Column("x", dtype, 1, spec=spec), 100)
    assert isinstance(found, Ragged)
    assert found.padding == spec.rule
    return found


def test_vectors_are_read_as_their_entries() -> None:
    found = vectors([{1: 2.0, 4: 0.0}, {}, [0.0, 0.0, 3.0, 0.0, -1.5], {4: 7.0}])
    assert found.dtype == np.float32
    assert found.tolist() == [[[1, 2.0]], [], [[2, 3.0], [4, -1.5]], [[4, 7.0]]]
    assert vectors([{}, {}]).tolist() == [[], []]


@pytest.mark.parametrize(
    ("rows", "how", "text"),
    [
        ([{}, None], {}, "is null"),
        ([{}, {1: math.inf}], {}, "holds inf"),
        ([{0: 1.0}, [0.0, 0.0, math.nan, 0.0, 0.0]], {}, "holds NaN"),
        ([[0.0] * 5, {1: 1.0}], {"size": 6}, "has 6 values, not 5"),
    ],
)
def test_a_mistake_in_a_vector_names_its_row(rows: Any, how: Any, text: str) -> None:
    found = problem(lambda: vectors(rows, **how))
    assert (found.column, found.row, found.text) == ("x", 101, text)


WIDE = {"type": 0, "size": 1 << 14, "indices": [3], "values": [1.0]}
DENSE = {"type": 1, "size": None, "indices": None, "values": [1.0] * (1 << 14)}
ONE, MINUS = Sequence(), Sequence(padding=-1)
TWO, THREE = Sequence(ONE), Sequence(Sequence(ONE))


def of_depth(depth: int, spec: ColumnSpec | None = None, label: bool = False) -> Column:
    return Column("x", "float32", depth, spec=spec, label=label, adapts=True)


@pytest.mark.parametrize(
    ("column", "values", "wanted"),
    [
        (of_depth(2, ONE), [[[1.0, 2.0]], [[3.0, 4.0]]], None),
        (of_depth(2, ONE), [[], []], None),
        (of_depth(2, ONE), [[[1.0]], [[3.0, 4.0]]], TWO),
        (of_depth(2, ONE), [[[], []]], TWO),
        (of_depth(2, TWO), [[[1.0]], [[3.0, 4.0]]], None),
        (of_depth(2), [[[1.0]], [[3.0, 4.0]]], None),
        (of_depth(3, ONE), [[[[1.0], [2.0]], [[2.0]]]], TWO),
        (of_depth(3, ONE), [[[[1.0], [2.0, 3.0]]]], THREE),
        (of_depth(3, TWO), [[[[1.0], [2.0, 3.0]]]], THREE),
        (of_depth(2, MINUS), [[[1.0], []]], Sequence(MINUS, padding=-1)),
        (of_depth(0, label=True), [1.0, None], Masked()),
        (of_depth(0, label=True), [1.0, math.nan], Masked()),
        (of_depth(0, label=True), [1.0, math.inf], None),
        (of_depth(1, label=True), [[1.0, math.nan]], Masked()),
        (of_depth(1, label=True), [[1.0, None]], Masked()),
        (of_depth(1, label=True), [[1.0], None], None),
        (of_depth(0), [1.0, None], None),
        (Column("x", "bool", label=True, adapts=True), [True, None], None),
        (Column("x", "int64", label=True, adapts=True), [1, None], Masked()),
        (of_depth(1), [WIDE, DENSE], Sparse(1 << 14)),
        (of_depth(1), [DENSE], None),
        (of_depth(1), [{**WIDE, "size": (1 << 14) - 1}], None),
        (of_depth(1), [{**WIDE, "size": (1 << 24) + 1}], None),
        (of_depth(1, label=True), [WIDE], None),
    ],
)  # fmt: skip
def test_values_ask_for_another_specification(
    column: Column, values: list[Any], wanted: ColumnSpec | None
) -> None:
    if isinstance(values[0], dict):
        column, array = replace(column, vector=True), pa.array(values, VECTORS)
    else:
        kind: pa.DataType = {"float32": pa.float64(), "bool": pa.bool_(), "int64": pa.int64()}[
            column.dtype
        ]
        for _ in range(column.depth):
            kind = pa.list_(kind)
        array = pa.array(values, kind)
    found = suited(column, array)
    assert (None if found is None else found.spec) == wanted
    assert suited(replace(column, adapts=False), array) is None
    if found is not None:
        assert len(to_numpy(array, found)) == len(values)
        assert suited(found, array) is None


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (Vectors.sparse(5, {1: 2.0, 4: 0.0}), [[1, 2.0]]),
        (Vectors.sparse(5, {}), []),
        (Vectors.dense([0, 0, 1, 0, 2]), [[2, 1.0], [4, 2.0]]),
        ([0, 0, 1, 0, 2], [[2, 1.0], [4, 2.0]]),
        (Vectors.sparse(4, {}), "is of 4 values, not a vector of 5 values"),
        ([[1.0] * 5], "is of shape [1, 5], not a vector of 5 values"),
        (Vectors.sparse(5, {1: math.nan}), "holds NaN"),
    ],
    ids=str,
)
def test_vectors_in_records(value: Any, wanted: Any) -> None:
    if isinstance(wanted, str):
        found = problem(lambda: Sparse(5).from_record(value, "x", 3, "float32"))
        assert (found.row, found.text) == (3, wanted)
        return
    entries = Sparse(5).from_record(value, "x", 3, "float32")
    assert (entries.dtype, entries.shape[1], entries.tolist()) == (np.float32, 2, wanted)


def test_arrays_are_read_as_vectors_are() -> None:
    column = Sparse(3).resolve("x", sql.ArrayType(sql.IntegerType()), "float64", None)
    assert isinstance(column, Column)
    found = to_numpy(pa.array([[0, 7, 0], [1, 0, 2]], pa.list_(pa.int32())), column)
    assert isinstance(found, Ragged)
    assert (found.dtype, found.tolist()) == (np.float64, [[[1, 7.0]], [[0, 1.0], [2, 2.0]]])
    assert len(to_numpy(pa.array([], pa.list_(pa.int32())), column)) == 0
    wrong = problem(lambda: to_numpy(pa.array([[0, 7]], pa.list_(pa.int32())), column, 4))
    assert (wrong.row, wrong.text) == (4, "has 2 values, not 3")


def test_sequences_of_vectors() -> None:
    rows = [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]], [[7.0, 8.0]] * 5]
    found = sequences(rows, Sequence(max_length=3), depth=2)
    assert found.values.shape == (6, 2)
    assert [row.tolist() for row in found] == [row[:3] for row in rows]


@pytest.mark.parametrize(
    ("values", "depth", "row", "text"),
    [
        ([[1.0], None], 1, 1, "is null"),
        ([[[1.0], [2.0]], [[]]], 2, 1, "has an item of 0 values where the first item has 1"),
        ([[1.0, 2.0], [3.0, 4.0, None]], 1, 1, "holds a null"),
        ([[1.0, 2.0, 3.0], [1.0], [2.0, float("nan")]], 1, 2, "holds NaN"),
        ([[[1.0]], [[1.0], None]], 2, 1, "holds a null"),
        ([[[1.0]], [[1.0], [None]]], 2, 1, "holds a null"),
        ([[[1.0]], [[1.0]], [[1.0], [float("nan")]]], 2, 2, "holds NaN"),
        (
            [[[1.0], [2.0]], [[1.0], [2.0, 3.0]]],
            2,
            1,
            "has an item of 2 values where the first item has 1",
        ),
    ],
)
def test_a_mistake_in_a_sequence_names_its_row(
    values: list[Any], depth: int, row: int, text: str
) -> None:
    found = problem(lambda: sequences(values, Sequence(), depth))
    assert (found.column, found.row, found.text) == ("x", 100 + row, text)
    if text.startswith("holds"):
        assert found.remedy == INSIDE_ARRAYS


# Functions


def converted(values: list[Any], function: Any, kind: pa.DataType | None = None) -> Any:
    return to_numpy(pa.array(values, kind), Column("x", "float32", spec=Convert(function)), 10)


MISSING = {
    "double": sql.DoubleType(),
    "int": sql.IntegerType(),
    "boolean": sql.BooleanType(),
    "array<double>": sql.ArrayType(sql.DoubleType()),
    "array<decimal>": sql.ArrayType(sql.DecimalType(5, 1)),
}


@pytest.mark.parametrize(
    ("kind", "values", "dtype", "wanted"),
    [
        ("double", [1.5, None, math.nan], "float32", [1.5, math.nan, math.nan]),
        ("int", [3, None], "int32", [3, -100]),
        ("int", [3, None], "float64", [3.0, math.nan]),
        ("boolean", [True, None, False], "float32", [1.0, math.nan, 0.0]),
        (
            "array<double>",
            [[1.0, None], [math.nan, 2.0]],
            "float64",
            [[1, math.nan], [math.nan, 2]],
        ),
        ("array<decimal>", [[decimal.Decimal(1), None]], "float32", [[1.0, math.nan]]),
        ("double", [1.0, math.inf], "float32", "is inf"),
        ("array<double>", [[1.0, 2.0], [1.0, -math.inf]], "float32", "holds inf"),
        ("array<double>", [[1.0], None], "float32", "is null"),
        ("array<double>", [[1.0], [1.0, 2.0]], "float32", "has 2 values where row 7 has 1"),
    ],
    ids=str,
)
def test_labels_that_are_missing(kind: str, values: Any, dtype: str, wanted: Any) -> None:
    trained = Field("y", dtype, ())
    column = Masked().resolve("y", MISSING[kind], dtype.replace("int", "float"), trained)
    assert isinstance(column, Column)
    array = pa.array(values, to_arrow_type(MISSING[kind]))
    if isinstance(wanted, str):
        with pytest.raises(RowError, match=wanted) as caught:
            to_numpy(array, column, 7)
        assert caught.value.problem.row == 8
    else:
        found = to_numpy(array, column, 7)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, math.nan),
        ([1.0, None], [1.0, math.nan]),
        (np.array([math.nan, 2.0]), [math.nan, 2.0]),
        (torch.tensor([1.0, math.nan]), [1.0, math.nan]),
        ([3, -100], [3, -100]),
    ],
    ids=str,
)
def test_labels_that_are_missing_in_records(value: Any, wanted: Any) -> None:
    found = Masked().from_record(value, "label", 0, "float32")
    assert found.dtype.name in ("float32", "int64")
    np.testing.assert_array_equal(found, wanted)


def test_a_function_of_each_value() -> None:
    lengths = converted(["a", "bcd"], len)
    assert (lengths.dtype, lengths.tolist()) == (np.dtype("int64"), [1, 3])
    letters = converted(["ab", "cd"], lambda text: [ord(c) / 2 for c in text])
    assert letters.dtype == np.float32
    assert letters.tolist() == [[48.5, 49.0], [49.5, 50.0]]
    nulls = converted([None, "x"], lambda value: value is None)
    assert nulls.tolist() == [True, False]
    structs = converted([{"a": 1, "b": [2]}], lambda value: [value["a"], *value["b"]])
    assert structs.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("function", "row", "text"),
    [
        (lambda t: {"a": 1}[t], 11, "the function of this column raised KeyError: 'b'"),
        (lambda t: 1 if t == "a" else None, 11, "is None, not a number or an array of numbers"),
        (lambda t: 1 if t == "a" else t, 11, "is a str, not a number or an array of numbers"),
        (lambda t: [1.0, float("nan")], 10, "holds NaN"),
        (lambda t: np.ma.masked_equal([1, 2], 1), 10, "holds a masked value"),
        (lambda t: [1] * (1 + (t == "b")), 11, "became int64[2] where row 10 became int64[1]"),
    ],
)
def test_a_function_that_fails_names_the_row(function: Any, row: int, text: str) -> None:
    found = problem(lambda: converted(["a", "b"], function))
    assert (found.column, found.row, found.text) == ("x", row, text)
    assert (found.remedy == SAME_SHAPE) == ("became" in text)


# Weights


def test_weights() -> None:
    column = Column("w", "float32", weight=True)
    found = to_numpy(pa.array([0, 1, 2], pa.int32()), column)
    assert (found.dtype, found.tolist()) == (np.dtype("float32"), [0, 1, 2])  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan"), None])
def test_what_is_no_weight(bad: float | None) -> None:
    array = pa.array([1.0, 2.0, bad])
    found = problem(lambda: to_numpy(array, Column("w", "float32", weight=True), 5))
    assert (found.column, found.row) == ("w", 7)
