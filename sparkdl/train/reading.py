"""Reading a saved model: errors that name the file, and the module that its weights are for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from sparkdl.errors import ModelError, UserError


@contextlib.contextmanager
def undamaged(file: Path) -> Iterator[None]:
    """A file that is missing, cut short or changed is a :class:`ModelError` that names it."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{file} is damaged ({type(error).__name__}: {error}). Save the model again, or take "
            "another copy of the folder."
        ) from error


def built(build: Any, folder: Path) -> nn.Module:
    """The module that the weights are for."""
    if isinstance(build, nn.Module):
        return build
    try:
        module = build()
    except Exception as error:
        raise ModelError(
            f"the model of {folder} cannot be built ({type(error).__name__}: {error}). Pass "
            "model=make_model, a function without arguments that builds the module, or a module."
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"model() returned a {type(module).__name__}: it must return a torch.nn.Module."
        )
    return module
