"""Process-wide torch settings that affect numbers: a driver's settings also apply in its tasks.

A user sets them once, at the top of a program or a notebook, and by themselves they reach no other
process. For example, a model with tensors of the default dtype would be built with another dtype on the
executors. Workers are shared, so each task restores the settings that it found.
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
"""Settings that exist since torch 2.9.

Once one of them is set, torch's earlier names for the same settings raise an error. So a process sets
exactly what the driver has set.
"""


@dataclass(frozen=True)
class Numerics:
    """Settings by name; settings that are not in ``values`` are left alone."""

    values: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def here() -> Numerics:
        """Return the present settings of this process."""
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
        except RuntimeError:  # the newer names are in use
            found.pop("matmul precision", None)
            found.update(_backends(_PRECISIONS))
        found.update(_backends(_FLAGS))
        return Numerics(tuple(found.items()))

    def use(self) -> None:
        """Apply these settings until the task ends (:func:`put_back`)."""
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
                with contextlib.suppress(AttributeError):  # torch of another version lacks it
                    setattr(_backend(path), attribute, value)


def put_back() -> None:
    """Restore the settings from before the first :meth:`Numerics.use`."""
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
        with contextlib.suppress(AttributeError):  # torch of another version lacks it
            found[name] = getattr(_backend(path), attribute)
    return found


def _backend(path: list[str]) -> Any:
    place: Any = torch.backends
    for part in path:
        place = getattr(place, part)
    return place


@dataclass
class _Process:
    """The settings that a task applied, if any, and those to restore afterwards."""

    used: Numerics | None = None
    before: Numerics | None = None


_process = _Process()
