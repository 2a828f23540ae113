"""The column type of text, which a tokenizer makes numbers of."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.columns.base import (
    Column,
    ColumnSpec,
    DataType,
    NamedFunction,
    check_values,
    name_of,
    rules_of_lengths,
)
from sparkdl.data.columns.convert import shorten
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Padding, Ragged
from sparkdl.data.row_errors import MEND_RECORDS, RowError, refuse_nulls
from sparkdl.errors import ParameterError, kind_of, known_arguments, optional_library, shown
from sparkdl.plain import is_whole, make_plain

DTYPE = "int32"
"""The dtype of the stored numbers of tokens; a mini-batch has int64."""
_TOKENIZERS = (
    "tokenizer: give a tokenizer of transformers or tokenizers, or a function of a list of texts."
)


@known_arguments
@dataclass(frozen=True)
class Text(ColumnSpec):
    """A specification of text: executors tokenize it, and each mini-batch is padded to its longest row.

    The model gets the numbers of the tokens, int64 (B, T), and directly after them a mask of the same
    shape: 1 for tokens, 0 for padding. By keyword the mask is ``attention_mask`` beside ``input_ids``,
    else ``KEYWORD_mask``. The types of the tokens, if asked for, come last: ``token_type_ids`` or
    ``KEYWORD_types``.

    A fast tokenizer of transformers becomes the ``tokenizers.Tokenizer`` inside it, which is all that
    executors and saved models need.
    """

    kind = "text"
    for_records = True

    tokenizer: Any = field(repr=False)
    """A fast tokenizer of transformers, a ``tokenizers.Tokenizer``, or a function of a list of texts
    that returns a list of numbers for each."""
    max_length: int | None = None
    """Longer rows are cut, by the tokenizer if it can, which keeps the special tokens at the ends."""
    padding: int | None = None
    """The number that fills up shorter rows; None: that of the tokenizer, or 0. A label needs one that
    its loss ignores: -100 for the losses of torch and transformers."""
    mask: bool = True
    """Give the model the mask."""
    lengths: bool = False
    """Give the model the lengths directly after the numbers: int64, shape (B,)."""
    pad_to_max: bool = False
    """Always pad to ``max_length``, so that every mini-batch has the same shape."""
    padding_side: str | None = None
    """The side on which shorter rows are filled up, "left" or "right"; None: that of the tokenizer, or
    "right". A language model that generates needs "left", so that it goes on after the last token."""
    text_pair: str | None = None
    """The column with the second text of each pair, whose first is in the column itself: both become
    one row of tokens, as of ``tokenizer(text, text_pair)``. In an RDD, a value is a list of the two."""
    token_types: bool | None = None
    """Give the model the types of the tokens; None: for pairs, if the tokenizer gives the second text
    another type than the first, and does not say that its model takes none."""
    stride: int | None = None
    """A longer row becomes windows of ``max_length`` tokens, each of which begins with this many of the
    one before. The model gets numbers, mask and types of shape (B, windows, T), as
    :class:`sparkdl.Windows` takes them. Of a pair, only the second text is divided."""

    def __post_init__(self) -> None:
        make_plain(self, "max_length", "padding", "mask", "lengths", "pad_to_max", "stride")
        number, stride, cut = self.padding, self.stride, self.max_length
        batches, own = hasattr(self.tokenizer, "encode_batch"), self.tokenizer
        check_values(
            self,
            (
                "padding: give a whole number, or None.",
                number is None or is_whole(number, -(2**31)),
            ),
            *rules_of_lengths(self),
            ('padding_side: give "left" or "right".', self.padding_side in (None, "left", "right")),
            ("token_types: give True, False or None.", self.token_types in (None, True, False)),
            (
                "text_pair: give the name of a column.",
                isinstance(self.text_pair, (str, type(None))),
            ),
            (_TOKENIZERS, callable(own) or batches),
            ("stride: give a whole number of at least 0.", stride is None or is_whole(stride, 0)),
        )
        if stride is None:
            return
        encoder = getattr(own, "backend_tokenizer", own)
        windows = (
            "stride: give max_length, into windows of which it divides rows, without pad_to_max."
        )
        check_values(
            self,
            (windows, cut is not None and not self.pad_to_max),
            ("tokenizer: give a fast one, which stride needs.", hasattr(encoder, "encode_batch")),
        )
        room = (cut or 0) - encoder.num_special_tokens_to_add(self.text_pair is not None)
        rule = f"stride: a window has room for {room} tokens: give fewer."
        check_values(self, (rule, stride < room))

    def __getstate__(self) -> dict[str, Any]:
        """Travel without the libraries of the tokenizer that the user gave."""
        return {**vars(self), "tokenizer": self._prepared[0], "_prepared": self._prepared}

    @functools.cached_property
    def _prepared(self) -> tuple[Any, int, str, bool]:
        """The tokenizer that executors run, which pads nothing and cuts to ``max_length``; the number
        that fills up shorter rows, the side, and whether the types are given."""
        given, pair = self.tokenizer, self.text_pair is not None
        types = pair and _types_pairs(given) if self.token_types is None else self.token_types
        padding = getattr(given, "pad_token_id", None) if self.padding is None else self.padding
        side = self.padding_side or getattr(given, "padding_side", None)
        encoder = getattr(given, "backend_tokenizer", given)
        if hasattr(encoder, "to_str"):
            encoder = _library().Tokenizer.from_str(encoder.to_str())
            if encoder.padding is not None:
                padding = encoder.padding["pad_id"] if padding is None else padding
                side = side or encoder.padding["direction"]
            encoder.no_padding()
            own = "right" if encoder.truncation is None else encoder.truncation["direction"]
            cut = getattr(given, "truncation_side", own)
            encoder.no_truncation()
            if self.max_length is not None:
                second = pair and self.stride is not None
                strategy = "only_second" if second else "longest_first"
                how = {"direction": cut, "stride": self.stride or 0, "strategy": strategy}
                encoder.enable_truncation(self.max_length, **how)
        return encoder, padding or 0, side or "right", types

    @property
    def rule(self) -> Padding:
        """Return the padding of its mini-batches."""
        return Padding(
            value=self._prepared[1],
            length=self.max_length if self.pad_to_max else None,
            lengths=self.lengths,
            mask=self.mask,
            side=self._prepared[2] if self.stride is None else "right",  # that of the windows
            types=self._prepared[3],
            windows=self.stride is not None,
        )

    @property
    def beside(self) -> tuple[str, ...]:
        """Return the column of second texts, if there is one."""
        return () if self.text_pair is None else (self.text_pair,)

    def example(self, field: Field) -> Any:
        """Return a text."""
        return "a"

    def problems(self, role: str) -> Iterator[str]:
        """Yield a problem if a label has no padding of its own, or is to give its lengths."""
        if role == "label" and self.padding is None:
            yield (
                "is a label of text: say what fills up shorter rows, as padding=-100, which the losses "
                "of torch and transformers ignore."
            )
        if role == "label" and self.lengths:
            yield "has lengths=True, which is for features: the loss gets none."
        for name in ("text_pair", "token_types", "stride"):
            if role == "label" and getattr(self, name) not in (None, False):
                yield f"has {name}={shown(getattr(self, name))}, which is for features only."

    def resolve(
        self, name: str, data_type: DataType, float_dtype: str, trained: Field | None
    ) -> Column | str:
        """Return the column, or an error text if it is no text."""
        kinds = [("is", data_type)]
        if self.text_pair is not None:
            first, second = (one.dataType for one in data_type.fields)
            kinds = [("is", first), (f'has a text_pair, "{self.text_pair}", that is', second)]
        for verb, kind in kinds:
            if kind.typeName() not in ("string", "char", "varchar"):
                return (
                    f"{verb} of type {kind.simpleString()}, which is no text: read numbers of tokens "
                    "with sparkdl.Sequence(mask=True), or cast the column to string."
                )
        return Column(name, DTYPE, 1, spec=self)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> Ragged:
        """Tokenize the texts, all at once."""
        several = array.flatten() if self.text_pair is not None else [array]
        for name, one in zip(column.names, several, strict=True):
            text = "is null" if name == column.name else f'has no text_pair: "{name}" is null'
            refuse_nulls(one, column.name, first_row, text, name)
        texts = [one.to_pylist() for one in several]
        rows = self._rows(list(zip(*texts, strict=True)), column.name, first_row)
        return Ragged.of(rows or [self._row([np.zeros((0, 2), DTYPE)])], self.rule)[: len(array)]

    def from_record(self, value: Any, name: str, row: int, float_dtype: str) -> np.ndarray:
        """Tokenize the text, or the list of two, of a record."""
        texts = (value,) if self.text_pair is None else value
        count = 1 if self.text_pair is None else 2
        if not isinstance(texts, (list, tuple)) or [type(one) for one in texts] != [str] * count:
            what = "a text" if count == 1 else "a list of two texts"
            raise RowError(name, row, f"is {kind_of(value)}, not {what}", MEND_RECORDS)
        return self._rows([tuple(texts)], name, row)[0]

    def to_json(self, name: str) -> dict[str, Any]:
        """Return the fields; a ``tokenizers.Tokenizer`` is its own JSON, a function is its name."""
        encoder, padding, side, types = self._prepared
        values = {one.name: getattr(self, one.name) for one in fields(Text)}
        values["padding"], _ = padding, values.pop("tokenizer")
        if self.text_pair is not None:
            values["token_types"] = types
        if hasattr(encoder, "to_str"):
            return {**values, "padding_side": side, "tokenizer": encoder.to_str()}
        try:
            return {**values, "function": name_of(encoder, f'of column "{name}"')}
        except ParameterError as error:
            raise ParameterError(
                f"{error} A tokenizer of tokenizers, or a fast one of transformers, is saved itself."
            ) from None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ColumnSpec | NamedFunction:
        """Return the specification; one with a function is named and not yet imported."""
        others = dict(values)
        function, written = others.pop("function", None), others.pop("tokenizer", None)
        if function is not None:
            return NamedFunction(name=function, make=functools.partial(cls, **others))
        library = _library()
        try:
            return cls(library.Tokenizer.from_str(written), **others)
        except Exception as error:  # of no narrower type
            raise ValueError(f"its tokenizer cannot be read ({error})") from error

    def _rows(
        self, texts: Sequence[tuple[str, ...]], name: str, first_row: int
    ) -> list[np.ndarray]:
        """Return the tokens of each text or pair."""
        if not texts:
            return []
        encoder, _, _, types = self._prepared
        try:
            found = _tokenized(encoder, texts, self.max_length, types, self.stride is not None)
            rows = [self._row(windows) for windows in found]
            if len(rows) != len(texts):
                raise ValueError(f"it returned {len(rows)} lists of numbers")
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise  # tokenizers panics if the first text of a pair leaves no room in a window
            raise RowError(
                name,
                first_row,
                f"the tokenizer of this column raised {type(error).__name__}: {error}",
                f"It was given {len(texts)} texts, the first {_shown(texts[0])}.",
            ) from None
        for row, tokens in enumerate(rows, start=first_row):
            if not len(tokens) or (self.stride is not None and tokens[0, :, -1].all()):
                raise RowError(
                    name,
                    row,
                    f"is {_shown(texts[row - first_row])}, which has no token",
                    "Filter such rows, or let the tokenizer add special tokens.",
                )
        return rows

    def _row(self, windows: Sequence[np.ndarray]) -> np.ndarray:
        """Return a row as it is stored, given the numbers and types of the tokens of its windows."""
        _, padding, side, types = self._prepared
        if self.stride is None:
            tokens = windows[0][: self.max_length]
            return tokens if types else tokens[:, 0]
        stored = np.zeros((len(windows), self.max_length or 0, 2 + types), DTYPE)
        stored[..., 0], stored[..., -1] = padding, 1
        for row, tokens in zip(stored, windows, strict=True):
            place = slice(len(row) - len(tokens), None) if side == "left" else slice(len(tokens))
            row[place, : 1 + types] = tokens[:, : 1 + types]
            row[place, -1] = 0
        return stored


@dataclass(frozen=True)
class ChatTemplate:
    """A function of chats, lists of messages, that returns the numbers of the tokens of each."""

    tokenizer: Any

    def __call__(self, chats: Sequence[Sequence[Any]]) -> list[list[int]]:
        return [self._tokens([dict(message) for message in chat]) for chat in chats]

    def _tokens(self, chat: list[dict[str, Any]]) -> list[int]:
        found = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
        return found["input_ids"] if isinstance(found, Mapping) else found


@dataclass(frozen=True)
class Prompts(Text):
    """The column of prompts, or of chats if its tokenizer is a :class:`ChatTemplate`."""

    limit: int | None = None
    """The most tokens of a prompt; a longer one is a bad row."""
    most: int = 0
    """The tokens that may follow it."""

    def resolve(
        self, name: str, data_type: DataType, float_dtype: str, trained: Field | None
    ) -> Column | str:
        """Return the column, or an error text if it is no text, or no chats."""
        if not isinstance(self.tokenizer, ChatTemplate):
            return super().resolve(name, data_type, float_dtype, trained)
        message = data_type.elementType if data_type.typeName() == "array" else data_type
        struct = {"role", "content"} <= {*getattr(message, "names", ())}
        if data_type is message or not (struct or message.typeName() == "map"):
            return (
                f"is of type {data_type.simpleString()}, which is neither text nor an array of "
                "messages: make array(named_struct('role', 'user', 'content', question))."
            )
        return Column(name, DTYPE, 1, spec=self)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> Ragged:
        """Tokenize the prompts."""
        rows = super().convert(array, column, first_row)
        for row, length in enumerate(rows.lengths, start=first_row):
            if self.limit is not None and length > self.limit:
                raise RowError(
                    column.name,
                    row,
                    f"has {length:,} tokens, and the model takes {self.limit:,} before the "
                    f"{self.most:,} that it may write",
                    "Shorten it, cut prompts with max_length=, or give a smaller max_new_tokens=.",
                )
        return rows

    def to_json(self, name: str) -> dict[str, Any]:
        """Return the fields, with the template of chats."""
        if not isinstance(self.tokenizer, ChatTemplate):
            return {**super().to_json(name), "limit": self.limit}
        told = self.tokenizer.tokenizer
        return {
            "template": told.chat_template,
            "vocabulary": sorted(told.get_vocab().items()),
            "limit": self.limit,
        }


def _shown(texts: tuple[str, ...]) -> str:
    return shorten(texts[0] if len(texts) == 1 else texts)


def _types_pairs(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a type for the second text of a pair, which its model takes."""
    names = getattr(tokenizer, "model_input_names", None)
    if type(tokenizer).__name__ in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        names = None  # it is that of any model
    encoder = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(encoder, "encode_batch"):
        return "token_type_ids" in (names or ())
    return (names is None or "token_type_ids" in names) and 1 in encoder.encode("a", "a").type_ids


