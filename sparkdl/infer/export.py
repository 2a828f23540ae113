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

from sparkdl.data.fields import Field
from sparkdl.data.ragged import Rows, concatenate, model_inputs
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
        with _quiet():
            if kind == "onnx":
                torch.onnx.export(program, dynamo=True, verbose=False).save(draft)  # type: ignore[union-attr]
            else:
                torch.export.save(program, draft)
        os.replace(draft, target)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f'the model cannot be written as format="{kind}": {type(error).__name__}: '
            f"{str(error).strip().partition(chr(10))[0]}"
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return target


def program_of(trained: ModelData) -> torch.export.ExportedProgram:
    """Return the module as an exported program, for any number of rows and any length of them."""
    fields, names = trained.fields[: trained.num_features], trained.signature.inputs
    inputs = _inputs(trained, zeros_like(fields))
    dims = [dict.fromkeys(free, torch.export.Dim.AUTO) for free in _free(fields)]
    try:
        with _quiet():
            program = torch.export.export(
                trained.module.eval(),
                () if names else tuple(inputs),
                dict(zip(names, inputs, strict=True)) if names else None,
                dynamic_shapes=dict(zip(names, dims, strict=True)) if names else tuple(dims),
            )
    except Exception as error:
        raise ModelError(
            f"torch.export cannot make a program of {type(trained.module).__name__}: "
            f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]} "
            "https://docs.pytorch.org/docs/stable/export.html says what a forward pass may do; or save "
            "the model with trained.save(path)."
        ) from error
    more = _inputs(trained, [concatenate([rows, rows]) for rows in zeros_like(fields)])
    try:
        program.module()(*(() if names else more), **dict(zip(names, more, strict=False)))
    except Exception as error:
        raise ModelError(
            f"the program that torch.export makes of {type(trained.module).__name__} takes batches of "
            f"{ROWS} rows only: its forward pass has made the number of rows a constant. Use "
            f"x.shape[0] in it, and no number that was computed before. ({type(error).__name__})"
        ) from error
    return program


def _inputs(trained: ModelData, arrays: Sequence[Rows]) -> list[torch.Tensor]:
    tensors = to_tensors(model_inputs(arrays))
    own = next((p.dtype for p in trained.module.parameters() if p.is_floating_point()), None)
    if own not in (torch.bfloat16, torch.float16):
        return tensors
    return [t.to(own) if t.is_floating_point() else t for t in tensors]


def _free(fields: Sequence[Field]) -> list[tuple[int, ...]]:
    """Return, for each input of the model, the dimensions whose length is not fixed."""
    free: list[tuple[int, ...]] = []
    for field in fields:
        if field.padding is None:
            free.append((0,))
            continue
        length = (0,) if field.padding.length else (0, 1)
        free += [length, *([(0,)] if field.padding.lengths else [])]
        free += [length] if field.padding.mask else []
    return free


class _quiet(warnings.catch_warnings):
    """Silences what torch says of its own on the way."""

    def __enter__(self) -> Any:
        found = super().__enter__()
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        return found
