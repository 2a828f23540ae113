"""One batch through a model: arrays in, arrays out, in the precision that was asked for."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.data.ragged import Rows, model_inputs
from sparkdl.errors import ModelError, ParameterError, UserError
from sparkdl.infer.output import as_numpy
from sparkdl.infer.scoring.outputs import OutputColumn, value_of
from sparkdl.infer.shipped_module import device_of
from sparkdl.metrics.scorer import in_rows
from sparkdl.model.recipe import Signature
from sparkdl.replica.compute import to_tensors

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NARROW = 128
"""The most channels of a convolution that is faster on the CPU in the layout "channels last"."""
QUANTIZED = (None, "int8")


@dataclass(frozen=True)
class Forward:
    """The forward pass of a model."""

    module: nn.Module  # in evaluation mode
    signature: Signature
    precision: str = "fp32"  # one of PRECISIONS

    def returned(self, arrays: Sequence[Rows]) -> Any:
        """Return what the model returns for a batch; raise ModelError if it fails."""
        device = device_of(self.module)
        inputs = self._inputs(model_inputs(arrays), device)
        with torch.no_grad(), self._autocast(device):
            try:
                return self.signature.call(self.module, inputs)
            except (torch.OutOfMemoryError, UserError):
                raise
            except Exception as error:
                shapes = ", ".join(
                    f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in inputs
                )
                raise ModelError(
                    f"the model fails on a batch of {shapes}: {type(error).__name__}: "
                    f"{str(error).strip().rstrip('. ')}."
                ) from error

    def predictions(
        self, arrays: Sequence[Rows], columns: Iterable[OutputColumn]
    ) -> list[np.ndarray]:
        """Return the values of each column for a batch."""
        count, fixed = len(arrays[0]), getattr(self.module, "fixed_rows", None)
        if fixed is not None and count < fixed:
            filled = np.minimum(np.arange(fixed), count - 1)  # the last row again
            arrays = [rows[filled] for rows in arrays]
        returned = self.returned(arrays)
        found = []
        for column in columns:
            with torch.no_grad():
                value = value_of(returned, column.part)
            found.append(as_numpy(in_rows(value, len(arrays[0]), column.output.dimensions))[:count])
            if len(found[-1]) != count:
                raise ModelError(
                    f'output "{column.name}" has {len(found[-1])} rows for a batch of {count}.'
                )
        return found

    def _inputs(self, arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        """Return the arrays as tensors; floats take the dtype of a model in half precision."""
        inputs = to_tensors(arrays, device)
        own = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), None)
        if own not in (torch.bfloat16, torch.float16):
            return inputs
        return [t.to(own) if t.is_floating_point() else t for t in inputs]

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return (
            contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
        )


def for_convolutions(module: nn.Module) -> nn.Module:
    """Return a copy of a module with narrow convolutions that has the layout in which they are fast.

    That is "channels last", whose results differ in the last bits. Any other module is returned itself.
    """
    layers = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    narrow = all(
        max(one.in_channels, one.out_channels) <= NARROW and one.groups == 1 for one in layers
    )
    if not layers or not narrow:
        return module
    try:
        return copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    except Exception:  # it does not copy
        return module


def quantized(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose linear and recurrent layers compute in int8, on the CPU.

    Weights are quantized here, activations batch by batch (dynamic quantization).
    """
    from torch.ao import quantization

    kinds = {nn.Linear, nn.LSTM, nn.GRU}
    if not any(type(part) in kinds for part in module.modules()):
        raise ModelError(
            f'quantize="int8" is for layers of {", ".join(sorted(k.__name__ for k in kinds))}, and the '
            f"model ({type(module).__name__}) has none."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch recommends another package in its place
            return quantization.quantize_dynamic(module, kinds, dtype=torch.qint8)  # type: ignore[arg-type]
    except Exception as error:
        raise ModelError(
            f'quantize="int8": torch cannot quantize the model: {type(error).__name__}: {error}'
        ) from error


def check_options(precision: Any, quantize: Any) -> None:
    """Raise :class:`ParameterError` for options that are unknown or do not go together."""
    if precision not in PRECISIONS:
        raise ParameterError(f"precision={precision!r}: use one of {', '.join(PRECISIONS)}.")
    if quantize not in QUANTIZED:
        raise ParameterError(f'quantize={quantize!r}: use "int8", or None.')
    if quantize and precision != "fp32":
        raise ParameterError(
            f'quantize="int8" and precision={precision!r} exclude each other: leave one of them out.'
        )
