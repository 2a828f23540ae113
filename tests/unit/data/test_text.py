"""Text columns: numbers of tokens as the tokenizer itself gives them, with their padding and mask."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lazily import Lazily
from pyspark.sql import types as sql

from sparkdl import Sequence, Text
from sparkdl.data.arrow_tasks import of_structs
from sparkdl.data.columns.base import ColumnSpec, NamedFunction, specs_from_json, specs_to_json
from sparkdl.data.ragged import Padding, Ragged
from sparkdl.data.row_errors import RowError
from sparkdl.data.schema import check_specs, columns_of

tokenizers = pytest.importorskip("tokenizers")
transformers = Lazily("transformers")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEXTS = ["good film", "a very good film , a film to see", "bad", "unheard of"]


def word_tokenizer() -> Any:
    """A tokenizer of words between [CLS] and [SEP]."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=SPECIAL)
    made.train_from_iterator(TEXTS[:3], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def fast_tokenizer(**given: Any) -> Any:
    """The same as a fast tokenizer of transformers, whose padding is number 1."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(), pad_token="[UNK]", **given
    )


def letters(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


def converted(spec: ColumnSpec, texts: list[str | None], first_row: int = 0) -> Ragged:
    column = spec.resolve("review", sql.StringType(), "float32", None)
    assert not isinstance(column, str)
    rows = spec.convert(pa.array(texts, pa.string()), column, first_row)
    assert isinstance(rows, Ragged)
    assert rows.dtype == np.int32
    return rows


@pytest.mark.parametrize("length", [None, 5])
@pytest.mark.parametrize("side", ["left", "right"])
def test_numbers_are_those_of_the_tokenizer(length: int | None, side: str) -> None:
    own = fast_tokenizer(truncation_side=side, padding_side=side)
    cut = {} if length is None else {"truncation": True, "max_length": length}
    expected = own(TEXTS, **cut)["input_ids"]
    spec = Text(own, max_length=length)
    saved = specs_from_json(specs_to_json({"review": spec}))["review"]
    for one in (spec, pickle.loads(pickle.dumps(spec)), saved):
        assert isinstance(one, Text)
        assert [row.tolist() for row in converted(one, TEXTS)] == expected
        assert one.rule == Padding(value=1, mask=True, side=side)
        numbers, mask = converted(one, TEXTS).inputs()
        both = own(TEXTS, padding=True, **cut)
        assert numbers.tolist() == both["input_ids"]
        assert mask.tolist() == both["attention_mask"]


def test_what_travels_is_the_tokenizer_without_its_library() -> None:
    assert b"transformers" not in pickle.dumps(Text(fast_tokenizer()))


def test_a_tokenizer_that_is_given_stays_as_it_is() -> None:
    own = word_tokenizer()
    own.enable_padding(pad_id=7, direction="left")
    spec = Text(own, max_length=4)
    assert (spec.rule.value, spec.rule.side) == (7, "left")
    assert [len(row) for row in converted(spec, TEXTS)] == [4, 4, 3, 4]
    assert own.padding["pad_id"] == 7
    assert own.truncation is None


def test_a_function_is_a_tokenizer() -> None:
    spec = Text(letters, max_length=3, padding=-100)
    assert [row.tolist() for row in converted(spec, ["ab", "abcd"])] == [[97, 98], [97, 98, 99]]
    found = specs_from_json(specs_to_json({"x": spec}))["x"]
    assert isinstance(found, NamedFunction)
    assert found.load() == spec
    assert spec.from_record("b", "features", 0, "float32").tolist() == [98]


def test_the_inputs_of_a_model() -> None:
    padded, lengths, mask = converted(Text(letters, lengths=True), ["ab", "c"]).inputs()
    assert padded.tolist() == [[97, 98], [99, 0]]
    assert lengths.tolist() == [2, 1]
    assert mask.tolist() == [[1, 1], [1, 0]]
    longer = converted(Text(letters, max_length=3, pad_to_max=True), ["ab", "cdef"]).inputs()
    assert longer[1].tolist() == [[1, 1, 0], [1, 1, 1]]
    left = Text(letters, max_length=3, pad_to_max=True, padding_side="left")
    numbers, mask = converted(left, ["ab", "cdef"]).inputs()
    assert numbers.tolist() == [[0, 97, 98], [99, 100, 101]]
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]]


PAIRS = [("good film", "bad"), ("bad", "a very good film , a film to see"), ("a", "a")]


def inputs_of_pairs(spec: Text, pairs: list[tuple[str, str]] = PAIRS) -> list[np.ndarray]:
    schema = sql.StructType().add("review", "string").add("other", "string")
    columns, _ = columns_of(schema, ["review"], (), "float32", {"review": spec})
    assert columns[0].names == ("review", "other")
    texts = [pa.array([pair[i] for pair in pairs]) for i in range(2)]
    (array,) = of_structs(texts, columns)
    rows = spec.convert(array, columns[0], 0)
    assert [row.tolist() for row in rows] == [
        spec.from_record(list(pair), "features", 0, "float32").tolist() for pair in pairs
    ]
    return rows.inputs()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "divided", [{}, {"max_length": 7}, {"max_length": 7, "stride": 1}], ids=str
)
def test_pairs_and_windows_are_those_of_the_tokenizer(side: str, divided: dict[str, Any]) -> None:
    own = fast_tokenizer(padding_side=side)
    spec = Text(own, text_pair="other", **divided)
    saved = specs_from_json(specs_to_json({"review": spec}))["review"]
    for one in (spec, pickle.loads(pickle.dumps(spec)), saved):
        assert isinstance(one, Text)
        found = inputs_of_pairs(one)
        for number, pair in enumerate(PAIRS):
            how = {"truncation": bool(divided)}
            if "stride" in divided:
                how = {"truncation": "only_second", "return_overflowing_tokens": True}
            told = own([pair[0]], [pair[1]], return_token_type_ids=True, **how, **divided)
            ids, mask, types = (x[number].reshape(-1, x.shape[-1]) for x in found)
            for window, numbers in enumerate(told["input_ids"]):
                there = mask[window].astype(bool)
                assert ids[window][there].tolist() == numbers
                assert types[window][there].tolist() == told["token_type_ids"][window]
                assert not types[window][~there].any()
                assert there[-1 if side == "left" else 0]
            assert mask.any(1).sum() == len(told["input_ids"])


@pytest.mark.parametrize(
    ("tokenizer", "given", "types"),
    [
        (word_tokenizer, {}, True),
        (fast_tokenizer, {}, True),
        (fast_tokenizer, {"token_types": False}, False),
        (lambda: transformers.RobertaTokenizer(), {}, False),
        (lambda: transformers.BertTokenizer(), {}, True),
        (lambda: letters, {}, False),
    ],
    ids=["tokenizers", "fast", "told", "roberta", "bert", "function"],
)
def test_the_types_that_a_model_takes(tokenizer: Any, given: dict[str, Any], types: bool) -> None:
    assert Text(tokenizer(), text_pair="other", **given).rule.types is types


@pytest.mark.parametrize(
    ("rule", "name", "names"),
    [
        (Padding(), "input_ids", ["input_ids"]),
        (Padding(mask=True), "input_ids", ["input_ids", "attention_mask"]),
        (Padding(mask=True), "decoder_input_ids", ["decoder_input_ids", "decoder_attention_mask"]),
        (Padding(mask=True, lengths=True), "text", ["text", "text_lengths", "text_mask"]),
        (Padding(types=True), "a_input_ids", ["a_input_ids", "a_token_type_ids"]),
        (Padding(mask=True, types=True), "text", ["text", "text_mask", "text_types"]),
    ],
)
def test_names_of_the_inputs(rule: Padding, name: str, names: list[str]) -> None:
    assert rule.names(name) == names
    assert Sequence(mask=True).rule == Padding(mask=True)


def broken(texts: list[str]) -> list[list[int]]:
    raise KeyError("no such word")


@pytest.mark.parametrize(
    ("tokenizer", "texts", "text"),
    [
        (letters, ["a", None], 'column "review", row 4 of partition 2: is null'),
        (letters, ["a", ""], "which has no token"),
        (broken, ["a"], "raised KeyError: 'no such word'. It was given 1 texts, the first 'a'"),
        (lambda texts: [[1]], ["a", "b"], "returned 1 lists of numbers. It was given 2 texts"),
    ],
)
def test_rows_that_are_refused(tokenizer: Any, texts: list[str | None], text: str) -> None:
    with pytest.raises(RowError) as caught:
        converted(Text(tokenizer), texts, first_row=3)
    problem = caught.value.problem
    assert text in problem.message("partition 2", "column")


def test_a_bad_row_of_pairs() -> None:
    room = Text(word_tokenizer(), text_pair="other", max_length=6, stride=2)
    with pytest.raises(RowError, match="PanicException: `stride` must be strictly less"):
        inputs_of_pairs(room, [("a a a a", "bad bad bad bad bad bad")])
    with pytest.raises(RowError, match="is a str, not a list of two texts"):
        room.from_record("ab", "features", 0, "float32")
    with pytest.raises(RowError) as caught:
        inputs_of_pairs(Text(letters_of_pairs, text_pair="other"), [("a", "b"), ("b", None)])
    told = caught.value.problem.message("it", "column")
    assert 'column "review", row 1 of it: has no text_pair: "other" is null.' in told


def letters_of_pairs(texts: list[str], others: list[str]) -> list[list[int]]:
    return letters([one + other for one, other in zip(texts, others, strict=True)])


def test_a_label_says_what_fills_it() -> None:
    told = list(check_specs({"text": Text(letters)}, [], ["text"]))
    assert told == [
        'columns["text"] is a label of text: say what fills up shorter rows, as padding=-100, which '
        "the losses of torch and transformers ignore."
    ]
    assert not list(check_specs({"text": Text(letters, padding=-100)}, [], ["text"]))


def test_another_type_is_told() -> None:
    told = Text(letters).resolve("ids", sql.ArrayType(sql.IntegerType()), "float32", None)
    assert told == (
        "is of type array<int>, which is no text: read numbers of tokens with "
        "sparkdl.Sequence(mask=True), or cast the column to string."
    )
