"""A trained model as a program that runs without its code: by ``torch.export``, or as ONNX."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import io
import itertools
import logging
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparkdl.codec.files import path_here
from sparkdl.data.ragged import model_inputs
from sparkdl.errors import ModelError, ParameterError, first_line, in_short, shown
from sparkdl.infer.forward import zeros_like
from sparkdl.infer.manifest import ModelData
from sparkdl.model.recipe import parts_of
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import to_tensors

FORMATS = ("torch.export", "onnx")
ROWS = 5
_LENGTHS = (7, 3, 67)
"""Lengths of rows to try the model on, which hardly any other size equals: the first that it takes."""
LONGEST = 1 << 11
"""The longest rows to try the model on."""
_SIZES = (2, 3, 4, 5, 6, 7, 8, 11, 16, 31, 64, 97, 1000, 65537)


def export(trained: ModelData, path: str | os.PathLike[str], kind: str, overwrite: bool) -> Path:
    """Write the model's program into a file, and return its path."""
    if kind not in FORMATS:
        raise ParameterError(f"format={shown(kind)}: use one of {', '.join(FORMATS)}.")
    if kind == "onnx" and not all(map(importlib.util.find_spec, ("onnx", "onnxscript"))):
        raise ParameterError(
            'format="onnx" needs libraries that are not installed: pip install onnx onnxscript (the '
            'extra "onnx")'
        )
    target = path_here(path).expanduser()
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} is there already: pass overwrite=True to replace it.")
    if target.is_dir() or not target.parent.is_dir():
        raise ParameterError(f'"{target}" is no path of a file in a folder that is there.')
    program = program_of(trained, kind)
    try:
        with quiet(), tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as folder:
            if kind == "onnx":  # the weights of a large model are a second file
                draft = f"{folder}/{target.name}"
                torch.onnx.export(program, dynamo=True, verbose=False).save(draft)  # type: ignore[union-attr]
            else:
                torch.export.save(program, f"{folder}/{target.name}")
            for name in sorted(os.listdir(folder), key=len, reverse=True):
                os.replace(f"{folder}/{name}", target.parent / name)
    except Exception as error:
        raise ModelError(
            f'the model cannot be written as format="{kind}": {in_short(error)}.'
        ) from error
    return target


def program_of(trained: ModelData, kind: str) -> torch.export.ExportedProgram:
    """Return the module as an exported program, for any number of rows and any length of them.

    Those of torch check sizes that they are not for when they run; those of ONNX do not.
    """
    names, name = trained.signature.inputs, type(trained.module).__name__
    try:
        with quiet(), seeded(0):
            trial = Trial.of(apart(trained))
            dims = [dict.fromkeys(free, torch.export.Dim.AUTO) for free in trial.free]
            program = torch.export.export(
                apart(trained).module,
                () if names else tuple(trial.inputs),
                dict(zip(names, trial.inputs, strict=True)) if names else None,
                dynamic_shapes=dict(zip(names, dims, strict=True)) if names else tuple(dims),
                strict=False,
            )
            trial.dims_of(program)
            guarded = "check_guards" in inspect.signature(program.module).parameters  # torch 2.9
            made = program.module(**({"check_guards": False} if guarded else {}))
            sizes = trial.sizes if kind == "onnx" else trial.sizes[:3]
            trial.compare(lambda inputs: call(made, names, inputs), sizes)
    except Exception as error:
        said = first_line(error) if isinstance(error, ModelError) else in_short(error)
        raise ModelError(
            f"torch.export cannot make a program of {name}: {said}. "
            "https://docs.pytorch.org/docs/stable/export.html says what a forward pass may do; or save "
            "the model with trained.save(path)."
        ) from error
    return program


def apart(trained: ModelData) -> ModelData:
    """Return the model with a copy of its module, for predictions, whose parameters are the same.

    What a trial or a trace leaves in a module stays in the copy.
    """
    same = {id(parameter): parameter for parameter in trained.module.parameters()}
    return replace(trained, module=copy.deepcopy(trained.module, same).eval())


