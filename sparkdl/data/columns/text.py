"""The column type of text, which a tokenizer makes numbers of."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.columns.base import Column, ColumnSpec, DataType, NamedFunction, name_of
from sparkdl.data.columns.convert import shorten
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Padding, Ragged
from sparkdl.data.row_errors import MEND_RECORDS, RowError, drop
from sparkdl.errors import ParameterError, kind_of, known_arguments, raise_all, shown
from sparkdl.plain import is_whole, make_plain

DTYPE = "int32"
"""The dtype of the stored numbers of tokens; a mini-batch has int64."""


@known_arguments
@dataclass(frozen=True)
class Text(ColumnSpec):
    """A specification of text: executors tokenize it, and each mini-batch is padded to its longest row.

    The model gets the numbers of the tokens, int64 (B, T), and directly after them a mask of the same
    shape: 1 for tokens, 0 for padding. By keyword the mask is ``attention_mask`` beside ``input_ids``,
    else ``KEYWORD_mask``.

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

    def __post_init__(self) -> None:
        problems = []
        make_plain(self, "max_length", "padding", "mask", "lengths", "pad_to_max")
        if self.max_length is not None and not is_whole(self.max_length, 1):
            problems.append(
                f"max_length={shown(self.max_length)}: give a whole number of at least 1."
            )
        if self.padding is not None and not is_whole(self.padding, -(2**31)):
            problems.append(f"padding={shown(self.padding)}: give a whole number, or None.")
        for name in ("mask", "lengths", "pad_to_max"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name}={shown(getattr(self, name))}: give True or False.")
        if self.padding_side not in (None, "left", "right"):
            problems.append(f'padding_side={shown(self.padding_side)}: give "left" or "right".')
        if self.pad_to_max is True and self.max_length is None:
            problems.append("pad_to_max=True: give max_length, which it pads to.")
        if not callable(self.tokenizer) and not hasattr(self.tokenizer, "encode_batch"):
            problems.append(
                f"tokenizer is {kind_of(self.tokenizer)}: give a tokenizer of transformers or "
                "tokenizers, or a function of a list of texts."
            )
        raise_all(ParameterError, [f"Text: {problem}" for problem in problems])

    def __getstate__(self) -> dict[str, Any]:
        """Travel without the libraries of the tokenizer that the user gave."""
        return {**vars(self), "tokenizer": self._prepared[0], "_prepared": self._prepared}

    @functools.cached_property
    def _prepared(self) -> tuple[Any, int, str]:
        """The tokenizer that executors run, the number that fills up shorter rows, and the side."""
        encoder, padding, side = _prepared(self.tokenizer, self.max_length)
        padding = padding if self.padding is None else self.padding
        return encoder, padding, self.padding_side or side

    @property
    def rule(self) -> Padding:
        """Return the padding of its mini-batches."""
        return Padding(
            value=self._prepared[1],
            length=self.max_length if self.pad_to_max else None,
            lengths=self.lengths,
            mask=self.mask,
            side=self._prepared[2],
        )

    def problems(self, role: str) -> Iterator[str]:
        """Yield a problem if a label has no padding of its own, or is to give its lengths."""
        if role == "label" and self.padding is None:
            yield (
                "is a label of text: say what fills up shorter rows, as padding=-100, which the losses "
                "of torch and transformers ignore."
            )
        if role == "label" and self.lengths:
            yield "has lengths=True, which is for features: the loss gets none."

    def resolve(
        self, name: str, data_type: DataType, float_dtype: str, trained: Field | None
    ) -> Column | str:
        """Return the column, or an error text if it is no text."""
        if data_type.typeName() not in ("string", "char", "varchar"):
            return (
                f"is of type {data_type.simpleString()}, which is no text: read numbers of tokens with "
                "sparkdl.Sequence(mask=True), or cast the column to string."
            )
        return Column(name, DTYPE, 1, spec=self)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> Ragged:
        """Tokenize the texts, all at once."""
        if array.null_count:
            row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise RowError(column.name, first_row + row, "is null", drop(column.name))
        texts = array.to_pylist()
        rows = self._rows(texts, column.name, first_row)
        return Ragged.of(rows or [np.zeros(0, DTYPE)], self.rule)[: len(texts)]

    def from_record(self, value: Any, name: str, row: int, float_dtype: str) -> np.ndarray:
        """Tokenize the text of a record."""
        if not isinstance(value, str):
            raise RowError(name, row, f"is {kind_of(value)}, not a text", MEND_RECORDS)
        return self._rows([value], name, row)[0]

    def to_json(self, name: str) -> dict[str, Any]:
        """Return the fields; a ``tokenizers.Tokenizer`` is its own JSON, a function is its name."""
        values = {
            "max_length": self.max_length,
            "padding": self._prepared[1],
            "mask": self.mask,
            "lengths": self.lengths,
            "pad_to_max": self.pad_to_max,
            "padding_side": self.padding_side,
        }
        encoder, _, side = self._prepared
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

    def _rows(self, texts: Sequence[str], name: str, first_row: int) -> list[np.ndarray]:
        """Return the numbers of the tokens of each text."""
        try:
            found = _tokenized(self._prepared[0], texts, self.max_length)
            rows = [np.asarray(row, DTYPE).reshape(-1) for row in found]
            if len(rows) != len(texts):
                raise ValueError(f"it returned {len(rows)} lists of numbers")
            rows = [row[: self.max_length] for row in rows]
        except Exception as error:
            raise RowError(
                name,
                first_row,
                f"the tokenizer of this column raised {type(error).__name__}: {error}",
                f"It was given {len(texts)} texts, the first {shorten(texts[0])}.",
            ) from None
        for row, numbers in enumerate(rows, start=first_row):
            if not len(numbers):
                raise RowError(
                    name,
                    row,
                    f"is {shorten(texts[row - first_row])}, which has no token",
                    "Filter such rows, or let the tokenizer add special tokens.",
                )
        return rows


