"""Specifications of columns: what they accept, what they say, how they are kept in a file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hex_column import Hex
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import message_of
from pyspark.sql import types as sql
from trained import trained_model

import sparkdl
from sparkdl import Convert, Image, Masked, Sequence, Sparse, Text
from sparkdl.data.columns.base import (
    Column,
    ColumnSpec,
    NamedFunction,
    specs_from_json,
    specs_to_json,
)
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field
from sparkdl.data.partition_reader import open_partition
from sparkdl.data.ragged import Padding
from sparkdl.data.records import WriteRecords
from sparkdl.data.row_errors import RowError
from sparkdl.data.schema import check_specs, columns_of, sample_columns
from sparkdl.errors import DataError, ParameterError
from sparkdl.slab.root import SlabConfig


def count_letters(text: str) -> int:
    return len(text)


SIZE = "give (height, width) in pixels, or None."
SCALE = "give a number other than 0, or None for bytes."
TO_MAX = "give max_length, which it pads to."
WHOLE = "give a whole number of at least 1"
TOKENIZER = "give a tokenizer of transformers or tokenizers, or a function of a list of texts."
FUNCTION = "give a function of one value that returns a number or an array."


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (Image, {"size": 32}, f"Image: size=32: {SIZE}"),
        (Image, {"size": (0, 3)}, f"Image: size=(0, 3): {SIZE}"),
        (Image, {"mode": "BGR"}, "Image: mode='BGR': use one of L, RGB, RGBA."),
        (Image, {"scale": float("nan")}, f"Image: scale=nan: {SCALE}"),
        (Sequence, {"max_length": 0}, f"Sequence: max_length=0: {WHOLE}."),
        (Sequence, {"padding": "0"}, "Sequence: padding='0': give a number."),
        (Sequence, {"lengths": 1}, "Sequence: lengths=1: give True or False."),
        (Sequence, {"pad_to_max": True}, f"Sequence: pad_to_max=True: {TO_MAX}"),
        (Sequence, {"padding_side": 1}, 'Sequence: padding_side=1: give "left" or "right".'),
        (Sequence, {"items": 3}, "Sequence: items=3: give a sparkdl.Sequence, or None."),
        (
            Sequence,
            {"items": Sequence(mask=True)},
            f"Sequence: items={Sequence(mask=True)}: lengths and mask are of whole rows: give them to "
            "the outer Sequence.",
        ),
        (Sequence, {"items": Sequence(padding=1)}, "Sequence: padding=0: give items the same."),
        (Sparse, {"size": 0}, "Sparse: size=0: give the number of values of each vector."),
        (
            Sparse,
            {"size": 9, "form": "csr"},
            "Sparse: form='csr': use one of dense, tensor, indices.",
        ),
        (Convert, {"function": "len"}, f"Convert: function='len': {FUNCTION}"),
        (Text, {"tokenizer": "bert"}, f"Text: tokenizer='bert': {TOKENIZER}"),
        (Text, {"tokenizer": len, "max_length": 0}, f"Text: max_length=0: {WHOLE}."),
        (
            Text,
            {"tokenizer": len, "padding": 0.5},
            "Text: padding=0.5: give a whole number, or None.",
        ),
        (Text, {"tokenizer": len, "pad_to_max": True}, f"Text: pad_to_max=True: {TO_MAX}"),
        (
            Text,
            {"tokenizer": len, "stride": 2},
            "2 problems:\n  - Text: stride=2: give max_length, into windows of which it divides rows, "
            "without pad_to_max.\n  - Text: tokenizer=<built-in function len>: give a fast one, which "
            "stride needs.",
        ),
        (
            Text,
            {"tokenizer": len, "stride": 2, "max_length": 9},
            "Text: tokenizer=<built-in function len>: give a fast one, which stride needs.",
        ),
    ],
)
def test_a_wrong_value_is_told(kind: type[ColumnSpec], given: dict[str, Any], text: str) -> None:
    assert message_of(ParameterError, kind, **given) == text


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
    as_spark_names_col_x_0 = check_specs({"x[0]": Convert(len)}, ["x[0]", "x[1]"], [])
    of_an_rdd = check_specs({"features[0]": Sequence(lengths=True)}, ["features"], ["label"])
    assert [*as_spark_names_col_x_0, *of_an_rdd] == []


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ([], 'columns is a list: give a dict of column names, such as {"photo": sparkdl.Image()}.'),
        ({"photo": Image}, 'columns["photo"] is the class Image: give an instance of it.'),
        (
            {"photo": (32, 32)},
            'columns["photo"] is a tuple: give a sparkdl.Convert, sparkdl.Image, sparkdl.Masked, '
            "sparkdl.Sequence, sparkdl.Sparse or sparkdl.Text.",
        ),
        (
            {"phto": Image()},
            'columns["phto"] is neither a feature nor a label. Did you mean "photo"? Known: photo, '
            "words, tags.",
        ),
        (
            {"tags": Sequence(lengths=True)},
            'columns["tags"] has lengths=True, which is for features only: the loss gets no '
            "lengths.",
        ),
        (
            {"photo": Masked()},
            'columns["photo"] is a sparkdl.Masked, which is for labels: a model gets no missing '
            "value. Fill the column with df.fillna, or with pyspark.ml.feature.Imputer.",
        ),
        (
            {"w": Convert(float)},
            'columns["w"] is the weight, which is always a number: leave it out of columns.',
        ),
    ],
)
def test_specifications_that_do_not_go_with_the_others(specs: object, text: str) -> None:
    assert problems(specs, weight="w") == [text]


@settings(deadline=None, max_examples=50)
@given(
    st.one_of(
        st.just(Masked()),
        st.just(Sequence(Sequence(max_length=3), mask=True)),
        st.builds(Sparse, st.integers(1, 99), st.sampled_from(["dense", "tensor", "indices"])),
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
            mask=st.booleans(),
            pad_to_max=st.booleans(),
        ),
    )
)
def test_json_keeps_a_specification(spec: ColumnSpec) -> None:
    assert specs_from_json(json.loads(json.dumps(specs_to_json({"x": spec})))) == {"x": spec}


def test_the_json_of_saved_models() -> None:
    written = {
        "photo": {"kind": "image", "size": [4, 3], "mode": "L", "scale": None},
        "words": {
            "kind": "sequence",
            "items": None,
            "max_length": 7,
            "padding": -1,
            "lengths": True,
            "mask": False,
            "pad_to_max": False,
            "padding_side": "left",
        },
        "text": {"kind": "convert", "function": f"{__name__}:count_letters"},
    }
    specs = {
        "photo": Image(size=(4, 3), mode="L", scale=None),
        "words": Sequence(max_length=7, padding=-1, lengths=True, padding_side="left"),
        "text": Convert(count_letters),
    }
    assert json.loads(json.dumps(specs_to_json(specs))) == written
    assert specs_from_json(written) == {
        **specs,
        "text": NamedFunction(name=f"{__name__}:count_letters", make=Convert),
    }


def test_a_function_is_loaded_by_its_name() -> None:
    named = NamedFunction(name=f"{__name__}:count_letters", make=Convert)
    assert named.load() == Convert(count_letters)
    assert NamedFunction(name=named.name).load() is count_letters
    with pytest.raises(ParameterError, match=r"\(it is a str, not a function\)"):
        NamedFunction(name="string:digits").load()
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


def test_columns_with_specifications() -> None:
    image, words, text = Image(scale=None), Sequence(), Convert(count_letters)
    specs: dict[str, ColumnSpec] = {"bytes": image, "words": words, "track": words, "text": text}
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


def test_a_weight_is_one_number() -> None:
    *_, weight = sample_columns(SCHEMA, ["number"], (), "number", "float32")
    assert weight == Column("number", "float32", weight=True)
    for name, kind in (
        ("flag", "boolean"),
        ("text", "string"),
        ("bytes", "binary"),
        ("ts", "date"),
    ):
        schema = sql.StructType([*SCHEMA.fields, sql.StructField("ts", sql.DateType())])
        told = message_of(DataError, sample_columns, schema, ["number"], (), name, "float32")
        assert told == (  # without columns=, which a weight has not
            f'weight column "{name}" is of type {kind}: a weight is one number. Cast the column, or '
            "compute a number in Spark."
        )


# A column type that nothing but its own class knows


def test_a_new_type_in_a_schema() -> None:
    assert problems({"words": Hex(), "tags": Hex()}) == []
    trainer = sparkdl.Trainer(
        model=torch.nn.Identity(), loss=torch.nn.MSELoss(), optimizer=torch.optim.SGD, batch_size=2,
        features={"x": "text"}, columns={"text": Hex()}, stop=sparkdl.max_epoch(1),
    )  # fmt: skip
    assert trainer.signature.inputs == ("x",)
    columns, _ = columns_of(SCHEMA, ["text"], (), "float32", {"text": Hex()})
    assert columns == (Column("text", "uint8", 1, spec=Hex()),)
    assert not columns[0].grows
    with pytest.raises(DataError, match='"number" is of type int: a Hex is text'):
        columns_of(SCHEMA, ["number"], (), "float32", {"number": Hex()})
    found = to_numpy(pa.array(["00ff", "0102"]), columns[0], 10)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [[0, 255], [1, 2]]
    with pytest.raises(RowError) as caught:
        to_numpy(pa.array(["00ff", "00fg"]), columns[0], 10)
    assert (caught.value.problem.row, str(caught.value)) == (11, "is '00fg', not 4 digits")


def test_a_new_type_in_records(slab: SlabConfig) -> None:
    task = WriteRecords(slab, True, "float32", {"features": Hex()})
    handle = pickle.loads(next(task(0, [("00ff", 1.0), ("0102", 2.0)])))
    assert handle.fields == (Field("features", "uint8", (2,)), Field("label", "float32", ()))
    bytes_, labels = open_partition(handle).gather(np.arange(2))
    found = sorted(zip(labels.tolist(), bytes_.tolist(), strict=True))
    assert found == [(1.0, [0, 255]), (2.0, [1, 2])]
    wrong = pickle.loads(next(task(0, [("00ff", 1.0), ("0", 2.0)])))
    assert (wrong.problem.row, wrong.problem.text) == (1, "is '0', not 4 digits")


def test_a_new_type_in_a_saved_model(tmp_path: Path) -> None:
    columns = {"text": Hex(digits=6)}
    fields = (Field("text", "uint8", (3,)),)
    linear = torch.nn.Linear(3, 1)
    trained = trained_model(linear, features=("text",), fields=fields, columns=columns)
    folder = trained.save(tmp_path / "model")
    saved = json.loads((folder / "model.json").read_text())["columns"]
    assert saved == {"text": {"kind": "hex", "digits": 6}}
    assert sparkdl.load(folder, model=torch.nn.Linear(3, 1)).columns == columns