@dataclass(frozen=True)
class Trial:
    """Inputs that a model takes, and what may vary of them."""

    trained: ModelData
    length: int  # of the rows whose length varies
    number: int  # that all integers are
    free: Sequence[Sequence[int]]  # for each input the dimensions whose length is not fixed
    sizes: list[tuple[int, int]]  # numbers of rows, and lengths, to compare results for

    @staticmethod
    def of(trained: ModelData) -> Trial:
        """Find inputs that the module takes. Raises what the module raises."""
        names, tries = trained.signature.inputs, list(itertools.product(_LENGTHS, (1, 0)))
        for length, number in tries:
            try:
                call(trained.module, names, samples(trained, ROWS, length, number))
                break
            except Exception:
                if (length, number) == tries[-1]:
                    raise
        some, others = samples(trained, ROWS, length), samples(trained, ROWS + 1, length + 1)
        free = [
            [dim for dim in range(a.ndim) if a.shape[dim] != b.shape[dim]]
            for a, b in zip(some, others, strict=True)
        ]
        sizes = [(ROWS, length), (1, length), (ROWS + 2, length + 1), (2, 1)]
        return Trial(trained, length, number, free, sizes)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Return inputs of :data:`ROWS` rows."""
        return samples(self.trained, ROWS, self.length, self.number)

    def dims_of(self, program: torch.export.ExportedProgram) -> list[list[Any]]:
        """Return the dimensions of each input: a length, or [name, least, most].

        Those of one name are equal. What holds for most sizes alone is added to :attr:`sizes`. Raises
        ModelError where the forward pass has made a constant of one, or depends on several.
        """
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        shapes = [values[name].shape for name in program.graph_signature.user_inputs]
        names: dict[Any, str] = {}
        dims: list[list[Any]] = []
        for shape, free, column in zip(shapes, self.free, self._columns, strict=True):
            for dim in free:
                names.setdefault(_symbol(shape[dim]), f"{column}.{dim}" if dim else "rows")
            dims.append([_dim(size, dim in free, names) for dim, size in enumerate(shape)])
        guards = shapes[0][0].node.shape_env.guards if self.free[0] else ()
        for guard in guards:
            self._check(shapes[0][0].node.shape_env.replace(guard.expr), names)
        return dims

    @property
    def _columns(self) -> list[int]:
        """Return for each input the number of the column that it is of."""
        return [
            number
            for number, field in enumerate(self.trained.fields[: self.trained.num_features])
            for _ in (("",) if field.padding is None else field.padding.names(""))
        ]

    def _check(self, relation: Any, names: Mapping[Any, str]) -> None:
        """Check a relation of sizes that the forward pass has relied on."""
        first: dict[str, Any] = {}
        for symbol, name in names.items():
            first.setdefault(name, symbol)
        relation = relation.subs({symbol: first[name] for symbol, name in names.items()})
        if not relation.is_Relational or _is_range(relation):
            return
        symbol, *others = relation.free_symbols
        against = [] if len(others) > 1 else _against(relation)
        small = [one for one in against if one <= LONGEST]
        if len(others) > 1 or (against and (others or not small)):
            raise ModelError(f"its forward pass goes another way by sizes: {relation}.")
        rows = names.get(symbol) == "rows"
        some = {*small[:3], *small[-1:]}
        self.sizes.extend((one, self.length) if rows else (2, one) for one in some)

    def takes(self, length: int) -> bool:
        """Return whether the module takes rows of a length, which is compared, too, if so."""
        with contextlib.suppress(Exception):
            inputs = samples(self.trained, 2, length, self.number)
            call(self.trained.module, self.trained.signature.inputs, inputs)
            self.sizes.append((2, length))
            return True
        return False

    def compare(
        self, program: Callable[[Sequence[Any]], Any], sizes: Iterable[tuple[int, int]]
    ) -> None:
        """Raise an error where a program does not return what the module does; it may be too short."""
        signature = self.trained.signature
        for rows, size in dict.fromkeys(sizes):
            inputs = samples(self.trained, rows, size, self.number)
            others = [tensor.clone() for tensor in inputs]
            try:
                with seeded(rows):
                    expected = call(self.trained.module, signature.inputs, inputs)
            except Exception:  # too short or too long for it
                continue
            pair: tuple[list[Any], list[Any]] = ([], [])
            with seeded(rows):
                for returned, leaves in zip((program(others), expected), pair, strict=True):
                    nesting(signature.output(returned), leaves)
            try:
                torch.testing.assert_close(*pair, equal_nan=True)
            except AssertionError as error:
                raise ModelError(
                    f"for {rows} rows of length {size}, its operations alone do not return what the "
                    f"module does ({first_line(error)})."
                ) from None


def call(module: nn.Module, names: Sequence[str], inputs: Sequence[Any]) -> Any:
    """Call a module on inputs, by keyword if they have names."""
    return module(**dict(zip(names, inputs, strict=True))) if names else module(*inputs)


@dataclass(frozen=True)
class Place:
    """The place of a tensor among all that a model returns."""

    number: int


def nesting(value: Any, leaves: list[Any]) -> Any:
    """Return plain nested values, with places in ``leaves`` for tensors and without other objects."""
    if isinstance(value, (torch.Tensor, torch.SymInt)):
        leaves.append(value)
        return Place(len(leaves) - 1)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        nested = [nesting(item, leaves) for item in value]
        return tuple(nested) if isinstance(value, tuple) else nested
    if parts := parts_of(value):
        return {str(name): nesting(part, leaves) for name, part in parts.items()}
    return value if value is None or type(value) in (bool, int, float, str) else None


def samples(trained: ModelData, rows: int, length: int, number: int = 0) -> list[torch.Tensor]:
    """Return inputs of the module: integers that are all ``number``, and random other numbers."""
    arrays = zeros_like(trained.fields[: trained.num_features], rows, length, number)
    tensors = trained.signature.model_inputs(to_tensors(model_inputs(arrays)))
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise ModelError("it takes sparse tensors, and torch exports programs of dense ones.")
    own = next((p.dtype for p in trained.module.parameters() if p.is_floating_point()), None)
    own = own if own in (torch.bfloat16, torch.float16) else None
    draws = torch.Generator().manual_seed(rows)
    return [
        torch.randn(t.shape, dtype=own or t.dtype, generator=draws) if t.is_floating_point() else t
        for t in tensors
    ]


def _dim(size: Any, free: bool, names: Mapping[Any, str]) -> Any:
    symbol = _symbol(size)
    if symbol is None and free:  # a constant, or it depends on another one
        raise ModelError(
            "its forward pass has made a constant of the number or the length of rows, as len(x) does: "
            "x.shape[0] does not."
        )
    if symbol is None:
        return int(size)
    known = size.node.shape_env.var_to_range[symbol]
    least, most = int(known.lower), known.upper
    return [names[symbol], 0 if least <= 2 else least, int(most) if most.is_Integer else None]


def _symbol(size: Any) -> Any:
    """Return the symbol of a size that varies, or None."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return expression if getattr(expression, "is_symbol", False) else None


