"""How a column becomes a tensor where its type alone does not say it: images, sequences, functions.

Given as ``Trainer(columns={"photo": sparkdl.Image(size=(32, 32))})``. A column without a
specification is read by its type, see :mod:`sparkdl.data.schema`.
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
"""Pillow's name of a colour mode -> channels."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """Images: encoded bytes (PNG, JPEG, ...), or the struct of Spark's ``image`` data source.

    Decoded on the executors to (C, H, W), channels in the order of ``mode``. Encoded bytes and any
    change of size or mode need Pillow, the extra ``images``.
    """

    size: tuple[int, int] | None = None
    """(height, width) to which every image is resized, bilinearly; None: they must be of one size."""
    mode: str = "RGB"
    """"RGB", "L" (grey) or "RGBA"; other images are converted to it."""
    scale: float | None = 1 / 255
    """What the bytes 0 to 255 are multiplied by, as the model's floats; None: they stay uint8, a
    quarter of the memory, and that is what ``augment`` or the model gets."""

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
    """Rows of varying length: a column ``array<number>``, or ``array<array<number>>`` for (T, D).

    Stored as they are, padded in each mini-batch to the longest row of it, at the end.
    """

    max_length: int | None = None
    """Longer rows are cut, at the end."""
    padding: float = 0
    """The value that shorter rows are filled up with."""
    lengths: bool = False
    """The model gets the lengths as one more input directly after this one: int64, shape (B,)."""
    pad_to_max: bool = False
    """Pad to ``max_length`` always, so that every mini-batch has the same shape."""

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
        """How mini-batches of it are padded."""
        return Padding(
            value=self.padding,
            length=self.max_length if self.pad_to_max else None,
            lengths=self.lengths,
        )


@dataclass(frozen=True)
class Convert:
    """Any column through ``function(value) -> number or array``, row by row on the executors.

    ``value`` is the Python value (a string, a dict for a struct, None for a null). All results must
    have one shape. Floats become the model's floats, unsigned integers int64.
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
"""Of a field of an RDD's records: "features[0]"."""


def check_specs(
    specs: object, features: abc.Sequence[str], label: abc.Sequence[str], weight: str | None = None
) -> abc.Iterator[str]:
    """What is wrong with ``Trainer.columns`` beside the other parameters, one sentence each."""
    if not isinstance(specs, abc.Mapping):
        yield (
            f"columns is {kind_of(specs)}: give a dict of column names, such as "
            '{"photo": sparkdl.Image()}.'
        )
        return
    for name, spec in specs.items():
        named = {str(name), _INDEX.sub("", str(name))}  # of an RDD's fields "features[0]", say
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
    """The function of a ``Convert``, say, as a file names it. Nothing is imported before :meth:`load`:
    it needs trust."""

    name: str

    def load(self) -> abc.Callable[[Any], Any]:
        """Import the function. Raises :class:`ParameterError` where that fails."""
        module, _, path = self.name.partition(":")
        try:
            return Convert(_resolve(module, path)).function
        except (ImportError, AttributeError, ValueError) as error:
            raise ParameterError(
                f'the function "{self.name}" cannot be imported ({error}). Put it on '
                "the Python path."
            ) from None


def specs_to_json(specs: Specs) -> dict[str, Any]:
    """The specifications as JSON values, by column.

    Raises :class:`ParameterError` for a ``Convert`` whose function has no importable name.
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
    """What :func:`specs_to_json` wrote; functions as :class:`NamedFunction`, not yet imported."""
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
    """The name by which a file says a function, which can be imported by it. Raises
    :class:`ParameterError` for one that has none; ``where``: what it is of."""
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
    """One input or label column, or the weight.

    ``dtype``: NumPy name of what a sample holds. ``depth``: how many array levels the column has
    (0: a number). ``vector``: a ``pyspark.ml.linalg`` vector. ``spec``: how it is read, where its
    type does not say it. ``weight``: the weights of the samples. ``trained``: of a function's results,
    what they were when the model was trained.
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
        """Whether the tensor may be much larger than the column."""
        return self.vector or isinstance(self.spec, (Image, Convert))
