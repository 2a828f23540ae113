"""Specifications of columns: what they accept, what they say, how they are kept in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as sql

from sparkdl.data.columns.base import (
    Column,
    Convert,
    Image,
    NamedFunction,
    Sequence,
    Spec,
    check_specs,
    specs_from_json,
    specs_to_json,
)
from sparkdl.data.columns.image import STRUCT
from sparkdl.data.ragged import Padding
from sparkdl.data.schema import columns_of, read_schema
from sparkdl.errors import DataError, ParameterError


def count_letters(text: str) -> int:
    return len(text)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Image(size=32), "Image: size=32: give (height, width) in pixels, or None."),  # type: ignore[arg-type]
        (
            lambda: Image(size=(0, 3)),
            "Image: size=(0, 3): give (height, width) in pixels, or None.",
        ),
        (lambda: Image(mode="BGR"), "Image: mode='BGR': use one of L, RGB, RGBA."),
        (
            lambda: Image(scale=float("nan")),
            "Image: scale=nan: give a number other than 0, or None for bytes.",
        ),
        (
            lambda: Sequence(max_length=0),
            "Sequence: max_length=0: give a whole number of at least 1.",
        ),
        (lambda: Sequence(padding="0"), "Sequence: padding='0': give a number."),  # type: ignore[arg-type]
        (lambda: Sequence(lengths=1), "Sequence: lengths=1: give True or False."),  # type: ignore[arg-type]
        (
            lambda: Sequence(pad_to_max=True),
            "Sequence: pad_to_max=True: give max_length, which it pads to.",
        ),
        (
            lambda: Convert("len"),  # type: ignore[arg-type]
            "Convert: function is a str: give a function of one value that returns a number or an "
            "array.",
        ),
    ],
)
def test_a_wrong_value_is_told(make: Callable[[], Spec], text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        make()
    assert str(caught.value) == text


def test_all_mistakes_of_one_specification() -> None:
    with pytest.raises(ParameterError, match="2 problems"):
        Image(size=(1, -1), mode="HSV")


def test_the_rule_of_padding() -> None:
    assert Sequence(padding=-1, lengths=True, max_length=9).rule == Padding(value=-1, lengths=True)
    assert Sequence(max_length=9, pad_to_max=True).rule == Padding(length=9)


def problems(specs: object, weight: str | None = None) -> list[str]:
    return list(check_specs(specs, ["photo", "words"], ["tags"], weight))


def test_specifications_beside_the_other_parameters() -> None:
    assert problems({"photo": Image(), "tags": Sequence(), "words": Convert(len)}) == []
    indexed = check_specs(
        {"x[0]": Convert(len)}, ["x[0]", "x[1]"], []
    )  # as Spark names col("x")[0]
    assert list(indexed) == []
    of_an_rdd = check_specs({"features[0]": Sequence(lengths=True)}, ["features"], ["label"])
    assert list(of_an_rdd) == []
    assert problems([Image()]) == [
        'columns is a list: give a dict of column names, such as {"photo": sparkdl.Image()}.'
    ]
    assert problems({"photo": Image}) == [
        'columns["photo"] is the class Image: give an instance of it.'
    ]
    assert problems({"photo": (32, 32)}) == [
        'columns["photo"] is a tuple: give a sparkdl.Image, sparkdl.Sequence or sparkdl.Convert.'
    ]
    assert problems({"phto": Image()}) == [
        'columns["phto"] is neither a feature nor a label. Did you mean "photo"? Known: photo, '
        "words, tags."
    ]
    assert problems({"tags": Sequence(lengths=True)}) == [
        'columns["tags"] has lengths=True, which is for features: the loss gets none.'
    ]
    assert problems({"w": Convert(float)}, weight="w") == [
        'columns["w"] is the weight, which is a number: leave it out of columns.'
    ]


@settings(deadline=None, max_examples=50)
@given(
    st.one_of(
        st.builds(
            Image,
            size=st.none() | st.tuples(st.integers(1, 999), st.integers(1, 999)),
            mode=st.sampled_from(["L", "RGB", "RGBA"]),
            scale=st.none() | st.floats(0.001, 10),
        ),
        st.builds(
            Sequence,
            max_length=st.integers(1, 99),
            padding=st.integers(-5, 5) | st.floats(-1, 1),
            lengths=st.booleans(),
            pad_to_max=st.booleans(),
        ),
    )
)
def test_json_keeps_a_specification(spec: Spec) -> None:
    assert specs_from_json(json.loads(json.dumps(specs_to_json({"x": spec})))) == {"x": spec}


def test_json_names_a_function_and_imports_nothing() -> None:
    content = json.loads(json.dumps(specs_to_json({"x": Convert(count_letters)})))
    found = specs_from_json(content)["x"]
    assert found == NamedFunction(name=f"{__name__}:count_letters")
    assert isinstance(found, NamedFunction)
    assert found.load() is count_letters
    with pytest.raises(ParameterError, match="cannot be imported"):
        NamedFunction(name="no_such_module:f").load()


@pytest.mark.parametrize("function", [lambda text: 1, "".join, [].append])
def test_a_function_without_a_name_is_no_json(function: Any) -> None:
    with pytest.raises(ParameterError, match='of column "x" cannot be saved by name'):
        specs_to_json({"x": Convert(function)})


def test_json_of_another_version() -> None:
    with pytest.raises(ParameterError, match="is of the kind 'audio'"):
        specs_from_json({"x": {"kind": "audio"}})


# Against a schema

PHOTO = sql.StructType(
    [
        sql.StructField("origin", sql.StringType()),
        sql.StructField("height", sql.IntegerType()),
        sql.StructField("width", sql.IntegerType()),
        sql.StructField("nChannels", sql.IntegerType()),
        sql.StructField("mode", sql.IntegerType()),
        sql.StructField("data", sql.BinaryType()),
    ]
)
SCHEMA = sql.StructType(
    [
        sql.StructField("photo", PHOTO),
        sql.StructField("bytes", sql.BinaryType()),
        sql.StructField("words", sql.ArrayType(sql.LongType())),
        sql.StructField("track", sql.ArrayType(sql.ArrayType(sql.DoubleType()))),
        sql.StructField("text", sql.StringType()),
        sql.StructField("number", sql.IntegerType()),
        sql.StructField("flag", sql.BooleanType()),
    ]
)


def test_the_struct_is_sparks() -> None:
    assert PHOTO.names == list(STRUCT)


def test_columns_with_specifications() -> None:
    image, words, text = Image(scale=None), Sequence(), Convert(count_letters)
    specs: dict[str, Spec] = {"bytes": image, "words": words, "track": words, "text": text}
    features = ["photo", "bytes", "words", "track", "text"]
    inputs, labels = columns_of(SCHEMA, features, ["number"], "float64", specs)
    assert inputs == (
        Column("photo", "float64", 3, spec=Image()),
        Column("bytes", "uint8", 3, spec=image),
        Column("words", "int64", 1, spec=words),
        Column("track", "float64", 2, spec=words),
        Column("text", "float64", spec=text),
    )
    assert labels == (Column("number", "int32"),)
    assert [column.grows for column in inputs] == [True, True, False, False, True]


def test_a_weight_is_a_float() -> None:
    *_, weights = read_schema(SCHEMA, ["number"], (), "number", "float32")
    assert weights == (Column("number", "float32", weight=True),)


@pytest.mark.parametrize(
    ("name", "spec", "text"),
    [
        (
            "words",
            Image(),
            "is of type array<bigint>, which is no image: give encoded bytes (binary), or what "
            'spark.read.format("image") reads.',
        ),
        (
            "number",
            Sequence(),
            "is of type int: a sparkdl.Sequence is an array of numbers.",
        ),
        (
            "words",
            Sequence(padding=0.5),
            "is of type array<bigint>, of which padding=0.5 is no value.",
        ),
    ],
)
def test_a_specification_that_does_not_fit(name: str, spec: Spec, text: str) -> None:
    with pytest.raises(DataError) as caught:
        columns_of(SCHEMA, [name], (), "float32", {name: spec})
    assert str(caught.value) == f'feature column "{name}" {text}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("flag", 'weight column "flag" is of type boolean: a weight is one number.'),
        ("words", 'weight column "words" is of type array<bigint>: a weight is one number.'),
    ],
)
def test_what_is_no_weight(name: str, text: str) -> None:
    with pytest.raises(DataError) as caught:
        read_schema(SCHEMA, ["number"], (), name, "float32")
    assert str(caught.value) == text


def test_a_missing_weight() -> None:
    with pytest.raises(DataError, match='Did you mean "number"'):
        read_schema(SCHEMA, ["number"], (), "numbr", "float32")
