"""torch's settings of a whole process that change numbers: those of the driver hold in its tasks too.

A user sets them once, at the top of a program or a notebook, and they reach no other process by
themselves: a model whose tensors are of the default dtype would be built of others on the executors.
Workers are shared, so a task puts back what was there before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_FLAGS = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "mkldnn.enabled",
)
_PRECISIONS = tuple(
    f"{part}fp32_precision"
    for part in (
        *("", "cuda.matmul.", "cudnn.", "cudnn.conv.", "cudnn.rnn."),
        *("mkldnn.", "mkldnn.matmul.", "mkldnn.conv.", "mkldnn.rnn."),
    )
)
"""Since torch 2.9. Once one of these is set, torch's earlier names for the same raise an error, so that
a process sets what the driver has set."""


@dataclass(frozen=True)
class Numerics:
    """The settings by name; those that are not in ``values`` are left alone."""

    values: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def here() -> Numerics:
        """As they are in this process now."""
        found: dict[str, Any] = {
            "default dtype": torch.get_default_dtype(),
            "deterministic": (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
        }
        try:
            found["matmul precision"] = torch.get_float32_matmul_precision()
            found["cudnn.allow_tf32"] = torch.backends.cudnn.allow_tf32
        except RuntimeError:  # the later names are in use
            found.pop("matmul precision", None)
            found.update(_backends(_PRECISIONS))
        found.update(_backends(_FLAGS))
        return Numerics(tuple(found.items()))

    def use(self) -> None:
        """Compute with them, until the task ends (:func:`put_back`)."""
        if self == _process.used:
            return
        now = Numerics.here()
        if _process.before is None:
            _process.before = now
        self._set(now)
        _process.used = self

    def _set(self, now: Numerics) -> None:
        known = dict(now.values)
        for name, value in self.values:
            if name in known and known[name] == value:
                continue
            if name in _SETTERS:
                _SETTERS[name](value)
            else:
                *path, attribute = name.split(".")
                with contextlib.suppress(AttributeError):  # another version of torch
                    setattr(_backend(path), attribute, value)


def put_back() -> None:
    """Compute with what there was before the first :meth:`Numerics.use`."""
    if _process.before is not None:
        _process.before._set(Numerics.here())
        _process.before = _process.used = None


_SETTERS: dict[str, Callable[[Any], None]] = {
    "default dtype": torch.set_default_dtype,
    "deterministic": lambda flags: torch.use_deterministic_algorithms(flags[0], warn_only=flags[1]),
    "matmul precision": torch.set_float32_matmul_precision,
}


def _backends(names: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for name in names:
        *path, attribute = name.split(".")
        with contextlib.suppress(AttributeError):  # of another version of torch
            found[name] = getattr(_backend(path), attribute)
    return found


def _backend(path: list[str]) -> Any:
    place: Any = torch.backends
    for part in path:
        place = getattr(place, part)
    return place


@dataclass
class _Process:
    """``used``: what is computed with, where a task said so; ``before``: what to put back."""

    used: Numerics | None = None
    before: Numerics | None = None


_process = _Process()
