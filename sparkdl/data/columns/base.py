"""The interface of column types, and what a DataFrame's column comes to.

A column type is a specification that says how values become tensors where their type alone does not:
``Trainer(columns={"photo": sparkdl.Image(size=(32, 32))})``. A column without a specification is read
by its type, see :mod:`sparkdl.data.columns.numeric`. Each column type has a file of its own here, and
no other module asks which one it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa

from sparkdl.data.fields import Field
from sparkdl.data.ragged import Padding, Rows
from sparkdl.errors import ParameterError, kind_of, raise_all, shown
from sparkdl.plain import is_whole

DataType: TypeAlias = Any
"""A ``pyspark.sql.types.DataType``. It is not imported, since ranks read rows without pyspark."""

KINDS: dict[str, type[ColumnSpec]] = {}
"""Every column type by its kind."""


@dataclass(frozen=True)
class ColumnSpec(ABC):
    """The base of column types, which are frozen dataclasses.

    A subclass that sets ``kind`` is registered in :data:`KINDS`. It travels to executors by pickle.

    Attributes:
        kind: Its name in saved models.
        grows: A tensor may be much larger than the value in the column, so few rows are read at once.
        takes_missing: Null and NaN are values like others.
        for_records: A field of an RDD's records may have this specification too.
        records_hold_tensors: An RDD's records hold the finished tensor where a DataFrame has such a
            column. If this and ``for_records`` are False, a model of such a column takes no records.
    """

    kind: ClassVar[str]
    grows: ClassVar[bool] = False
    takes_missing: ClassVar[bool] = False
    for_records: ClassVar[bool] = False
    records_hold_tensors: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):  # not yet, where cloudpickle rebuilds a class of a notebook
            KINDS[cls.kind] = cls

    @classmethod
    def default(cls, data_type: DataType) -> ColumnSpec | None:
        """Return the specification of features of this type that are given none, or None."""
        return None

    @classmethod
    def suited(cls, column: Column, array: pa.Array) -> Column | None:
        """Return ``column`` as this type reads it, if values need that; None: they do not.

        Only columns are asked about that :attr:`Column.adapts`. Their rows are then read in this way,
        and a fit goes on as if ``Trainer.columns`` had the new specification.
        """
        return None

    @property
    def rule(self) -> Padding | None:
        """The padding of its mini-batches if rows vary in length, else None."""
        return None

    @property
    def beside(self) -> tuple[str, ...]:
        """The other columns that make the tensor together with its own; it is given a struct of all."""
        return ()

    def example(self, field: Field) -> Any:
        """Return a value that the column may hold, for examples of a model; None: it is not known."""
        return None

    def problems(self, role: str) -> Iterator[str]:
        """Yield what is wrong with this specification for a "feature" or "label", without its name."""
        yield from ()

    @abstractmethod
    def resolve(
        self, name: str, data_type: DataType, float_dtype: str, trained: Field | None
    ) -> Column | str:
        """Return the column of this type, or what is wrong with the type and what to do.

        Args:
            name: The name of the column.
            data_type: Its Spark type.
            float_dtype: The model's floating dtype.
            trained: The field that the model was trained with, if it was trained before.
        """

    @abstractmethod
    def convert(self, array: pa.Array, column: Column, first_row: int) -> Rows:
        """Return the tensors of an Arrow array, which may be empty.

        Args:
            array: The values of consecutive rows.
            column: The column that :meth:`resolve` returned.
            first_row: The number of the array's row 0 in its partition, for messages.

        Raises:
            RowError: A value cannot become a tensor, or its tensor has another shape than row 0's.
        """

    def from_record(self, value: Any, name: str, row: int, float_dtype: str) -> np.ndarray:
        """Return the tensor of one field of an RDD's record; only called if :attr:`for_records`.

        Args:
            value: The value of the field.
            name: The name of the field, for messages.
            row: The number of the record, for messages.
            float_dtype: The model's floating dtype.

        Raises:
            RowError: The value cannot become a tensor.
        """
        raise NotImplementedError

    def to_json(self, name: str) -> dict[str, Any]:
        """Return the fields as JSON values.

        Raises:
            ParameterError: A field of the specification of column ``name`` cannot be saved.
        """
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ColumnSpec | NamedFunction:
        """Return the specification that :meth:`to_json` wrote.

        One with a function is returned as a :class:`NamedFunction`, since nothing may be imported here.
        """
        return cls(**values)


Rule: TypeAlias = tuple[str, object]
"""The name of a field with what to do if its value is wrong, and whether it is right."""


def check_values(made: object, *rules: Rule) -> None:
    """Raise one :class:`ParameterError` for all rules that a user's object breaks."""
    broken = [rule.partition(":") for rule, right in rules if not right]
    problems = [f"{name}={shown(getattr(made, name))}:{remedy}" for name, _, remedy in broken]
    raise_all(ParameterError, [f"{type(made).__name__}: {problem}" for problem in problems])