def _is_range(relation: Any) -> bool:
    """Return whether a relation of sizes only bounds one of them."""
    bounds = relation.rel_op in ("<", "<=", ">", ">=")
    return bounds and len(relation.free_symbols) == 1 and all(one.is_Atom for one in relation.args)


def _against(relation: Any) -> list[int]:
    """Return sizes, of two or more, for which a relation does not hold, as far as some of them show."""
    symbols = sorted(relation.free_symbols, key=str)
    numbers = [abs(int(one)) for one in relation.atoms() if one.is_Integer and one]
    divisors = (1, *numbers) if len(symbols) == 1 else (1,)
    near = {
        a // b + more for a in (*numbers, sum(numbers)) for b in divisors for more in (-1, 0, 1)
    }
    sizes = sorted({*_SIZES, *(one for one in near if 1 < one < sys.maxsize)})
    return [
        some[0]
        for some in itertools.product(sizes, repeat=len(symbols))
        if not relation.subs(dict(zip(symbols, some, strict=True)))
    ]


_ONE_THREAD = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch says of its own on the way: in one thread at a time, as this is global."""
    loggers = [
        logging.getLogger(name) for name in ("torch.onnx", "torch.fx.experimental.symbolic_shapes")
    ]
    with _ONE_THREAD, warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        levels = [logger.level for logger in loggers]
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
