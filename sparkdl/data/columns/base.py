"""Specifications of columns whose type alone does not say how they become tensors.

There are specifications for images, sequences and functions, given as
``Trainer(columns={"photo": sparkdl.Image(size=(32, 32))})``. A column without a specification is read
by its type, see :mod:`sparkdl.data.schema`.
"""

from __future__ import annotations

import importlib
import math
import re
from collections import abc
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from sparkdl.data.fields import Field
from sparkdl.data.ragged import Padding
from sparkdl.errors import ParameterError, kind_of, nearest, raise_all
from sparkdl.plain import make_plain

MODES = {"L": 1, "RGB": 3, "RGBA": 4}
"""Number of channels of each colour mode, by Pillow's name."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """A specification of images: encoded bytes (PNG, JPEG, ...), or structs of Spark's image source.

    Executors decode them to (C, H, W), with channels in the order of ``mode``. Encoded bytes and
    any change of size or mode need Pillow, the extra ``images``.
    """

    size: tuple[int, int] | None = None
    """(height, width) to which every image is resized, bilinearly; None: all must have one size."""
    mode: str = "RGB"
    """"RGB", "L" (grey) or "RGBA"; other images are converted to it."""
    scale: float | None = 1 / 255
    """Factor for the bytes 0 to 255, which become the model's floats; None: they stay uint8.

    uint8 takes a quarter of the memory; ``augment`` or the model then gets uint8.
    """

    def __post_init__(self) -> None:
        problems = []
        make_plain(self)
        if isinstance(self.size, list):
            object.__setattr__(self, "size", tuple(self.size))
        if self.size is not None:
            good = isinstance(self.size, tuple) and len(self.size) == 2
            if not good or not all(_whole(side, 1) for side in self.size):
                problems.append(f"size={self.size!r}: give (height, width) in pixels, or None.")
        if self.mode not in MODES:
            problems.append(f"mode={self.mode!r}: use one of {', '.join(MODES)}.")
        if self.scale is not None and not (_number(self.scale) and self.scale != 0):
            problems.append(f"scale={self.scale!r}: give a number other than 0, or None for bytes.")
        raise_all(ParameterError, [f"Image: {problem}" for problem in problems])


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """A specification of rows of varying length.

    The column is ``array<number>``, or ``array<array<number>>`` for (T, D). Rows are stored
    unpadded; each mini-batch pads them at the end, to its longest row.
    """

    max_length: int | None = None
    """Longer rows are cut at the end."""
    padding: float = 0
    """The value that fills up shorter rows."""
    lengths: bool = False
    """Give the model the lengths as one more input directly after this one: int64, shape (B,)."""
    pad_to_max: bool = False
    """Always pad to ``max_length``, so that every mini-batch has the same shape."""

    def __post_init__(self) -> None:
        problems = []
        make_plain(self)
        if self.max_length is not None and not _whole(self.max_length, 1):
            problems.append(f"max_length={self.max_length!r}: give a whole number of at least 1.")
        if not _number(self.padding):
            problems.append(f"padding={self.padding!r}: give a number.")
        for name in ("lengths", "pad_to_max"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name}={getattr(self, name)!r}: give True or False.")
        if self.pad_to_max is True and self.max_length is None:
            problems.append("pad_to_max=True: give max_length, which it pads to.")
        raise_all(ParameterError, [f"Sequence: {problem}" for problem in problems])

    @property
    def rule(self) -> Padding:
        """Return the padding of its mini-batches."""
        return Padding(
            value=self.padding,
            length=self.max_length if self.pad_to_max else None,
            lengths=self.lengths,
        )


@dataclass(frozen=True)
class Convert:
    """A specification that applies ``function(value) -> number or array`` to each row on the executors.

    It fits any column. ``value`` is the Python value (a string, a dict for a struct, None for a
    null). All results must have one shape. Floats become the model's floats, unsigned integers
    int64.
    """

    function: abc.Callable[[Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ParameterError(
                f"Convert: function is {kind_of(self.function)}: give a function of one "
                "value that returns a number or an array."
            )


Spec: TypeAlias = Image | Sequence | Convert
Specs: TypeAlias = abc.Mapping[str, Spec]


_INDEX = re.compile(r"\[\d+\]$")
"""Matches the index in a field of an RDD's records, such as "features[0]"."""


