"""Tensors of a saved model beside its state_dict: buffers with ``persistent=False``; and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn

from sparkdl.errors import ModelError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def save_buffers(buffers: Mapping[str, torch.Tensor], draft: Path) -> None:
    """A safetensors file of them, each stored apart."""
    apart = {
        name: buffer.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, buffer in buffers.items()
    }
    safetensors.torch.save_file(apart, str(draft))


def load_buffers(module: nn.Module, file: str, folder: Path) -> None:
    """Give ``module`` the buffers of ``file``. Raises :class:`ModelError` where it has no such part."""
    for name, value in safetensors.torch.load_file(file).items():
        path, _, attribute = name.rpartition(".")
        try:
            owner = module.get_submodule(path)
            own = owner._buffers.get(attribute)
            if own is not None and (own.shape, own.dtype) == (value.shape, value.dtype):
                own.copy_(value)  # it may be in several places
            elif attribute in owner._buffers:
                owner._buffers[attribute] = value
            else:  # one that comes with the first forward pass
                owner.register_buffer(attribute, value, persistent=False)
        except (AttributeError, KeyError, TypeError) as error:
            raise ModelError(
                f'the model has no place for the buffer "{name}" of {folder}: {error}'
            ) from None


def take_dtypes(module: nn.Module, file: str) -> None:
    """Bring floating tensors of ``module`` into the dtypes in which ``file`` has them: they follow
    torch's default dtype, which may have been another where the model was trained."""
    with safetensors.safe_open(file, "pt") as saved:
        names = saved.keys()
        dtypes = {name: _DTYPES.get(saved.get_slice(name).get_dtype()) for name in names}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        dtype = dtypes.get(name)
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.detach().to(dtype)
