"""The columns that are made of what a model returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sparkdl.data.ragged import Ragged, Rows
from sparkdl.errors import ModelError, ParameterError, counted, shown
from sparkdl.infer.output import Output, to_arrow
from sparkdl.model.recipe import Part, described, part_of, parts_of, problems_of_part


@dataclass(frozen=True)
class OutputColumn:
    """A column of predictions."""

    name: str
    part: Part
    output: Output
    by_element: bool = False  # the first dimension is the row's sequence: cut it to its length
    labels: tuple[str, ...] = ()  # texts that the numbers stand for; (): the numbers stay

    @property
    def sql_type(self) -> str:
        """The type of the column."""
        return "string" if self.labels else self.output.sql_type

    @property
    def row_bytes(self) -> int:
        """The approximate bytes of one prediction; a sequence counts 128 elements."""
        shape = (128, *self.output.shape[1:]) if self.by_element else self.output.shape
        return 4 * math.prod(shape)

    def to_arrow(self, values: np.ndarray, sequences: Ragged | None) -> pa.Array:
        """Return predictions, (rows, ...), as an Arrow array; ``sequences`` if lengths vary."""
        if self.labels:
            return pa.array(self.labels).take(pa.array(values.reshape(-1)))
        if not self.by_element or sequences is None:
            return to_arrow(values)
        kept = sequences.present(values.shape[1])
        ends = np.concatenate([[0], np.cumsum(kept.sum(1))])
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), to_arrow(values[kept]))


def offered_parts(returned: Any, rows: int, name: str) -> dict[str, Part]:
    """Return the parts that become columns if the user names none: the tensors with a row each."""
    if isinstance(returned, torch.Tensor):
        return {name: None}
    found: dict[Any, Any] = {
        key: value
        for key, value in parts_of(returned).items()
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows
    }
    if not found:
        raise ModelError(
            f"the model returns {described(returned)} for a batch of {counted(rows, 'row')}, and no "
            "part of it is a tensor with a row for each: say with outputs=, a function of what it "
            "returns."
        )
    if len(found) == 1:
        return {name: next(iter(found))}
    return {f"{name}_{key}" if isinstance(key, int) else str(key): key for key in found}


def named_parts(outputs: Any, name: str) -> dict[str, Part] | None:
    """Return the parts that the user asks for by column name; None if the user leaves it open."""
    if outputs is None:
        return None
    if isinstance(outputs, Mapping):
        parts = dict(outputs)
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str):
        parts = {str(part): part for part in outputs}
    else:
        parts = {name: outputs}
    wrong = [key for key in parts if not isinstance(key, str)]
    problems = [p for part in parts.values() for p in problems_of_part(part)]
    if wrong or problems or not parts:
        raise ParameterError(
            f"outputs={shown(outputs)}: name a part of what the model returns (a key, an attribute, a "
            "number or a function of it), a list of names, or a mapping from column names to parts."
        )
    return parts


def described_column(name: str, part: Part, values: Any, rows: int) -> OutputColumn:
    """Return the column of a part, given its value for a batch."""
    if not isinstance(values, torch.Tensor) or not values.ndim or len(values) != rows:
        raise ModelError(
            f'output "{name}" is {described(values)} for a batch of {counted(rows, "row")}: it must be '
            f"a tensor of shape [{rows}, ...]. Name another part with outputs=, or give a function."
        )
    column = OutputColumn(name, part, Output.of(values))
    column.output.sql_type  # noqa: B018 - raises if there is none
    return column


def value_of(returned: Any, part: Part) -> Any:
    """Return a part; a function that fails is a user's mistake."""
    try:
        return part_of(returned, part)
    except (ModelError, ParameterError):
        raise
    except Exception as error:
        raise ParameterError(
            f"the function of outputs= fails on {described(returned)}: {type(error).__name__}: "
            f"{str(error).rstrip('. ')}."
        ) from error


def sequences_of(arrays: Sequence[Rows]) -> Ragged | None:
    """Return the first feature whose rows vary in length, or None."""
    return next((rows for rows in arrays if isinstance(rows, Ragged)), None)


def lengths_of(arrays: Sequence[Rows]) -> np.ndarray | None:
    """Return the lengths of the rows of the first feature whose rows vary in length, or None."""
    rows = sequences_of(arrays)
    if rows is None or rows.padding.length is None:
        return None if rows is None else rows.lengths
    return np.minimum(rows.lengths, rows.padding.length)