def check_specs(
    specs: object, features: abc.Sequence[str], label: abc.Sequence[str], weight: str | None = None
) -> abc.Iterator[str]:
    """Yield the problems of ``Trainer.columns``, given the other parameters, one sentence each.

    Args:
        specs: The value of ``columns``.
        features: The names of the features.
        label: The names of the labels.
        weight: The name of the weight, or None.
    """
    if not isinstance(specs, abc.Mapping):
        yield (
            f"columns is {kind_of(specs)}: give a dict of column names, such as "
            '{"photo": sparkdl.Image()}.'
        )
        return
    for name, spec in specs.items():
        named = {str(name), _INDEX.sub("", str(name))}  # a field of an RDD, such as "features[0]"
        if isinstance(spec, type) and issubclass(spec, (Image, Sequence, Convert)):
            yield f'columns["{name}"] is the class {spec.__name__}: give an instance of it.'
        elif not isinstance(spec, (Image, Sequence, Convert)):
            yield (
                f'columns["{name}"] is {kind_of(spec)}: give a sparkdl.Image, '
                "sparkdl.Sequence or sparkdl.Convert."
            )
        elif name == weight:
            yield f'columns["{name}"] is the weight, which is a number: leave it out of columns.'
        elif not named & {*features, *label}:
            yield (
                f'columns["{name}"] is neither a feature nor a label.'
                f"{nearest(str(name), [*features, *label])} Known: "
                f"{', '.join([*features, *label])}."
            )
        elif isinstance(spec, Sequence) and spec.lengths and not named & {*features}:
            yield f'columns["{name}"] has lengths=True, which is for features: the loss gets none.'


@dataclass(frozen=True, kw_only=True)
class NamedFunction:
    """A function, such as that of a ``Convert``, as a file names it.

    Nothing is imported before :meth:`load`, because an import needs trust.
    """

    name: str

    def load(self) -> abc.Callable[[Any], Any]:
        """Import the function.

        Raises:
            ParameterError: The function cannot be imported.
        """
        module, _, path = self.name.partition(":")
        try:
            return Convert(_resolve(module, path)).function
        except (ImportError, AttributeError, ValueError) as error:
            raise ParameterError(
                f'the function "{self.name}" cannot be imported ({error}). Put it on '
                "the Python path."
            ) from None


def specs_to_json(specs: Specs) -> dict[str, Any]:
    """Return the specifications as JSON values, by column.

    Raises:
        ParameterError: The function of a ``Convert`` has no importable name.
    """
    content: dict[str, Any] = {}
    for name, spec in specs.items():
        if isinstance(spec, Convert):
            function = name_of(spec.function, f'of column "{name}"')
            content[name] = {"kind": "convert", "function": function}
        else:
            content[name] = {"kind": type(spec).__name__.lower(), **asdict(spec)}
    return content


def specs_from_json(content: abc.Mapping[str, Any]) -> dict[str, Spec | NamedFunction]:
    """Return the specifications that :func:`specs_to_json` wrote.

    Functions come back as :class:`NamedFunction`, not yet imported.
    """
    specs: dict[str, Spec | NamedFunction] = {}
    for name, written in content.items():
        values = dict(written)
        kind = values.pop("kind", None)
        if kind == "image":
            specs[name] = Image(**values)
        elif kind == "sequence":
            specs[name] = Sequence(**values)
        elif kind == "convert":
            specs[name] = NamedFunction(name=values["function"])
        else:
            raise ParameterError(
                f'column "{name}" is of the kind {kind!r}, which this version does not know.'
            )
    return specs


def name_of(function: Any, where: str) -> str:
    """Return the name under which a file stores a function and by which it can be imported.

    ``where`` says in messages what the function belongs to.

    Raises:
        ParameterError: The function has no such name.
    """
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    try:
        if module and module != "__main__" and _resolve(module, path) is function:
            return f"{module}:{path}"
    except (ImportError, AttributeError, ValueError):
        pass
    shown = path or type(function).__name__
    raise ParameterError(
        f"the function {shown} {where} cannot be saved by name: define it at the top level of a module "
        "that can be imported."
    )


def _resolve(module: str, path: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Column:
    """An input or label column, or the weight.

    Attributes:
        name: The name of the column.
        dtype: The NumPy name of a sample's dtype.
        depth: The number of array levels of the column (0: a number).
        vector: The column holds ``pyspark.ml.linalg`` vectors.
        spec: The specification, if the type alone does not say how to read the column.
        weight: The column holds the weights of the samples.
        trained: For a ``Convert``, the field that its results had when the model was trained.
    """

    name: str
    dtype: str
    depth: int = 0
    vector: bool = False
    spec: Spec | None = None
    weight: bool = False
    trained: Field | None = None

    @property
    def grows(self) -> bool:
        """Return whether the tensor may be much larger than the column."""
        return self.vector or isinstance(self.spec, (Image, Convert))