def rules_of_lengths(spec: Any) -> Iterator[Rule]:
    """Yield the rules of a column type whose rows are padded to a length."""
    most = spec.max_length
    yield "max_length: give a whole number of at least 1.", most is None or is_whole(most, 1)
    for name in ("lengths", "mask", "pad_to_max"):
        yield f"{name}: give True or False.", isinstance(getattr(spec, name), bool)
    lacks = spec.pad_to_max is True and most is None
    yield "pad_to_max: give max_length, which it pads to.", not lacks


Specs: TypeAlias = Mapping[str, ColumnSpec]
"""The specifications of columns, by name."""


def masked_of(columns: Specs) -> frozenset[str]:
    """Return the columns in which null and NaN are values like others."""
    return frozenset(name for name, spec in columns.items() if spec.takes_missing)


@dataclass(frozen=True)
class Column:
    """An input or label column, or the weight."""

    name: str
    dtype: str
    depth: int = 0  # levels of arrays; 0: a number
    vector: bool = False  # of pyspark.ml.linalg
    spec: ColumnSpec | None = None  # None: the type alone says how to read the column
    weight: bool = False
    trained: Field | None = None  # of a Convert: the field of its results in training
    label: bool = field(default=False, compare=False)
    adapts: bool = field(default=False, compare=False)  # values may ask for another specification

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the DataFrame that it is made of; several are read as a struct."""
        return (self.name, *(self.spec.beside if self.spec is not None else ()))

    @property
    def grows(self) -> bool:
        """Return whether the tensor may be much larger than the column."""
        return self.vector or (self.spec is not None and self.spec.grows)


def default_spec(data_type: DataType) -> ColumnSpec | None:
    """Return the specification of features of this type that are given none, or None."""
    found = (kind.default(data_type) for kind in KINDS.values())
    return next((spec for spec in found if spec is not None), None)


def suited(column: Column, array: pa.Array) -> Column | None:
    """Return the column as another type reads it, if it adapts and values of the array need that."""
    found = (kind.suited(column, array) for kind in KINDS.values() if column.adapts)
    return next((one for one in found if one is not None), None)


def names_read(names: Iterable[str], specs: Specs) -> list[str]:
    """Return these columns, each followed by those that its specification reads beside it."""
    return [n for name in names for n in (name, *(specs[name].beside if name in specs else ()))]


def padding_of(specs: Specs | None, name: str) -> Padding | None:
    """Return the padding of the column or field ``name`` if its rows vary in length, else None."""
    spec = (specs or {}).get(name)
    return None if spec is None else spec.rule


@dataclass(frozen=True, kw_only=True)
class NamedFunction:
    """A function as a file names it, and what is to be made of it, such as a ``Convert``.

    Nothing is imported before :meth:`load`, because an import needs trust.
    """

    name: str
    make: Callable[[Callable[[Any], Any]], Any] | None = None
    """Called with the function by :meth:`load`; None: ``load`` returns the function itself."""

    def load(self) -> Any:
        """Import the function, and return what :attr:`make` makes of it."""
        try:
            found = resolve_name(self.name)
            if not callable(found):
                raise ValueError(f"it is {kind_of(found)}, not a function")
        except (ImportError, AttributeError, ValueError) as error:
            raise ParameterError(
                f'the function "{self.name}" cannot be imported ({error}). Put it on '
                "the Python path."
            ) from None
        return found if self.make is None else self.make(found)


def specs_to_json(specs: Specs) -> dict[str, Any]:
    """Return the specifications as JSON values, by column."""
    return {name: {"kind": spec.kind, **spec.to_json(name)} for name, spec in specs.items()}


def specs_from_json(content: Mapping[str, Any]) -> dict[str, ColumnSpec | NamedFunction]:
    """Return the specifications that :func:`specs_to_json` wrote.

    Those with functions come back as :class:`NamedFunction`, not yet imported.
    """
    specs: dict[str, ColumnSpec | NamedFunction] = {}
    for name, written in content.items():
        values = dict(written)
        kind = values.pop("kind", None)
        if not isinstance(kind, str) or kind not in KINDS:
            raise ParameterError(
                f'column "{name}" is of the kind {kind!r}, which this version does not know.'
            )
        specs[name] = KINDS[kind].from_json(values)
    return specs


def name_of(function: Any, where: str) -> str:
    """Return the name under which a file stores a function and by which it can be imported.

    ``where`` says in messages what the function belongs to.
    """
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    try:
        if module and module != "__main__" and resolve_name(f"{module}:{path}") is function:
            return f"{module}:{path}"
    except (ImportError, AttributeError, ValueError):
        pass
    shown = path or type(function).__name__
    raise ParameterError(
        f"the function {shown} {where} cannot be saved by name: define it at the top level of a module "
        "that can be imported."
    )
