"""A trained model as a program that runs without its code: by ``torch.export``, or as ONNX."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparkdl.data.ragged import model_inputs
from sparkdl.errors import ModelError, ParameterError, shown
from sparkdl.infer.manifest import ModelData
from sparkdl.infer.trial import ROWS, zeros_like
from sparkdl.replica.compute import to_tensors

FORMATS = ("torch.export", "onnx")


def export(trained: ModelData, path: str | os.PathLike[str], kind: str, overwrite: bool) -> Path:
    """Write the model's program into a file, and return its path."""
    if kind not in FORMATS:
        raise ParameterError(f"format={shown(kind)}: use one of {', '.join(FORMATS)}.")
    if kind == "onnx" and not all(map(importlib.util.find_spec, ("onnx", "onnxscript"))):
        raise ParameterError(
            'format="onnx" needs libraries that are not installed: pip install onnx onnxscript (the '
            'extra "onnx")'
        )
    target = Path(path).expanduser()
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} is there already: pass overwrite=True to replace it.")
    program = program_of(trained)
    draft = target.with_name(f".{target.stem}.{secrets.token_hex(8)}.part{target.suffix}")
    try:
        with quiet():
            if kind == "onnx":
                torch.onnx.export(program, dynamo=True, verbose=False).save(draft)  # type: ignore[union-attr]
            else:
                torch.export.save(program, draft)
        os.replace(draft, target)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f'the model cannot be written as format="{kind}": {told(error)}'
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return target


def program_of(trained: ModelData) -> torch.export.ExportedProgram:
    """Return the module as an exported program, for any number of rows and any length of them."""
    names = trained.signature.inputs
    inputs, more = samples(trained, ROWS), samples(trained, ROWS + 1, ROWS + 1)
    dims = [dict.fromkeys(free, torch.export.Dim.AUTO) for free in free_dims(inputs, more)]
    try:
        with quiet():
            program = torch.export.export(
                trained.module.eval(),
                () if names else tuple(inputs),
                dict(zip(names, inputs, strict=True)) if names else None,
                dynamic_shapes=dict(zip(names, dims, strict=True)) if names else tuple(dims),
            )
    except Exception as error:
        raise ModelError(
            f"torch.export cannot make a program of {type(trained.module).__name__}: {told(error)} "
            "https://docs.pytorch.org/docs/stable/export.html says what a forward pass may do; or save "
            "the model with trained.save(path)."
        ) from error
    more = samples(trained, 2 * ROWS)
    try:
        program.module()(*(() if names else more), **dict(zip(names, more, strict=False)))
    except Exception as error:
        raise ModelError(
            f"the program that torch.export makes of {type(trained.module).__name__} takes batches of "
            f"{ROWS} rows only: its forward pass has made the number of rows a constant. Use "
            f"x.shape[0] in it, and no number that was computed before. ({type(error).__name__})"
        ) from error
    return program


def told(error: Exception) -> str:
    """Return the kind of an error and its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def samples(
    trained: ModelData, rows: int, length: int = ROWS, number: int = 0
) -> list[torch.Tensor]:
    """Return inputs of the module: integers that are all ``number``, and random other numbers."""
    arrays = zeros_like(trained.fields[: trained.num_features], rows, length, number)
    tensors = trained.signature.model_inputs(to_tensors(model_inputs(arrays)))
    own = next((p.dtype for p in trained.module.parameters() if p.is_floating_point()), None)
    own = own if own in (torch.bfloat16, torch.float16) else None
    draws = torch.Generator().manual_seed(0)
    return [
        torch.randn(t.shape, dtype=own or t.dtype, generator=draws) if t.is_floating_point() else t
        for t in tensors
    ]


def free_dims(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return, for each input of the model, the dimensions whose length is not fixed."""
    return [
        [dim for dim in range(a.ndim) if a.shape[dim] != b.shape[dim]]
        for a, b in zip(some, others, strict=True)
    ]


class quiet(warnings.catch_warnings):
    """Silences what torch says of its own on the way."""

    def __enter__(self) -> Any:
        found = super().__enter__()
        warnings.simplefilter("ignore")
        for name in ("torch.onnx", "torch.fx.experimental.symbolic_shapes"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return found