def _prepared(tokenizer: Any, max_length: int | None) -> tuple[Any, int, str]:
    """Return a tokenizer that pads nothing and cuts to ``max_length``, and the number and the side of
    its padding."""
    padding, side = getattr(tokenizer, "pad_token_id", None), None
    padding_side = getattr(tokenizer, "padding_side", None)
    if hasattr(tokenizer, "backend_tokenizer"):  # a fast tokenizer of transformers
        side = tokenizer.truncation_side
        tokenizer = tokenizer.backend_tokenizer
    if not hasattr(tokenizer, "to_str"):
        return tokenizer, padding or 0, padding_side or "right"
    own = _library().Tokenizer.from_str(tokenizer.to_str())
    if own.padding is not None:
        padding = own.padding["pad_id"] if padding is None else padding
        padding_side = padding_side or own.padding["direction"]
    own.no_padding()
    if side is None:
        side = "right" if own.truncation is None else own.truncation["direction"]
    if max_length is not None:
        own.enable_truncation(max_length, direction=side)
    else:
        own.no_truncation()
    return own, padding or 0, padding_side or "right"


def _tokenized(tokenizer: Any, texts: Sequence[str], max_length: int | None) -> Any:
    if hasattr(tokenizer, "encode_batch"):
        return [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    given: dict[str, Any] = {}
    if hasattr(tokenizer, "pad_token_id"):  # a tokenizer of transformers in Python
        given = {"truncation": max_length is not None, "max_length": max_length, "verbose": False}
    found = tokenizer(texts, **given)
    return found["input_ids"] if isinstance(found, Mapping) else found


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ParameterError(
            "sparkdl.Text with a tokenizer needs a library that is not installed: pip install "
            'tokenizers (the extra "transformers")'
        ) from None
    return tokenizers