def _tokenized(
    tokenizer: Any,
    texts: Sequence[tuple[str, ...]],
    max_length: int | None,
    types: bool,
    windows: bool,
) -> Iterator[list[np.ndarray]]:
    """Yield the windows of each text or pair: numbers of tokens (T, 1), or also their types (T, 2)."""
    if hasattr(tokenizer, "encode_batch"):
        whole = texts if len(texts[0]) > 1 else [text for (text,) in texts]
        for first in tokenizer.encode_batch(whole):
            parts = [first, *first.overflowing] if windows else [first]
            yield [_columns(one.ids, one.type_ids if types else None) for one in parts]
        return
    given: dict[str, Any] = {}
    if hasattr(tokenizer, "pad_token_id"):  # a tokenizer of transformers in Python
        given = {"truncation": max_length is not None, "max_length": max_length, "verbose": False}
        given |= {"return_token_type_ids": True} if types else {}
    found = tokenizer(*map(list, zip(*texts, strict=True)), **given)
    numbers = found["input_ids"] if isinstance(found, Mapping) else found
    others = found["token_type_ids"] if types else [None] * len(numbers)
    for pair in zip(numbers, others, strict=True):
        yield [_columns(*pair)]


def _columns(*values: Any) -> np.ndarray:
    """Return the numbers of tokens, and their types if these are given, side by side."""
    arrays = [np.asarray(one, DTYPE).reshape(-1) for one in values if one is not None]
    return np.stack(arrays, 1)


def _library() -> Any:
    return optional_library("tokenizers", "sparkdl.Text with a tokenizer", "transformers")
